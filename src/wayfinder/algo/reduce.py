"""The one reduction of policy, KL and entropy terms, and the weights that make it exact.

A micro-batch is a flat stream of loss tokens: every per-token tensor is [num_tokens], and
`sequence_index` says which sequence a token belongs to. A sequence is one episode, also when it was
split into several history windows. Then every mode is

    sum over tokens of value * weight / global_denominator

    mode            weight of a token    global_denominator
    token_mean      1                    tokens of the batch          DAPO, arXiv:2503.14476
    sequence_mean   1 / length           sequences of the batch       GRPO, arXiv:2402.03300
    constant        1                    sequences * constant_length  Dr. GRPO, arXiv:2503.20783

where `length` is the number of loss tokens of the whole sequence and "the batch" is everything that
one optimizer step sees, over all micro-batches and ranks. Both come from `token_weights`, called
once per step on global lengths. Partial sums simply add up, so any split into micro-batches, ranks
or windows, and any packing or padding, gives the same update.

FSDP averages gradients over ranks: multiply the loss by the number of ranks before `backward`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wayfinder.choices import ReductionMode


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """Weights of one optimizer step. A token of sequence s has weight `per_sequence[s]`."""

    per_sequence: np.ndarray  # float64 [num_sequences], 0 for a sequence without loss tokens
    global_denominator: float


def token_weights(
    lengths: Sequence[int], mode: ReductionMode | str, constant_length: float | None = None
) -> TokenWeights:
    """Weights and denominator from the loss tokens of every sequence of the step.

    `lengths` [num_sequences] counts the loss tokens over all windows of a sequence, on all ranks.
    A sequence of length 0 (failed, masked out) counts nowhere: the update is that of the batch
    without it. A sequence left out of the stream only because its advantage is zero keeps its
    length here. With no loss token at all the denominator is 1, so that an empty step divides zero
    by one. Raises `ValueError` for negative lengths, and for mode `constant` without a positive
    `constant_length`.
    """
    mode = ReductionMode(mode)
    counts = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if (counts < 0).any():
        raise ValueError(f"lengths must not be negative, found {int(counts.min())}")
    present = counts > 0
    num_sequences = int(present.sum())
    weights = present.astype(np.float64)
    match mode:
        case ReductionMode.token_mean:
            denominator = float(counts.sum())
        case ReductionMode.sequence_mean:
            weights[present] = 1.0 / counts[present]
            denominator = float(num_sequences)
        case ReductionMode.constant:
            if constant_length is None or not constant_length > 0:
                raise ValueError(
                    f"reduction mode constant needs constant_length > 0, not {constant_length}"
                )
            denominator = num_sequences * float(constant_length)
    return TokenWeights(per_sequence=weights, global_denominator=denominator or 1.0)


def reduce(values: Tensor, token_weight: Tensor, global_denominator: float) -> Tensor:
    """This stream's part of the batch's reduction: a scalar that carries the graph of `values`.

    `values` and `token_weight` are [num_tokens]. An empty stream gives an exact zero that can be
    differentiated (all gradients zero), so its rank still takes part in the backward collectives.
    Raises `ValueError` if the shapes differ or the denominator is not positive.
    """
    if values.ndim != 1 or values.shape != token_weight.shape:
        raise ValueError(
            f"values and token_weight must be [num_tokens] of one length, not "
            f"{tuple(values.shape)} and {tuple(token_weight.shape)}"
        )
    if not (math.isfinite(global_denominator) and global_denominator > 0):
        raise ValueError(f"global_denominator must be positive, not {global_denominator}")
    return (values * token_weight).sum() / global_denominator


def sequence_sums(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Sums per sequence, float64 [num_sequences]; add them over micro-batches and ranks.

    Detached: for log ratios and penalties, which are constants of the update.
    """
    if values.ndim != 1 or values.shape != sequence_index.shape:
        raise ValueError(
            f"values and sequence_index must be [num_tokens] of one length, not "
            f"{tuple(values.shape)} and {tuple(sequence_index.shape)}"
        )
    sums = torch.zeros(num_sequences, dtype=torch.float64, device=values.device)
    return sums.index_add(0, sequence_index, values.detach().double())


def whole_sequence_sums(values: Tensor, sequence_index: Tensor, sequence_length: Tensor) -> Tensor:
    """Each token's sum over its whole sequence, detached, [num_tokens] of the dtype of `values`.

    Right only if no sequence is split: `sequence_length` [num_tokens] holds the loss tokens of each
    token's whole sequence, and `ValueError` is raised where this stream has another number.
    """
    present, position, counts = torch.unique(
        sequence_index, return_inverse=True, return_counts=True
    )
    short = counts[position] != sequence_length
    if short.any():
        first = int(short.nonzero()[0])
        raise ValueError(
            f"sequence {int(sequence_index[first])} has {int(counts[position[first]])} of its "
            f"{int(sequence_length[first])} loss tokens in this micro-batch; a sequence-level ratio"
            " needs all of them, or the ratio of the whole sequence given from outside"
        )
    return sequence_sums(values, position, len(present)).to(values.dtype)[position]

"""Importance weights for the gap between the engine that sampled and the trainer that learns.

The engine's distribution `mu` and the trainer's `old` are one policy computed twice and differ by
rounding, or by more when something is wrong. With `m_t = log old(a_t) - log mu(a_t)`:

    none            1
    token           min(exp(m_t), cap)
    sequence        min(exp(sum over the sequence of m_t), cap), one weight for all its tokens
    sequence_mask   exp(sum over the sequence of m_t) within [1 / cap, cap], else 0

`token` and `sequence` are truncated importance sampling (Ionides 2008; for engine and trainer Yao
et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training");
`sequence_mask` is its masked form (Liu et al. 2025, "When Speed Kills Stability: Demystifying RL
Collapse from the Training-Inference Mismatch"), with a lower bound as well. Weights are constants
of the update and multiply the policy term only. A weight of zero does not change the denominators
of the reduction: it is the value of an estimator, not a token that does not exist.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wayfinder.algo.kl import exp_log_ratio
from wayfinder.choices import ImportanceMode


class ImportanceWeights(NamedTuple):
    weight: Tensor  # [num_tokens], detached
    capped: Tensor  # bool [num_tokens]: truncated or dropped


def importance_weights(
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mode: ImportanceMode | str,
    cap: float,
    sequence_mismatch: Tensor | None = None,
) -> ImportanceWeights:
    """Weights of the table above, all inputs [num_tokens] and treated as constants.

    `sequence_mismatch` is each token's sum of `m_t` over its whole sequence; the sequence modes
    need it. Raises `ValueError` for lengths that differ, a cap below 1, or if it is missing.
    """
    mode = ImportanceMode(mode)
    if old_logprobs.shape != behavior_logprobs.shape:
        raise ValueError(
            f"old_logprobs and behavior_logprobs must have one length, not "
            f"{tuple(old_logprobs.shape)} and {tuple(behavior_logprobs.shape)}"
        )
    if not cap >= 1:
        raise ValueError(f"cap of importance weights must be at least 1, not {cap}")
    if mode is ImportanceMode.none:
        return ImportanceWeights(
            torch.ones_like(old_logprobs), torch.zeros_like(old_logprobs, dtype=torch.bool)
        )
    if mode is ImportanceMode.token:
        ratio = exp_log_ratio((old_logprobs - behavior_logprobs).detach())
    else:
        if sequence_mismatch is None or sequence_mismatch.shape != old_logprobs.shape:
            raise ValueError(f"importance mode {mode} needs sequence_mismatch [num_tokens]")
        ratio = exp_log_ratio(sequence_mismatch.detach())
    if mode is ImportanceMode.sequence_mask:
        dropped = (ratio > cap) | (ratio < 1 / cap)
        return ImportanceWeights(ratio.masked_fill(dropped, 0.0), dropped)
    return ImportanceWeights(ratio.clamp(max=cap), ratio > cap)

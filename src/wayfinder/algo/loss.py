"""The one function that puts policy, KL and entropy terms of a micro-batch together.

    loss = importance weight * policy term + kl_coef * KL - entropy_coef * entropy

each reduced by `reduce.reduce` with the same weights and denominator. The terms stand in
`surrogate`, `kl` and `importance`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wayfinder.algo.importance import importance_weights
from wayfinder.algo.kl import kl_values
from wayfinder.algo.reduce import reduce, whole_sequence_sums
from wayfinder.algo.surrogate import TokenLoss, cispo, gspo, ppo_clip, reinforce
from wayfinder.choices import ImportanceMode, KlKind, KlPlacement, LossKind, ReductionMode

# Diagnostics that are divided by the global denominator already; the others are sums over tokens.
LOSS_TERMS = ("loss", "policy_loss", "kl_loss", "entropy_loss")


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What the loss is made of.

    Enumerations may be given by name. Raises `ValueError` for a name that does not exist and for
    values that are out of range or do not go together.
    """

    loss: LossKind
    clip_low: float
    clip_high: float
    dual_clip: float | None = None  # ppo_clip only, above 1
    kl_coef: float = 0.0
    kl_kind: KlKind = KlKind.k3_k2grad
    kl_placement: KlPlacement = KlPlacement.loss
    entropy_coef: float = 0.0
    importance: ImportanceMode = ImportanceMode.none
    importance_cap: float = 2.0
    reduction: ReductionMode = ReductionMode.token_mean
    constant_length: float | None = None  # read by reduction `constant` only

    def __post_init__(self) -> None:
        for name, kind in (
            ("loss", LossKind),
            ("kl_kind", KlKind),
            ("kl_placement", KlPlacement),
            ("importance", ImportanceMode),
            ("reduction", ReductionMode),
        ):
            object.__setattr__(self, name, kind(getattr(self, name)))
        checks = (
            (0 <= self.clip_low <= 1, "clip_low", "between 0 and 1"),
            (0 <= self.clip_high < math.inf, "clip_high", "at least 0"),
            (0 <= self.kl_coef < math.inf, "kl_coef", "at least 0"),
            (math.isfinite(self.entropy_coef), "entropy_coef", "finite"),
            (1 <= self.importance_cap < math.inf, "importance_cap", "at least 1"),
            (
                self.dual_clip is None or (self.loss is LossKind.ppo_clip and self.dual_clip > 1),
                "dual_clip",
                "above 1 with loss ppo_clip, and None with any other",
            ),
            (
                (self.constant_length or 0) > 0 or self.reduction is not ReductionMode.constant,
                "constant_length",
                "above 0 with reduction constant",
            ),
        )
        for holds, name, expected in checks:
            if not holds:
                raise ValueError(f"{name} must be {expected}, not {getattr(self, name)}")

    @property
    def has_kl_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_placement is KlPlacement.loss

    @property
    def is_sequence_level(self) -> bool:
        """A token's loss depends on the other tokens of its episode."""
        return self.loss is LossKind.gspo or self.importance.is_sequence_level


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """The loss tokens of one micro-batch; every tensor is [num_tokens] on one device.

    Log-probs are float32 or float64 and of the distribution that was sampled from (logits / T).
    Only `logprobs` and `entropies` are differentiated. A tensor that one micro-batch of a step has,
    all of them have, the empty ones included: then the diagnostics have the same keys.

    `gspo` and the sequence modes of importance need statistics of whole sequences. Either give
    `sequence_length` and never split a sequence over micro-batches (checked), or give the statistic
    itself, made with `reduce.sequence_sums` over all micro-batches.
    """

    logprobs: Tensor  # current policy, with gradient
    old_logprobs: Tensor  # trainer, before the first update of the step
    behavior_logprobs: Tensor  # engine, at sampling
    advantages: Tensor  # the episode's scalar at each of its tokens
    token_weight: Tensor  # reduce.token_weights, at each token's sequence
    sequence_index: Tensor  # int64
    global_denominator: float
    reference_logprobs: Tensor | None = None
    entropies: Tensor | None = None  # of the whole distribution at each token, with gradient
    sequence_length: Tensor | None = None  # int64, loss tokens of the token's whole sequence
    sequence_log_ratio: Tensor | None = None  # mean of logprobs - old_logprobs over the sequence
    sequence_mismatch: Tensor | None = None  # sum of old - behavior log-probs over the sequence

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        if len(shape) != 1:
            raise ValueError(f"logprobs must be [num_tokens], not {tuple(shape)}")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.shape != shape:
                raise ValueError(
                    f"{name} must be [{shape[0]}] like logprobs, not {tuple(value.shape)}"
                )
            if (
                name.endswith("logprobs")
                and value is not None
                and value.dtype not in (torch.float32, torch.float64)
            ):
                # The ratio of two log-probs rounded to bfloat16 is off by percents.
                raise ValueError(f"{name} must be float32 or float64, not {value.dtype}")
        if self.sequence_index.dtype is not torch.int64:
            raise ValueError(f"sequence_index must be int64, not {self.sequence_index.dtype}")


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """`loss`: this micro-batch's part, divided by the global denominator but not by ranks.

    `sums`: detached float64 scalars that add up over micro-batches and ranks; `averaged` turns the
    totals into metrics.
    """

    loss: Tensor
    sums: dict[str, Tensor]


def policy_loss(inputs: LossInputs, spec: LossSpec) -> LossOutput:
    """Loss and diagnostics of one micro-batch.

    The weights and the denominator of `inputs` must come from `token_weights` with the spec's
    reduction. The KL term is in the loss only with placement `loss`; with `reward` the caller has
    put it in the advantages (`kl.kl_in_reward`) and it is only reported. Raises `ValueError` if the
    spec needs a tensor that is None.
    """
    weights = importance_weights(
        inputs.old_logprobs,
        inputs.behavior_logprobs,
        spec.importance,
        spec.importance_cap,
        _sequence_mismatch(inputs) if spec.importance.is_sequence_level else None,
    )
    token = _token_loss(inputs, spec)

    def reduced(values: Tensor) -> Tensor:
        return reduce(values, inputs.token_weight, inputs.global_denominator)

    policy = reduced(weights.weight * token.loss)
    total = policy
    sums = {
        "num_tokens": torch.ones_like(token.ratio),
        "ratio_mean": token.ratio,
        "clip_frac": token.clipped,
        "advantage_mean": inputs.advantages,
        "importance_weight_mean": weights.weight,
        "importance_capped_frac": weights.capped,
    }
    terms = {"policy_loss": policy}
    if inputs.reference_logprobs is not None:
        kl = kl_values(inputs.logprobs, inputs.reference_logprobs, spec.kl_kind)
        sums["kl"] = kl
        if spec.has_kl_loss:
            terms["kl_loss"] = spec.kl_coef * reduced(kl)
            total = total + terms["kl_loss"]
    elif spec.has_kl_loss:
        raise ValueError(f"kl_coef is {spec.kl_coef}, but reference_logprobs is None")
    if inputs.entropies is not None:
        sums["entropy"] = inputs.entropies
        if spec.entropy_coef != 0:
            terms["entropy_loss"] = -spec.entropy_coef * reduced(inputs.entropies)
            total = total + terms["entropy_loss"]
    elif spec.entropy_coef != 0:
        raise ValueError(f"entropy_coef is {spec.entropy_coef}, but entropies is None")
    terms["loss"] = total
    return LossOutput(
        loss=total,
        sums={
            **{name: values.detach().sum(dtype=torch.float64) for name, values in sums.items()},
            **{name: term.detach().double() for name, term in terms.items()},
        },
    )


def averaged(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Metrics from totals over all micro-batches and ranks: token means, loss terms as they are.

    Token means count each loss token once, whatever the reduction. Without any token they do not
    exist and are left out.
    """
    totals = {name: float(value) for name, value in sums.items()}
    num_tokens = totals.pop("num_tokens")
    terms = {name: totals.pop(name) for name in LOSS_TERMS if name in totals}
    means = {name: total / num_tokens for name, total in totals.items()} if num_tokens else {}
    return {**terms, **means}


def _token_loss(inputs: LossInputs, spec: LossSpec) -> TokenLoss:
    new, old, advantages = inputs.logprobs, inputs.old_logprobs, inputs.advantages
    match spec.loss:
        case LossKind.ppo_clip:
            return ppo_clip(new, old, advantages, spec.clip_low, spec.clip_high, spec.dual_clip)
        case LossKind.gspo:
            log_ratio = _sequence_log_ratio(inputs)
            return gspo(new, advantages, log_ratio, spec.clip_low, spec.clip_high)
        case LossKind.cispo:
            return cispo(new, old, advantages, spec.clip_low, spec.clip_high)
        case LossKind.reinforce:
            return reinforce(new, old, advantages)


def _sequence_log_ratio(inputs: LossInputs) -> Tensor:
    if inputs.sequence_log_ratio is not None:
        return inputs.sequence_log_ratio
    difference = inputs.logprobs - inputs.old_logprobs
    return _whole_sums(inputs, difference, "sequence_log_ratio") / inputs.sequence_length


def _sequence_mismatch(inputs: LossInputs) -> Tensor:
    if inputs.sequence_mismatch is not None:
        return inputs.sequence_mismatch
    difference = inputs.old_logprobs - inputs.behavior_logprobs
    return _whole_sums(inputs, difference, "sequence_mismatch")


def _whole_sums(inputs: LossInputs, values: Tensor, given: str) -> Tensor:
    if inputs.sequence_length is None:
        raise ValueError(f"a sequence-level ratio needs sequence_length or {given}; both are None")
    return whole_sequence_sums(values, inputs.sequence_index, inputs.sequence_length)

"""The choices that the configuration offers and the algorithms know. Free of torch: a config is
checked before anything heavy is imported. Names equal values, because OmegaConf matches names."""

from __future__ import annotations

from enum import StrEnum


class AdvantageKind(StrEnum):
    """Formula of the advantage `A_i` of an episode with reward `r_i` in a group of n."""

    grpo = "grpo"  # (r_i - mean) / (std + epsilon): DeepSeekMath, arXiv:2402.03300
    grpo_no_std = "grpo_no_std"  # r_i - mean: Dr. GRPO, arXiv:2503.20783
    rloo = "rloo"  # r_i - mean of the other n - 1: Ahmadian et al., arXiv:2402.14740
    reinforce_pp = "reinforce_pp"  # (r_i - batch mean) / (batch std + epsilon): arXiv:2501.03262
    # c_i / (batch std of c + epsilon) with c_i = r_i - mean: the same paper, "w/ baseline"
    reinforce_pp_baseline = "reinforce_pp_baseline"
    reinforce = "reinforce"  # r_i: Williams 1992, without a baseline

    @property
    def is_group_relative(self) -> bool:
        """Equal rewards in a group give exactly zero advantage; a group needs two episodes."""
        return self not in (AdvantageKind.reinforce_pp, AdvantageKind.reinforce)


class LossKind(StrEnum):
    ppo_clip = "ppo_clip"
    gspo = "gspo"
    cispo = "cispo"
    reinforce = "reinforce"


class ReductionMode(StrEnum):
    token_mean = "token_mean"
    sequence_mean = "sequence_mean"
    constant = "constant"


class KlKind(StrEnum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k3_k2grad = "k3_k2grad"


class KlPlacement(StrEnum):
    loss = "loss"
    reward = "reward"


class ImportanceMode(StrEnum):
    none = "none"
    token = "token"
    sequence = "sequence"
    sequence_mask = "sequence_mask"

    @property
    def is_sequence_level(self) -> bool:
        return self in (ImportanceMode.sequence, ImportanceMode.sequence_mask)


class GroupFilter(StrEnum):
    keep = "keep"
    drop = "drop"
    refill = "refill"

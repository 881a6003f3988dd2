"""Advantages: how much better each episode did than a baseline made of its peers.

One scalar an episode. Statistics count episodes, never turns, windows or tokens, and an episode's
group is a list that the caller made from one task, so prompts and texts cannot decide who is
compared with whom. Everything is float64; sums are exact (`math.fsum`), so the order of the members
of a group does not matter.

`mean` and `std` below are over a group unless they say `batch` (all episodes of the step).
`std` is the sample standard deviation (n - 1): DeepSeekMath does not say which one it means, and
the public implementations of GRPO that we know take torch's default, which is this one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from wayfinder.choices import AdvantageKind

# Rewards that differ by less than this share of the largest one are the same reward with rounding:
# wide enough for sums made in float32, and far below any difference an environment means.
RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-12


def rewards_equal(rewards: Sequence[float]) -> bool:
    """Whether all rewards are one value up to float rounding. True for none and for one.

    This, on the whole group at once, is the only test of "no signal": a standard deviation of
    rounding errors is not zero, and dividing by it makes huge advantages out of nothing.
    """
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    tolerance = max(RELATIVE_TOLERANCE * max(abs(low), abs(high)), ABSOLUTE_TOLERANCE)
    return high - low <= tolerance


def advantages(
    rewards_by_group: Sequence[Sequence[float]], kind: AdvantageKind | str, epsilon: float = 1e-6
) -> list[list[float]]:
    """Advantages in the shape of `rewards_by_group` (groups of any size, also empty ones).

    Only valid episodes belong in it: those that the system failed are left out by the caller, and
    so count neither in a mean nor in a standard deviation. A group of one has no peers: its
    advantage is 0 for group-relative kinds. Where all rewards that share a baseline are equal, the
    result is exactly 0. Raises `ValueError` for a reward that is not finite, an unknown kind or a
    negative epsilon.
    """
    kind = AdvantageKind(kind)
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon must be finite and at least 0, not {epsilon}")
    groups = [[float(reward) for reward in group] for group in rewards_by_group]
    for index, group in enumerate(groups):
        for member, reward in enumerate(group):
            if not math.isfinite(reward):
                raise ValueError(
                    f"reward of episode {member} of group {index} is {reward}; a failed episode "
                    "must be left out of the group, it has no reward"
                )
    match kind:
        case AdvantageKind.grpo:
            return [_divided(_centered(group), epsilon) for group in groups]
        case AdvantageKind.grpo_no_std:
            return [_centered(group) for group in groups]
        case AdvantageKind.rloo:
            return [_leave_one_out(group) for group in groups]
        case AdvantageKind.reinforce_pp:
            batch = _centered([reward for group in groups for reward in group])
            return _regrouped(_divided(batch, epsilon), groups)
        case AdvantageKind.reinforce_pp_baseline:
            # Each group sums to zero, so the batch mean is zero and only the division is left.
            # Subtracting a computed mean would move groups without signal away from exact zero.
            batch = [value for group in groups for value in _centered(group)]
            return _regrouped(_divided(batch, epsilon), groups)
        case AdvantageKind.reinforce:
            return groups


def _centered(rewards: list[float]) -> list[float]:
    if rewards_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _leave_one_out(rewards: list[float]) -> list[float]:
    # r_i - (S - r_i) / (n - 1) = n / (n - 1) * (r_i - S / n)
    size = len(rewards)
    return [size / (size - 1) * value if value else 0.0 for value in _centered(rewards)]


def _divided(centered: list[float], epsilon: float) -> list[float]:
    """`centered` (mean zero) over its sample standard deviation; all zeros stay zeros."""
    if not any(centered):
        return centered
    std = math.hypot(*centered) / math.sqrt(len(centered) - 1)
    return [value / (std + epsilon) for value in centered]


def _regrouped(flat: list[float], groups: list[list[float]]) -> list[list[float]]:
    values = iter(flat)
    return [[next(values) for _ in group] for group in groups]

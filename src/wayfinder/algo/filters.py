"""Groups without signal: counted, kept, dropped from the update, or made up for.

`drop` leaves groups with equal rewards out of the update. Their advantages are exactly zero, so
the policy term loses nothing, provided that `token_weights` still gets the lengths of the dropped
episodes: the denominators count kept and dropped tokens alike, and the gradient is the same number
for less work. It is not the same if such a group moves the policy by other means (a KL or entropy
term in the loss, advantages with a baseline over the whole batch); `select` then keeps it.

`refill` is another batch, not a shortcut: groups without signal are replaced by new ones, up to a
bound (dynamic sampling of DAPO, arXiv:2503.14476), and only the groups in the update count.

Rewards are those that the advantages were made of, of valid episodes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wayfinder.algo.advantage import rewards_equal
from wayfinder.algo.loss import LossSpec
from wayfinder.choices import AdvantageKind, GroupFilter


@dataclass(frozen=True, slots=True)
class GroupSignal:
    """What one group says. `all_solved` and `none_solved` are False for a group without episodes.

    With rewards of 0 and 1 exactly one of the three is true of a nonempty group; with shaped
    rewards a group can be all solved and still have signal.
    """

    all_solved: bool
    none_solved: bool
    has_signal: bool


def group_signal(rewards: Sequence[float], solved: Sequence[bool]) -> GroupSignal:
    """Classify one group; `solved` is the environment's success, never read off the reward.

    Raises `ValueError` if the lengths differ.
    """
    if len(rewards) != len(solved):
        raise ValueError(f"{len(rewards)} rewards but {len(solved)} successes in one group")
    return GroupSignal(
        all_solved=bool(solved) and all(solved),
        none_solved=bool(solved) and not any(solved),
        has_signal=not rewards_equal(rewards),
    )


def count_signals(signals: Iterable[GroupSignal]) -> dict[str, int]:
    """Counts by their metric names, without the prefix `train/`."""
    signals = list(signals)
    return {
        "groups_all_solved": sum(signal.all_solved for signal in signals),
        "groups_none_solved": sum(signal.none_solved for signal in signals),
        "groups_no_signal": sum(not signal.has_signal for signal in signals),
    }


def drop_is_exact(advantage: AdvantageKind | str, spec: LossSpec) -> bool:
    """Whether a group with equal rewards contributes a gradient of exactly zero."""
    return (
        AdvantageKind(advantage).is_group_relative
        and not spec.has_kl_loss
        and spec.entropy_coef == 0
    )


def select(
    rewards_by_group: Sequence[Sequence[float]],
    group_filter: GroupFilter | str,
    drop_exact: bool,
) -> list[int]:
    """Indices of the groups that go into the update, ascending; groups without episodes never do.

    `drop_exact` is `drop_is_exact` of the algorithm: where it is False, `drop` keeps what `keep`
    keeps. `refill` always selects groups with signal only.
    """
    group_filter = GroupFilter(group_filter)
    signal_only = group_filter is GroupFilter.refill or (
        group_filter is GroupFilter.drop and drop_exact
    )
    return [
        index
        for index, rewards in enumerate(rewards_by_group)
        if len(rewards) > 0 and not (signal_only and rewards_equal(rewards))
    ]


def refill_needed(num_selected: int, num_wanted: int, num_extra: int, max_extra: int) -> int:
    """How many more groups to roll out now; 0 ends the refill, with whatever was found.

    `num_selected` groups have signal, `num_wanted` would fill the step, and `num_extra` of at most
    `max_extra` additional groups were rolled out already. Calling it after every round ends after
    at most `max_extra` extra groups, however hard the tasks are.
    """
    if min(num_selected, num_wanted, num_extra, max_extra) < 0:
        raise ValueError(
            "counts must not be negative: "
            f"{num_selected=}, {num_wanted=}, {num_extra=}, {max_extra=}"
        )
    return max(0, min(num_wanted - num_selected, max_extra - num_extra))

"""Advantages against plain loops, and the rules that keep groups without signal at exactly zero."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wayfinder.algo.advantage import advantages, rewards_equal
from wayfinder.choices import AdvantageKind

EPSILON = 1e-6
GROUP_RELATIVE = [kind for kind in AdvantageKind if kind.is_group_relative]
GROUPS = [[0.0, 1.0, 1.0, 0.0, 0.25], [0.5, -2.0], [1.0, 1.0, 1.0], [3.0, 0.1, 0.2, 0.7]]

reward = st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.1 + 0.2, 0.3]) | st.floats(-10, 10)
groups_of_rewards = st.lists(st.lists(reward, max_size=8), max_size=5)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def loop_mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def loop_std(values):
    mean, total = loop_mean(values), 0.0
    for value in values:
        total += (value - mean) ** 2
    return math.sqrt(total / (len(values) - 1))


def loop_advantages(groups, kind):
    """Straight from the formulas, for groups in which at least two rewards differ."""
    everything = [value for group in groups for value in group]
    centered = [value - loop_mean(group) for group in groups for value in group]
    result = []
    for group in groups:
        row = []
        for index, value in enumerate(group):
            if kind == "grpo":
                row.append((value - loop_mean(group)) / (loop_std(group) + EPSILON))
            elif kind == "grpo_no_std":
                row.append(value - loop_mean(group))
            elif kind == "rloo":
                others = [other for place, other in enumerate(group) if place != index]
                row.append(value - loop_mean(others))
            elif kind == "reinforce_pp":
                row.append((value - loop_mean(everything)) / (loop_std(everything) + EPSILON))
            elif kind == "reinforce_pp_baseline":
                row.append((value - loop_mean(group)) / (loop_std(centered) + EPSILON))
            else:
                row.append(value)
        result.append(row)
    return result


@pytest.mark.parametrize("kind", AdvantageKind)
def test_equals_the_formula(kind, record_property):
    groups = [group for group in GROUPS if len(set(group)) > 1]
    for got, expected in zip(
        advantages(groups, kind, EPSILON), loop_advantages(groups, str(kind)), strict=True
    ):
        record_property("error", max(abs(a - b) for a, b in zip(got, expected, strict=True)))
        assert got == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_known_numbers():
    # Two of four solved: sample std is sqrt(1/3), so +-sqrt(3)/2.
    assert advantages([[1, 0, 0, 1]], "grpo", 0.0)[0] == pytest.approx(
        [math.sqrt(3) / 2, -math.sqrt(3) / 2, -math.sqrt(3) / 2, math.sqrt(3) / 2]
    )
    assert advantages([[1, 0, 0, 1]], "rloo")[0] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


@pytest.mark.parametrize("kind", GROUP_RELATIVE)
def test_equal_rewards_give_exact_zeros_beside_a_group_with_signal(kind):
    noisy = [0.1 + 0.2, 0.3, 0.3, 0.3]
    assert len(set(noisy)) == 2
    got = advantages([noisy, [0.0, 1.0, 1.0]], kind)
    assert got[0] == [0.0] * 4
    assert all(value != 0 for value in got[1])


@pytest.mark.parametrize("kind", [kind for kind in AdvantageKind if kind != "reinforce"])
def test_a_batch_of_equal_rewards_gives_exact_zeros(kind):
    assert advantages([[0.1 + 0.2, 0.3], [0.3, 0.3]], kind) == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("kind", GROUP_RELATIVE)
def test_groups_do_not_share_a_baseline(kind):
    # Two mazes with one prompt text: all failed and all solved, nothing to learn from either.
    assert advantages([[0.0] * 4, [1.0] * 4], kind) == [[0.0] * 4, [0.0] * 4]


def test_one_episode_a_group_has_no_peers_and_the_batch_kinds_still_compare():
    singles = [[0.0], [1.0], [1.0]]
    for kind in GROUP_RELATIVE:
        assert advantages(singles, kind) == [[0.0], [0.0], [0.0]]
    assert advantages(singles, "reinforce_pp") != [[0.0], [0.0], [0.0]]
    assert advantages(singles, "reinforce") == singles
    assert advantages([[1.0]], "reinforce_pp") == [[0.0]]


def test_group_is_judged_whole():
    got = advantages([[0.0] + [0.95] * 7], "rloo")[0]
    assert got[0] == pytest.approx(-0.95)
    assert got[1:] == pytest.approx([0.95 / 7] * 7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", AdvantageKind)
def test_a_reward_that_is_not_finite_is_refused_by_name(kind, bad):
    with pytest.raises(ValueError, match="episode 1 of group 2"):
        advantages([[0.0, 1.0], [], [1.0, bad, 0.0, 1.0]], kind)


def test_failed_episodes_left_out_leave_a_group_of_one():
    assert advantages([[1.0]], "grpo") == [[0.0]]


@pytest.mark.parametrize("epsilon", [-1e-3, math.nan])
def test_bad_arguments_are_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon"):
        advantages([[0.0, 1.0]], "grpo", epsilon)
    with pytest.raises(ValueError, match="not a valid AdvantageKind"):
        advantages([[0.0, 1.0]], "gae")


def test_enumeration_names_equal_values():
    assert all(kind.name == kind.value for kind in AdvantageKind)


@quick
@given(groups_of_rewards, st.sampled_from(list(AdvantageKind)))
def test_shape_is_kept_and_everything_is_finite(groups, kind):
    got = advantages(groups, kind)
    assert [len(row) for row in got] == [len(group) for group in groups]
    assert all(math.isfinite(value) for row in got for value in row)


@quick
@given(groups_of_rewards, st.sampled_from(GROUP_RELATIVE), st.randoms(use_true_random=False))
def test_groups_are_centered_and_members_are_interchangeable(groups, kind, random):
    got = advantages(groups, kind)
    for row in got:
        assert math.fsum(row) == pytest.approx(0, abs=1e-9 * (1 + sum(map(abs, row))))
    orders = [random.sample(range(len(group)), len(group)) for group in groups]
    shuffled = [
        [group[place] for place in order] for group, order in zip(groups, orders, strict=True)
    ]
    for row, again, order in zip(got, advantages(shuffled, kind), orders, strict=True):
        assert again == pytest.approx([row[place] for place in order], rel=1e-12, abs=1e-15)


@quick
@given(groups_of_rewards)
def test_zero_advantage_exactly_where_rewards_are_equal(groups):
    for group, row in zip(groups, advantages(groups, "grpo"), strict=True):
        assert (not any(row)) == rewards_equal(group)


def test_equality_tells_rounding_from_reward():
    assert rewards_equal([])
    assert rewards_equal([2.0])
    assert rewards_equal([0.1 + 0.2 - 0.3, 0.0])
    assert rewards_equal([1.0, 1.0 + 1e-7])
    assert not rewards_equal([1.0, 1.0 - 1e-4])
    assert not rewards_equal([0.0, 1e-4])
    assert not rewards_equal([-1.0, 1.0])

"""From groups to updates: who is compared with whom, what counts, what is left out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from wayfinder.batch.plan import PlanSpec, UpdatePlan, score_plan, step_episodes, update_plan
from wayfinder.types import Episode, Group, Outcome, Sample, Task, Turn


def make_turn(number: int, ids: tuple[int, ...], window: int = 0) -> Turn:
    return Turn(
        window_start=window,
        observation_ids=(3, 9),
        opening_ids=(3, 9),
        frames=("frame",),
        reply_ids=ids,
        logprobs=(-1.0,) * len(ids),
        closing_ids=(),
        finish_reason="stop",
        text="",
        action=None,
        parse_error=None,
        feedback="",
        executed=False,
    )


def make_episode(
    task: Task, member: int, reward: float, outcome: Outcome, tokens=(2,), history=None
):
    """One turn for each of `tokens`, with that many sampled ids."""
    turns = tuple(
        make_turn(n, (100 + task.index * 50 + member,) * count, n if history else 0)
        for n, count in enumerate(tokens)
    )
    return Episode(task, member, 0, 0, (1, 2), turns, outcome, reward, "frame")


def make_group(index: int, rewards: list[float], tokens=(2,), history=None) -> Group:
    """Reward 1 is a success; None is an episode that the system failed."""
    task = Task("maze_2d/easy", 1000 + index, index)
    episodes = []
    for member, reward in enumerate(rewards):
        outcome = {None: Outcome.ENV_ERROR, 1.0: Outcome.SOLVED}.get(reward, Outcome.STOPPED)
        episodes.append(
            make_episode(task, member, 0.0 if reward is None else reward, outcome, tokens, history)
        )
    return Group(task, tuple(episodes))


def spec(**changes) -> PlanSpec:
    values = {
        "advantage": "grpo",
        "group_filter": "drop",
        "drop_is_exact": True,
        "reduction": "token_mean",
        "constant_length": None,
        "mini_batches": 1,
        "micro_batch_tokens": 64,
        "packing": False,
        "num_ranks": 1,
    }
    return PlanSpec(**values | changes)


def minis(plan: UpdatePlan) -> list[list[Sample]]:
    """Samples of each mini-batch, over all ranks."""
    return [
        [s for rank in plan.ranks for b in rank[m].micro_batches for s in b.samples]
        for m in range(len(plan.ranks[0]))
    ]


def episodes_in(plan: UpdatePlan) -> list[set[int]]:
    return [{sample.episode for sample in samples} for samples in minis(plan)]


def test_groups_are_tasks_whatever_the_prompt():
    # Both mazes put the same ids to the model; only the pictures (and so the tasks) differ.
    solved, failed = make_group(0, [1.0] * 4), make_group(1, [0.0] * 4)
    twins = Group(failed.task, tuple(_like(e, solved.episodes[0]) for e in failed.episodes))
    plan = update_plan([solved, twins], spec(group_filter="keep"))
    assert plan.ranks[0][0].advantages.tolist() == [0.0] * 8
    assert plan.metrics["train/groups_all_solved"] == 1
    assert plan.metrics["train/groups_none_solved"] == 1
    assert update_plan([solved, twins], spec()).is_empty


def _like(episode: Episode, other: Episode) -> Episode:
    return Episode(
        episode.task,
        episode.member,
        0,
        0,
        other.prefix_ids,
        other.turns,
        episode.outcome,
        episode.reward,
        "frame",
    )


def test_advantages_of_a_group():
    plan = update_plan([make_group(0, [1.0, 0.0, 0.0, 0.0]), make_group(1, [0.0, 1.0])], spec())
    std = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)
    expected = [0.75 / std, *[-0.25 / std] * 3, -math.sqrt(0.5), math.sqrt(0.5)]
    np.testing.assert_allclose(plan.ranks[0][0].advantages, expected, rtol=1e-5)


def test_an_advantage_belongs_to_all_windows_of_its_episode():
    group = make_group(0, [1.0, 0.0], tokens=(3, 7, 2), history=1)
    plan = update_plan([group], spec())
    (samples,) = minis(plan)
    assert sorted((s.episode, s.num_loss_tokens) for s in samples) == [
        (0, 2),
        (0, 3),
        (0, 7),
        (1, 2),
        (1, 3),
        (1, 7),
    ]
    (mini,) = plan.ranks[0]
    assert mini.advantages[0] == -mini.advantages[1] > 0
    assert mini.sequence_length.tolist() == [12, 12]


def test_statistics_count_episodes_not_turns_or_windows():
    group = make_group(0, [1.0, 0.0, 0.0], history=1)
    long = make_episode(group.task, 0, 1.0, Outcome.SOLVED, (2,) * 5, history=1)
    plan = update_plan(
        [Group(group.task, (long, *group.episodes[1:]))],
        spec(advantage="grpo_no_std", reduction="sequence_mean"),
    )
    (mini,) = plan.ranks[0]
    np.testing.assert_allclose(mini.advantages, [2 / 3, -1 / 3, -1 / 3])
    np.testing.assert_allclose(mini.sequence_weight, [1 / 10, 1 / 2, 1 / 2])
    assert mini.global_denominator == 3


def test_what_the_system_failed_counts_nowhere():
    rewards = [1.0, None, 0.0, 0.0]
    plan = update_plan([make_group(0, rewards), make_group(1, [None, None])], spec())
    alone = update_plan([make_group(0, [1.0, 0.0, 0.0])], spec())
    (mini,), (reference,) = plan.ranks[0], alone.ranks[0]
    np.testing.assert_array_equal(mini.advantages, reference.advantages)
    np.testing.assert_array_equal(mini.sequence_length, [2, 2, 2])
    np.testing.assert_array_equal(mini.sequence_weight, reference.sequence_weight)
    assert mini.global_denominator == reference.global_denominator == 6
    assert plan.metrics["train/failed_episodes"] == 3
    sampled = {int(s.ids[s.loss_mask][0]) for s in minis(plan)[0]}
    assert sampled == {100, 102, 103}  # not 101, the member that failed
    assert {s.episode for s in minis(plan)[0]} == {0, 1, 2}
    assert [e.member for e in step_episodes([make_group(0, rewards)])] == [0, 2, 3]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_dropping_groups_without_signal_keeps_the_denominators(reduction):
    groups = [
        make_group(0, [1.0, 1.0], tokens=(5,)),
        make_group(1, [1.0, 0.0], tokens=(3, 1)),
        make_group(2, [0.0, 0.0], tokens=(2,)),
    ]
    changes = {"reduction": reduction, "constant_length": 10.0}
    kept = update_plan(groups, spec(group_filter="keep", **changes))
    dropped = update_plan(groups, spec(group_filter="drop", **changes))
    (a,), (b,) = kept.ranks[0], dropped.ranks[0]
    assert a.global_denominator == b.global_denominator
    assert a.global_denominator == {"token_mean": 22, "sequence_mean": 6, "constant": 60}[reduction]
    np.testing.assert_array_equal(a.sequence_weight, b.sequence_weight)
    np.testing.assert_array_equal(a.advantages, b.advantages)
    assert episodes_in(kept) == [{0, 1, 2, 3, 4, 5}]
    assert episodes_in(dropped) == [{2, 3}]
    assert dropped.metrics["train/groups_no_signal"] == 2
    assert dropped.metrics["train/samples"] == 2
    assert kept.metrics["train/samples"] == 6


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_refilled_groups_count_as_if_the_others_had_never_been(reduction):
    silent = [make_group(0, [1.0, 1.0], tokens=(5,)), make_group(2, [0.0, 0.0])]
    speaking = [make_group(1, [1.0, 0.0], tokens=(3,)), make_group(3, [0.0, 1.0], tokens=(4,))]
    changes = {"reduction": reduction, "constant_length": 10.0, "mini_batches": 2}
    groups = [silent[0], speaking[0], silent[1], speaking[1]]
    refilled = update_plan(groups, spec(group_filter="refill", **changes))
    alone = update_plan(speaking, spec(group_filter="refill", **changes))
    assert episodes_in(refilled) == [{2, 3}, {6, 7}]
    assert episodes_in(alone) == [{0, 1}, {2, 3}]
    for a, b in zip(refilled.ranks[0], alone.ranks[0], strict=True):
        assert a.global_denominator == b.global_denominator
        np.testing.assert_array_equal(a.advantages[[2, 3, 6, 7]], b.advantages)
        np.testing.assert_array_equal(a.sequence_weight[[2, 3, 6, 7]], b.sequence_weight)
    assert refilled.metrics["train/groups_no_signal"] == 2


def test_where_dropping_is_not_exact_nothing_is_dropped():
    groups = [make_group(0, [1.0, 1.0]), make_group(1, [1.0, 0.0])]
    plan = update_plan(groups, spec(drop_is_exact=False))
    assert episodes_in(plan) == [{0, 1, 2, 3}]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("mini_batches", [1, 2, 3, 5])
def test_mini_batches_hold_whole_groups_and_their_own_denominators(mini_batches, num_ranks):
    groups = [make_group(i, [1.0, 0.0, 0.0], tokens=(2 + i,)) for i in range(5)]
    plan = update_plan(
        groups, spec(mini_batches=mini_batches, num_ranks=num_ranks, micro_batch_tokens=12)
    )
    of_group = [{3 * i, 3 * i + 1, 3 * i + 2} for i in range(5)]
    seen = episodes_in(plan)
    assert len(seen) == mini_batches
    assert set().union(*seen) == set(range(15))
    for number, inside in enumerate(seen):
        members = [i for i, group in enumerate(of_group) if group & inside]
        assert inside == set().union(*(of_group[i] for i in members))
        # Global values, the same on every rank, over this mini-batch only.
        expected = sum(3 * (2 + i) for i in members)
        for rank in plan.ranks:
            assert rank[number].global_denominator == expected
            weights = np.isin(np.arange(15), sorted(inside)).astype(float)
            np.testing.assert_array_equal(rank[number].sequence_weight, weights)
        assert len({len(rank[number].micro_batches) for rank in plan.ranks}) == 1
    assert sum(len(samples) for samples in minis(plan)) == 15


def test_more_mini_batches_than_groups():
    plan = update_plan([make_group(0, [1.0, 0.0])], spec(mini_batches=3))
    assert [len(samples) for samples in minis(plan)] == [2, 0, 0]
    assert [mini.global_denominator for mini in plan.ranks[0]] == [4, 1, 1]
    assert not plan.is_empty


def test_equal_rewards_everywhere_give_an_empty_plan():
    groups = [make_group(0, [1.0, 1.0]), make_group(1, [0.0, 0.0]), make_group(2, [0.3, 0.1 + 0.2])]
    plan = update_plan(groups, spec(mini_batches=2, num_ranks=2))
    assert plan.is_empty
    assert [len(mini.micro_batches) for rank in plan.ranks for mini in rank] == [0] * 4
    assert all((mini.advantages == 0).all() for rank in plan.ranks for mini in rank)
    assert plan.metrics["train/groups_no_signal"] == 3


def test_without_a_single_sound_episode_the_plan_is_empty():
    plan = update_plan([make_group(0, [None, None])], spec(group_filter="keep"))
    assert plan.is_empty
    assert plan.ranks[0][0].global_denominator == 1
    assert plan.metrics["train/failed_episodes"] == 2
    assert plan.metrics["train/groups_no_signal"] == 1


def test_a_change_of_the_rewards_shifts_the_advantages():
    groups = [make_group(0, [None, 1.0, 0.0]), make_group(1, [0.0, 0.0])]
    kind = {"advantage": "grpo_no_std"}
    plain = update_plan(groups, spec(**kind))
    assert plain.ranks[0][0].advantages.tolist() == [0.5, -0.5, 0.0, 0.0]
    change = np.array([-0.1, -0.3, 0.2, -0.2])  # one for each episode that counts, in their order
    changed = update_plan(groups, spec(**kind), change)
    # (0.9, -0.3) and (0.2, -0.2), each group against its own mean.
    np.testing.assert_allclose(changed.ranks[0][0].advantages, [0.6, -0.6, 0.2, -0.2])
    assert episodes_in(plain) == [{0, 1}]
    assert episodes_in(changed) == [{0, 1, 2, 3}]
    # Success stays what the environment said.
    assert changed.metrics["train/groups_none_solved"] == 1


def test_the_score_plan_holds_every_sample():
    groups = [make_group(0, [1.0, 1.0, None]), make_group(1, [1.0, 0.0], (2, 2), history=1)]
    plan = score_plan(groups, spec(num_ranks=2, micro_batch_tokens=8))
    samples = [s for rank in plan for batch in rank for s in batch.samples]
    assert sorted(s.episode for s in samples) == [0, 1, 2, 2, 3, 3]
    assert len({len(rank) for rank in plan}) == 1


def test_metrics_count_samples_and_tokens():
    group = make_group(0, [1.0, 0.0, 0.0])
    twin = _like(group.episodes[2], group.episodes[1])
    plan = update_plan([Group(group.task, (*group.episodes[:2], twin))], spec())
    assert plan.metrics["train/samples"] == 3
    assert plan.metrics["train/distinct_samples"] == 2
    assert plan.metrics["train/sample_tokens"] == 3 * (2 + 2 + 2)

"""Micro-batches: within the budget, equally many on every rank, each sample exactly once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wayfinder.batch.packing import plan_micro_batches, sample_key
from wayfinder.types import MicroBatch, Sample


def make_sample(length: int, content: int = 0, frames: tuple[str, ...] = (), episode=0, loss=1):
    """A sample with loss on its last `loss` tokens; other content, other ids."""
    ids = np.full(length, content, dtype=np.int64)
    mask = np.zeros(length, dtype=bool)
    mask[length - loss :] = True
    return Sample(
        ids=ids,
        loss_mask=mask,
        behavior_logprobs=np.zeros(length, dtype=np.float32),
        after_image=np.zeros(length, dtype=bool),
        turn_index=np.where(mask, 0, -1).astype(np.int32),
        frames=frames,
        episode=episode,
    )


def distinct(batch: MicroBatch) -> list[Sample]:
    return list({sample_key(sample): sample for sample in batch.samples}.values())


def computed_tokens(batch: MicroBatch, packing: bool) -> int:
    """What a forward pass of the batch takes: rows times longest length, or all in one row."""
    rows = [len(sample.ids) for sample in distinct(batch)]
    return sum(rows) if packing else len(rows) * max(rows)


samples_strategy = st.lists(
    st.builds(
        make_sample,
        length=st.integers(1, 30),
        content=st.integers(0, 2),
        frames=st.sampled_from([(), ("a",), ("a", "b")]),
        episode=st.integers(0, 5),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(samples_strategy, st.integers(1, 4), st.integers(1, 80), st.booleans())
def test_what_holds_for_every_plan(samples, num_ranks, max_tokens, packing):
    plan = plan_micro_batches(samples, num_ranks, max_tokens, packing)
    batches = [batch for rank in plan for batch in rank]
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    # Every sample exactly once, by identity: equal samples of different episodes all count.
    assert Counter(id(s) for b in batches for s in b.samples) == Counter(id(s) for s in samples)
    full = [batch for batch in batches if batch.samples]
    for batch in full:
        assert computed_tokens(batch, packing) <= max_tokens or len(distinct(batch)) == 1
    # Equal samples share a micro-batch.
    keys = [sample_key(sample) for batch in full for sample in distinct(batch)]
    assert len(keys) == len(set(keys))
    # Empty ones only stand behind the full ones, and there are no more of them than needed.
    for rank in plan:
        filled = [bool(batch.samples) for batch in rank]
        assert filled == sorted(filled, reverse=True)
    assert len(plan[0]) == max(_filled(rank) for rank in plan)


def _filled(rank: list[MicroBatch]) -> int:
    return sum(bool(batch.samples) for batch in rank)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(samples_strategy, st.integers(1, 3), st.integers(1, 80))
def test_the_plan_is_a_function_of_the_samples(samples, num_ranks, max_tokens):
    first = plan_micro_batches(samples, num_ranks, max_tokens)
    again = plan_micro_batches(list(samples), num_ranks, max_tokens)
    assert [[b.samples for b in rank] for rank in first] == [
        [b.samples for b in rank] for rank in again
    ]


def lengths(plan: list[list[MicroBatch]]) -> list[list[list[int]]]:
    return [[[len(s.ids) for s in batch.samples] for batch in rank] for rank in plan]


def test_samples_of_similar_length_share_a_micro_batch():
    samples = [make_sample(n, content) for content, n in enumerate([10, 3, 9, 2, 30])]
    # A batch costs rows times longest: 2, 3 and 9 take 27 tokens, 9 and 10 take 20.
    assert lengths(plan_micro_batches(samples, 1, 30)) == [[[30], [2, 3, 9], [10]]]
    assert lengths(plan_micro_batches(samples, 1, 27)) == [[[30], [2, 3, 9], [10]]]
    assert lengths(plan_micro_batches(samples, 1, 26)) == [[[30], [9, 10], [2, 3]]]


def test_packed_samples_count_by_their_sum():
    samples = [make_sample(n, content) for content, n in enumerate([10, 3, 9, 2, 30])]
    assert lengths(plan_micro_batches(samples, 1, 24, packing=True)) == [[[30], [2, 3, 9, 10]]]
    assert lengths(plan_micro_batches(samples, 1, 23, packing=True)) == [[[30], [2, 3, 9], [10]]]


def test_the_budget_is_reached_and_never_passed():
    samples = [make_sample(10, content) for content in range(5)]
    assert lengths(plan_micro_batches(samples, 1, 20)) == [[[10, 10], [10, 10], [10]]]
    assert lengths(plan_micro_batches(samples, 1, 19)) == [[[10]] * 5]
    assert lengths(plan_micro_batches(samples, 1, 50)) == [[[10] * 5]]


def test_a_sample_longer_than_the_budget_stands_alone():
    samples = [make_sample(4, 0), make_sample(100, 1), make_sample(5, 2), make_sample(101, 3)]
    assert lengths(plan_micro_batches(samples, 1, 10)) == [[[101], [100], [4, 5]]]


def test_duplicates_cost_nothing():
    same = [make_sample(10, 7, ("a",), episode=e) for e in range(6)]
    other = make_sample(10, 8)
    ((batch,),) = plan_micro_batches([*same[:3], other, *same[3:]], 1, 20)
    assert batch.samples == (*same, other)
    assert batch.num_tokens == 70


@pytest.mark.parametrize(
    "other",
    [
        make_sample(10, 7, ("b",)),  # another picture behind the same ids
        make_sample(10, 8, ("a",)),
        make_sample(10, 7, ("a",), loss=2),  # other turns of the same ids are trained
        make_sample(11, 7, ("a",)),
    ],
)
def test_what_differs_is_no_duplicate(other):
    sample = make_sample(10, 7, ("a",))
    assert sample_key(sample) != sample_key(other)
    assert len(plan_micro_batches([sample, other], 1, 11)[0]) == 2


def test_work_is_spread_evenly_and_short_ranks_join_with_nothing():
    samples = [make_sample(10, content) for content in range(3)]
    plan = plan_micro_batches(samples, 2, 10)
    assert lengths(plan) == [[[10], [10]], [[10], []]]
    assert plan[1][1] == MicroBatch(())
    assert plan[1][1].num_tokens == 0
    even = plan_micro_batches([make_sample(n, n) for n in [9, 8, 7, 6, 2, 1]], 2, 9)
    assert lengths(even) == [[[9], [6], [1, 2]], [[8], [7], []]]


def test_a_rank_more_than_there_is_work():
    plan = plan_micro_batches([make_sample(4)], 3, 10)
    assert [_filled(rank) for rank in plan] == [1, 0, 0]
    assert [len(rank) for rank in plan] == [1, 1, 1]


def test_without_samples_nobody_makes_a_pass():
    assert plan_micro_batches([], 2, 10) == [[], []]


def test_the_number_of_ranks_is_checked():
    with pytest.raises(ValueError, match="num_ranks must be positive, not 0"):
        plan_micro_batches([], 0, 10)

"""Group filters: counts, the exact gradient of a dropped group, and a refill that ends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wayfinder.algo.advantage import advantages
from wayfinder.algo.filters import (
    GroupSignal,
    count_signals,
    drop_is_exact,
    group_signal,
    refill_needed,
    select,
)
from wayfinder.algo.loss import LossInputs, LossSpec, policy_loss
from wayfinder.algo.reduce import token_weights
from wayfinder.choices import AdvantageKind, GroupFilter, LossKind, ReductionMode

REWARDS = [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [], [0.3, 0.1 + 0.2], [0.5, 0.2]]
LENGTHS = [[3, 7], [2, 5], [9, 1], [], [4, 4], [6, 8]]


def spec_of(loss="ppo_clip", reduction="token_mean", **values):
    constant = 10.0 if reduction == "constant" else None
    return LossSpec(
        loss=loss,
        clip_low=0.2,
        clip_high=0.28,
        reduction=reduction,
        constant_length=constant,
        **values,
    )


def gradient(kept, kind, spec):
    """Gradient of the step with respect to every token's log-prob, groups outside `kept` left out.

    The weights know the lengths of all episodes, as in the loop.
    """
    lengths = [length for group in LENGTHS for length in group]
    group_of = [g for g, group in enumerate(LENGTHS) for _ in group]
    scalars = [value for group in advantages(REWARDS, kind) for value in group]
    weights = token_weights(lengths, spec.reduction, spec.constant_length)
    index = torch.tensor([s for s, length in enumerate(lengths) for _ in range(length)])
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(3, len(index), generator=generator, dtype=torch.float64)
    leaf = (-1 - noise[0]).requires_grad_()
    chosen = torch.tensor([group_of[s] in kept for s in index.tolist()]).nonzero()[:, 0]
    sequence = index[chosen]
    inputs = LossInputs(
        logprobs=leaf[chosen],
        old_logprobs=(-1 - 0.8 * noise[0] - 0.2 * noise[1])[chosen],
        behavior_logprobs=(-1 - noise[0])[chosen],
        reference_logprobs=(-1 - noise[2])[chosen],
        entropies=None,
        advantages=torch.tensor(scalars, dtype=torch.float64)[sequence],
        token_weight=torch.tensor(weights.per_sequence)[sequence],
        sequence_index=sequence,
        sequence_length=torch.tensor(lengths)[sequence],
        global_denominator=weights.global_denominator,
    )
    policy_loss(inputs, spec).loss.backward()
    return leaf.grad


@pytest.mark.parametrize("loss", LossKind)
@pytest.mark.parametrize("reduction", ReductionMode)
@pytest.mark.parametrize("kind", [kind for kind in AdvantageKind if kind.is_group_relative])
def test_dropping_groups_without_signal_gives_exactly_the_same_gradient(loss, reduction, kind):
    spec = spec_of(loss, reduction)
    kept = select(REWARDS, "drop", drop_is_exact(kind, spec))
    assert kept == [1, 5]
    all_groups = gradient(select(REWARDS, "keep", True), kind, spec)
    assert torch.equal(gradient(kept, kind, spec), all_groups)
    assert all_groups.abs().sum() > 0


@pytest.mark.parametrize(
    ("kind", "values"),
    [("grpo", {"kl_coef": 0.1}), ("reinforce_pp", {}), ("reinforce", {})],
)
def test_groups_that_still_move_the_policy_are_not_dropped(kind, values):
    spec = spec_of(**values)
    kept = select(REWARDS, "drop", drop_is_exact(kind, spec))
    assert kept == [0, 1, 2, 4, 5]
    # The control: without them the gradient would be another one.
    assert not torch.allclose(gradient([1, 5], kind, spec), gradient(kept, kind, spec))


def test_when_dropping_is_exact():
    assert drop_is_exact("grpo", spec_of())
    assert drop_is_exact("grpo", spec_of(kl_coef=0.1, kl_placement="reward"))
    assert not drop_is_exact("grpo", spec_of(kl_coef=0.1))
    assert not drop_is_exact("grpo", spec_of(entropy_coef=0.1))
    assert not drop_is_exact("grpo", spec_of(entropy_coef=-0.1))
    assert not drop_is_exact("reinforce", spec_of())


def test_selection():
    assert select(REWARDS, "keep", True) == [0, 1, 2, 4, 5]
    assert select(REWARDS, "drop", True) == [1, 5]
    assert select(REWARDS, "drop", False) == [0, 1, 2, 4, 5]
    assert select(REWARDS, "refill", False) == [1, 5]
    assert select([[0.0] + [0.95] * 7], "drop", True) == [0]
    assert select([[1.0]], "drop", True) == []
    with pytest.raises(ValueError, match="GroupFilter"):
        select(REWARDS, "skip", True)


def test_signals_and_their_counts():
    signals = [
        group_signal([1.0, 1.0], [True, True]),
        group_signal([0.9, 0.8], [True, True]),
        group_signal([0.0, 0.0], [False, False]),
        group_signal([0.0, 1.0], [False, True]),
        group_signal([0.3, 0.1 + 0.2], [False, True]),
        group_signal([], []),
    ]
    assert signals == [
        GroupSignal(all_solved=True, none_solved=False, has_signal=False),
        GroupSignal(all_solved=True, none_solved=False, has_signal=True),
        GroupSignal(all_solved=False, none_solved=True, has_signal=False),
        GroupSignal(all_solved=False, none_solved=False, has_signal=True),
        GroupSignal(all_solved=False, none_solved=False, has_signal=False),
        GroupSignal(all_solved=False, none_solved=False, has_signal=False),
    ]
    counts = {"groups_all_solved": 2, "groups_none_solved": 1, "groups_no_signal": 4}
    assert count_signals(iter(signals)) == counts
    assert count_signals([]) == dict.fromkeys(counts, 0)


def test_success_is_not_read_off_the_reward():
    assert group_signal([0.5, 0.5], [False, False]).none_solved
    with pytest.raises(ValueError, match="2 rewards but 1 successes"):
        group_signal([0.0, 1.0], [True])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(0, 40), st.lists(st.booleans(), min_size=80, max_size=80))
def test_refill_ends_at_the_wanted_number_or_at_the_bound(wanted, bound, has_signal):
    rolled = iter(has_signal)
    selected = sum(next(rolled) for _ in range(wanted))
    extra = rounds = 0
    while need := refill_needed(selected, wanted, extra, bound):
        selected += sum(next(rolled) for _ in range(need))
        extra += need
        rounds += 1
        assert rounds <= bound
    assert selected <= wanted
    assert extra <= bound
    assert selected == wanted or extra == bound


def test_refill_of_a_hopeless_task_set_stops():
    assert refill_needed(0, 16, 0, 32) == 16
    assert refill_needed(0, 16, 16, 32) == 16
    assert refill_needed(0, 16, 32, 32) == 0
    assert refill_needed(3, 16, 30, 32) == 2
    assert refill_needed(20, 16, 0, 32) == 0
    with pytest.raises(ValueError, match="num_extra=-1"):
        refill_needed(0, 16, -1, 32)


def test_enumeration_names_equal_values():
    assert all(kind.name == kind.value for kind in GroupFilter)

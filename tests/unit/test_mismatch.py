"""Mismatch of engine and trainer: sums that add up over parts, and nothing that hides a NaN."""

from __future__ import annotations

import math

import pytest
import torch

from wayfinder.train.mismatch import TURN_BINS, MismatchSums

TRAINER = [-1.0, -0.5, -2.0, -3.0, -0.25]
ENGINE = [-1.5, -0.5, -1.0, -3.25, -0.25]
AFTER = [True, False, False, True, False]
TURN = [0, 0, 0, 2, 2]
DIFFERENCE = [0.5, 0.0, -1.0, 0.25, 0.0]


def measured(places: list[int], into: MismatchSums | None = None) -> MismatchSums:
    sums = into or MismatchSums()
    sums.add(
        torch.tensor([TRAINER[i] for i in places]),
        torch.tensor([ENGINE[i] for i in places]),
        torch.tensor([AFTER[i] for i in places], dtype=torch.bool),
        torch.tensor([TURN[i] for i in places], dtype=torch.int32),
    )
    return sums


def test_a_worked_example():
    assert measured([0, 1, 2, 3, 4]).metrics() == pytest.approx(
        {
            "mismatch/ratio_mean": sum(math.exp(d) for d in DIFFERENCE) / 5,
            "mismatch/abs_logprob_diff_mean": 1.75 / 5,
            "mismatch/abs_logprob_diff_max": 1.0,
            "mismatch/after_image/abs_logprob_diff_mean": 0.375,
            "mismatch/after_image/abs_logprob_diff_max": 0.5,
            "mismatch/rest/abs_logprob_diff_mean": 1.0 / 3,
            "mismatch/rest/abs_logprob_diff_max": 1.0,
            "mismatch/first_turn/abs_logprob_diff_mean": 0.5,
            "mismatch/last_turn/abs_logprob_diff_mean": 0.125,
        }
    )


def test_equal_logprobs_give_ratio_one_exactly():
    sums = MismatchSums()
    values = torch.tensor([-0.1, -7.5])
    sums.add(values, values, torch.tensor([True, False]), torch.tensor([0, 1]))
    metrics = sums.metrics()
    assert metrics.pop("mismatch/ratio_mean") == 1.0
    assert set(metrics.values()) == {0.0}


def test_the_ratio_is_trainer_over_engine():
    sums = MismatchSums()
    ratio = torch.tensor([math.log(0.6)]), torch.tensor([math.log(0.3)])
    sums.add(*ratio, torch.tensor([False]), torch.tensor([0]))
    assert sums.metrics()["mismatch/ratio_mean"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    "parts", [[[0], [1, 2], [3, 4]], [[4, 2, 0], [], [1, 3]], [[0, 1, 2, 3, 4], []]]
)
def test_parts_add_up_to_the_whole(parts):
    whole = measured([0, 1, 2, 3, 4]).metrics()
    one_after_the_other, merged = MismatchSums(), MismatchSums()
    for part in parts:
        measured(part, one_after_the_other)
        merged.merge(measured(part))
    assert one_after_the_other.metrics() == pytest.approx(whole, rel=1e-12)
    assert merged.metrics() == pytest.approx(whole, rel=1e-12)


def test_kinds_without_tokens_are_left_out():
    assert MismatchSums().metrics() == {}
    assert measured([]).metrics() == {}
    metrics = measured([1, 2]).metrics()
    assert "mismatch/rest/abs_logprob_diff_mean" in metrics
    assert not [name for name in metrics if "after_image" in name]


def test_turns_share_the_last_bin_far_back():
    sums = MismatchSums()
    turns = torch.tensor([0, TURN_BINS - 1, TURN_BINS + 90])
    sums.add(
        torch.tensor([0.0, -1.0, -3.0]), torch.zeros(3), torch.zeros(3, dtype=torch.bool), turns
    )
    assert sums.turn_count[-1] == 2
    assert sums.metrics()["mismatch/last_turn/abs_logprob_diff_mean"] == 2.0


def test_sums_are_exact_over_many_tokens():
    # Float32 sums of a million differences of 1e-3 would be off in the fifth digit.
    sums = MismatchSums()
    for _ in range(100):
        values = torch.full((10_000,), -1.0)
        kind = torch.zeros(10_000, dtype=torch.bool)
        sums.add(values + 2**-10, values, kind, torch.zeros(10_000))
    assert sums.metrics()["mismatch/abs_logprob_diff_mean"] == pytest.approx(2**-10, rel=1e-12)


def test_gradients_do_not_flow():
    trainer = torch.tensor([-1.0], requires_grad=True)
    sums = MismatchSums()
    sums.add(trainer, torch.tensor([-1.5]), torch.tensor([True]), torch.tensor([0]))
    assert not sums.absolute.requires_grad


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_never_hidden(side, place):
    values = {
        "trainer": torch.tensor([-1.0, -2.0, -3.0]),
        "engine": torch.tensor([-1.0, 5.0, -3.0]),
    }
    values[side][place] = torch.nan
    broken = MismatchSums()
    broken.add(
        values["trainer"], values["engine"], torch.tensor([False] * 3), torch.tensor([0, 1, 1])
    )
    sound = measured([0, 1, 2, 3, 4])
    for first, second in ((broken, sound), (sound, broken)):
        total = MismatchSums()
        total.merge(first)
        total.merge(second)
        metrics = total.metrics()
        for name in ("ratio_mean", "abs_logprob_diff_mean", "abs_logprob_diff_max"):
            assert math.isnan(metrics[f"mismatch/{name}"]), name
        # The gate asks whether the worst one is within bounds; a NaN is not.
        assert not float(total.maximum.max()) <= 1e9

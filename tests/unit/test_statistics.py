"""Statistics of evaluations against enumeration and known distributions."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from support.episodes import expert_moves, walk
from wayfinder.envs.tasks import evaluation_tasks
from wayfinder.evaluate import evaluation_metrics
from wayfinder.statistics import (
    interval_of_mean,
    paired_difference,
    pass_at_k,
    wilson_interval,
)
from wayfinder.types import Outcome


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (4, 1), (6, 3), (8, 8)])
def test_pass_at_k_counts_the_draws_that_hold_a_success(n, c):
    samples = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        draws = [any(draw) for draw in combinations(samples, k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 0), (4, 1, 5), (4, -1, 1)])
def test_pass_at_k_refuses_what_is_not_defined(n, c, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(("n", "c"), [(64, 31), (64, 62), (20, 5)])
def test_the_interval_of_a_rate_is_that_of_the_binomial(n, c):
    """Resampling n values of which c are 1 gives a binomial count, whose quantiles are known."""
    p = c / n
    cumulative = np.cumsum([math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(n + 1)])
    expected = [np.searchsorted(cumulative, tail) / n for tail in (0.025, 0.975)]
    found = interval_of_mean([1.0] * c + [0.0] * (n - c))
    np.testing.assert_allclose(found, expected, atol=1.01 / n)
    assert interval_of_mean([1.0] * c + [0.0] * (n - c)) == found


def test_equal_values_do_not_claim_certainty():
    low, high = interval_of_mean([1.0] * 64)
    assert (round(low, 4), high) == (0.9434, 1.0)  # 64 / (64 + 1.96^2)
    assert interval_of_mean([0.0] * 64) == pytest.approx((0.0, 1 - low))
    assert interval_of_mean([0.5] * 3) == (0.5, 0.5)
    with pytest.raises(ValueError, match="one or more"):
        interval_of_mean([])


def test_wilson_interval_against_known_values():
    # 62 of 64 and 0 of 10, as statsmodels' proportion_confint(method="wilson") gives them.
    assert wilson_interval(62, 64) == pytest.approx((0.8930, 0.9914), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_a_paired_comparison_forgets_what_is_hard_for_both():
    random = np.random.default_rng(1)
    hard = random.integers(0, 2, 64).astype(float)
    better = hard.copy()
    better[np.flatnonzero(hard == 0)[:8]] = 1.0
    mean, low, high = paired_difference(hard, better)
    assert mean == 8 / 64
    assert 0 < low < mean < high < 0.25
    unpaired = [interval_of_mean(v) for v in (hard, better)]
    assert unpaired[0][1] > unpaired[1][0]  # their intervals overlap, and would hide it
    assert paired_difference(hard, hard) == (0, 0, 0)
    with pytest.raises(ValueError, match="not the same tasks"):
        paired_difference([1.0], [1.0, 0.0])


def test_figures_of_an_evaluation():
    tasks = evaluation_tasks("maze_2d/easy", 0, 3)
    frames: dict[str, np.ndarray] = {}
    ways = [expert_moves(task.seed) for task in tasks]
    detour = [(ways[0][0] + 2) % 4]  # against the first wall or back: a turn that is not needed
    episodes = [
        walk(0, [*ways[0], "stop"], Outcome.SOLVED, frames, member=0),
        walk(0, ["stop"], Outcome.STOPPED, frames, member=1),
        walk(1, [*ways[1], "stop"], Outcome.SOLVED, frames, member=0),
        walk(1, [None, *ways[1], "stop"], Outcome.SOLVED, frames, member=1),
        walk(2, detour * 30, Outcome.TURN_LIMIT, frames, member=0),
        walk(2, [], Outcome.ENV_ERROR, frames, member=1),
    ]
    found = evaluation_metrics(episodes, tasks, 30, "eval", (1, 2))
    assert found["eval/solve_rate"] == found["eval/all/pass_at_1"] == pytest.approx(0.5)
    assert found["eval/all/pass_at_2"] == pytest.approx(2 / 3)
    assert found["eval/solve_rate_low"] <= 0.5 <= found["eval/solve_rate_high"]
    counts = ("num_episodes", "num_solved", "wrong_stops", "timeouts", "failed_episodes")
    assert [found[f"eval/{name}"] for name in counts] == [6, 3, 1, 1, 1]
    assert found["eval/parse_failures"] == 1
    lengths = [len(way) for way in ways]
    expected = np.mean([1.0, 1.0, lengths[1] / (lengths[1] + 1)])
    assert found["eval/optimality"] == pytest.approx(expected)
    bins = {key for key in found if "/path_" in key}
    assert bins == {
        f"eval/path_{5 * ((n - 1) // 5) + 1:02d}_{5 * ((n - 1) // 5) + 5:02d}/pass_at_1"
        for n in lengths
    }
    assert found["eval/ceiling"] == np.mean([n + 1 <= 30 for n in lengths])

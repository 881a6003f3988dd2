"""One run as tables."""

from __future__ import annotations

import pytest

from support.episodes import expert_moves, walk
from support.runs import make_run
from wayfinder.envs.tasks import optimal_moves
from wayfinder.record import analysis
from wayfinder.record.layout import METRICS_FILE
from wayfinder.record.metrics import MetricsLog
from wayfinder.record.runs import read_run
from wayfinder.types import Outcome


@pytest.fixture
def run(tmp_path):
    path = make_run(tmp_path, [])
    log = MetricsLog(path / METRICS_FILE)
    counts = {"num_episodes": 8.0, "num_solved": 3.0, "wrong_stops": 2.0, "timeouts": 1.0}
    log.log(0, {f"eval/{name}": value for name, value in counts.items()} | {"time/eval_s": 20.0})
    log.log(1, {"time/rollout_s": 30.0, "time/update_s": 50.0})
    log.log(2, {"time/rollout_s": 70.0})
    return read_run(path)


def test_failure_modes_add_up_to_the_episodes(run):
    (row,) = analysis.failure_modes(run).to_dict("records")
    assert row == {
        "solved": 3,
        "stopped elsewhere": 2,
        "turn limit": 1,
        "system failed": 0,
        "other": 2,
    }
    assert len(analysis.failure_modes(run, "greedy")) == 0


def test_a_time_budget_adds_up_to_the_wall_time(run):
    budget = analysis.time_budget(run)
    assert dict(budget["seconds"]) == {
        "rollout": 100.0,
        "update": 50.0,
        "eval": 20.0,
        "other": 600.0 - 170.0,
    }
    assert budget["share"].sum() == pytest.approx(1)


def test_metrics_have_a_row_for_each_step(run):
    frame = analysis.metrics_frame(run)
    assert list(frame.index) == [0, 1, 2]
    assert frame.loc[2, "time/rollout_s"] == 70.0


def test_outcomes_are_counted_by_the_shortest_path():
    frames = {}
    lengths = {seed: len(expert_moves(seed)) for seed in range(6)}
    episodes = [
        walk(seed, [*expert_moves(seed), "stop"], Outcome.SOLVED, frames)
        if seed % 2
        else walk(seed, ["stop"], Outcome.STOPPED, frames)
        for seed in lengths
    ]
    table = analysis.outcomes_by_path_length(episodes, optimal_moves)
    assert sorted(table.index) == sorted(set(lengths.values()))
    for length, row in table.iterrows():
        seeds = [seed for seed, moves in lengths.items() if moves == length]
        solved = sum(seed % 2 for seed in seeds)
        assert (row["solved"], row["stopped"]) == (solved, len(seeds) - solved)
        assert row["solve_rate"] == solved / len(seeds)
    nothing_solved = analysis.outcomes_by_path_length(episodes[:1], optimal_moves)
    assert nothing_solved["solve_rate"].to_list() == [0.0]

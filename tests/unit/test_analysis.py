"""One run as tables."""

from __future__ import annotations

import pytest

from support.episodes import expert_moves, walk
from support.runs import make_run
from wayfinder.envs.tasks import optimal_moves
from wayfinder.errors import RunDirError
from wayfinder.record import analysis
from wayfinder.record.episodes import episodes_path, write_episodes
from wayfinder.record.layout import METRICS_FILE
from wayfinder.record.metrics import MetricsLog
from wayfinder.record.runs import one_run, read_run
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


def test_metrics_have_a_row_for_each_step_that_has_one(run):
    frame = analysis.metrics_frame(run, ["time/rollout_s", "time/update_s", "train/kl"])
    assert list(frame.index) == [1, 2]
    assert frame.loc[2, "time/rollout_s"] == 70.0
    assert frame["train/kl"].isna().all()


def test_rates_have_a_row_for_each_evaluation(tmp_path):
    frame = analysis.evaluation_rates(read_run(make_run(tmp_path, [], {0: 0.25, 2: 0.5})))
    assert frame.to_dict("index") == {
        0: {"rate": 0.25, "low": 0.2, "high": pytest.approx(0.3)},
        2: {"rate": 0.5, "low": 0.45, "high": 0.55},
    }


def test_outcomes_are_of_the_first_and_the_last_evaluation_that_is_stored(run):
    assert len(analysis.evaluations_by_path_length(run, optimal_moves)) == 0
    frames = {}
    for step, outcome in ((0, Outcome.STOPPED), (5, Outcome.STOPPED), (10, Outcome.SOLVED)):
        moves = [*expert_moves(3), "stop"] if outcome is Outcome.SOLVED else ["stop"]
        episode = walk(3, moves, outcome, frames)
        path = episodes_path(run.path, "eval", step)
        path.parent.mkdir(exist_ok=True)
        write_episodes(path, [episode], frames)
    table = analysis.evaluations_by_path_length(run, optimal_moves)
    length = len(expert_moves(3))
    assert table["solve_rate"].to_dict() == {(0, length): 0.0, (10, length): 1.0}
    assert table["stopped"].to_list() == [1, 0]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunDirError, match=r"a run directory was expected, found: no config"):
        one_run(tmp_path)


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

"""What is due at a point of a run, and that a resumed one owes exactly what was not done."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.configs import model_directory
from wayfinder.config.load import compose
from wayfinder.config.schema import Config
from wayfinder.progress import Progress


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    root = tmp_path_factory.mktemp("progress")
    model = model_directory(root / "model")
    composed = compose(["+experiment=maze_easy", f"model.path={model}", f"paths.root={root}"])
    composed.steps = 7
    composed.eval = replace(composed.eval, interval=2, stop_at=0.9)
    composed.checkpoint = replace(composed.checkpoint, interval=3, every_minutes=10.0)
    return composed


def due(config: Config, progress: Progress, saved: Progress | None = None, minutes: float = 0):
    return (
        progress.evaluation_is_due(config),
        progress.checkpoint_is_due(config, saved or Progress(), minutes),
        progress.is_over(config),
    )


def test_intervals_and_ends(config):
    found = [due(config, Progress(step=step, evaluated_step=step - 1)) for step in range(8)]
    assert [e for e, _, _ in found] == [True, False, True, False, True, False, True, True]
    assert [c for _, c, _ in found] == [False, False, False, True, False, False, True, True]
    assert [o for _, _, o in found] == [False] * 7 + [True]


def test_nothing_is_done_twice(config):
    progress = Progress(step=6)
    assert due(config, progress) == (True, True, False)
    progress.note_evaluation(0.5)
    assert due(config, progress, replace(progress)) == (False, False, False)
    # A checkpoint that an interruption left before the evaluation: the evaluation is still owed,
    # and then a checkpoint that holds it.
    assert due(config, Progress(step=6), Progress(step=6)) == (True, False, False)
    assert due(config, progress, Progress(step=6)) == (False, True, False)


def test_a_checkpoint_by_time(config):
    assert due(config, Progress(step=1), minutes=9.9) == (False, False, False)
    assert due(config, Progress(step=1), minutes=10) == (False, True, False)
    assert due(config, Progress(step=1), Progress(step=1), minutes=99) == (False, False, False)
    assert due(config, Progress(step=0), minutes=99) == (True, False, False)


def test_the_goal_ends_the_run_with_a_checkpoint(config):
    progress = Progress(step=4)
    progress.note_evaluation(0.9)
    assert due(config, progress) == (False, True, True)


def test_the_best_is_the_first_of_equals_and_only_a_measured_rate_counts():
    progress = Progress()
    for step, rate in [(0, 0.2), (2, 0.8), (4, 0.8), (6, 0.5)]:
        progress.step = step
        assert progress.measured_rate is None
        progress.note_evaluation(rate)
        assert progress.measured_rate == rate
    assert (progress.best_solve_rate, progress.best_step) == (0.8, 2)
    assert progress.last_solve_rate == 0.5


def test_a_checkpoint_gives_it_back(config):
    progress = Progress(step=3, policy_version=3, next_task=48, best_solve_rate=0.5, best_step=2)
    assert Progress.from_state(progress.state(config)) == progress

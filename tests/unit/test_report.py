"""Pictures of whole, partial and empty runs."""

import json

import numpy as np
import pytest
from PIL import Image

from support.episodes import expert_moves, walk
from wayfinder.record.episodes import episodes_path, write_episodes
from wayfinder.record.layout import CONFIG_FILE, METRICS_FILE
from wayfinder.record.metrics import MetricsLog
from wayfinder.record.report import final_picture, learning_curve
from wayfinder.types import Outcome

CONFIG = {
    "experiment": "maze_easy",
    "seed": 0,
    "env": {"id": "maze_2d/easy"},
    "model": {"name": "tiny"},
    "rollout": {"temperature": 0.7},
}
BLUE = (0x2F, 0x5F, 0xD0)


@pytest.fixture
def run_path(tmp_path):
    log = MetricsLog(tmp_path / METRICS_FILE)
    for step in range(11):
        metrics = {}
        if step:
            metrics = {
                "train/solve_rate": 0.4 + step / 20,
                "train/entropy": float("nan") if step == 3 else 0.5,
                "mismatch/abs_logprob_diff_max": 0.0 if step == 4 else 2e-6,
                "time/rollout_s": 9.0,
                "time/update_s": 5.0,
            }
        log.log(step, metrics)
        if step % 10 == 0:
            rate = 0.4375 if step == 0 else 0.96875
            log.log(step, {"eval/solve_rate": rate, "eval/num_episodes": 64.0, "eval/ceiling": 1.0})
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"config": CONFIG}))
    return tmp_path


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(np.int16)


def num_blue(path) -> int:
    return int((np.abs(pixels(path) - BLUE).max(axis=-1) < 10).sum())


def test_learning_curve_draws_what_is_there(run_path):
    path = learning_curve(run_path)
    assert path == run_path / "learning_curve.png"
    assert pixels(path).shape == (800, 1300, 3)
    whole = num_blue(path)
    (run_path / METRICS_FILE).write_text(
        "".join((run_path / METRICS_FILE).read_text().splitlines(keepends=True)[:2])
    )
    assert 50 < num_blue(learning_curve(run_path)) < whole / 3


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        'garbage\n{"step": 1, "elap',
        '{"step": 0, "elapsed_s": 1.0, "eval/solve_rate": null, "eval/num_episodes": 64}\n',
    ],
)
def test_runs_without_figures_give_an_empty_curve(tmp_path, metrics):
    if metrics is not None:
        (tmp_path / METRICS_FILE).write_text(metrics)
    assert num_blue(learning_curve(tmp_path)) == 0


def test_final_picture_has_the_curve_above_the_last_evaluation(run_path):
    frames = {}
    solved = walk(0, [*expert_moves(0), "stop"], Outcome.SOLVED, frames)
    failed = walk(1, [0, "stop"], Outcome.STOPPED, frames)
    (run_path / "episodes").mkdir()
    write_episodes(episodes_path(run_path, "eval", 0), [failed], frames)
    write_episodes(episodes_path(run_path, "eval", 10), [solved, failed], frames)
    path = final_picture(run_path)
    assert path == run_path / "picture.png"
    curve, sheet, picture = (
        pixels(run_path / name) for name in ("learning_curve.png", "episodes.png", "picture.png")
    )
    assert np.array_equal(picture[: len(curve)], curve)
    assert len(picture) - len(curve) == round(len(sheet) * 1300 / sheet.shape[1])
    for name, turns in (("solved", solved.turns), ("failed", failed.turns)):
        with Image.open(run_path / f"{name}.gif") as gif:
            assert gif.n_frames == len(turns) + 1


def test_final_picture_without_episodes_is_the_curve(run_path):
    path = final_picture(run_path)
    assert np.array_equal(pixels(path), pixels(run_path / "learning_curve.png"))
    assert not (run_path / "solved.gif").exists()

"""However a task ends, its directory says so, and the first reason is the one that is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.configs import model_directory
from wayfinder.config.load import compose
from wayfinder.errors import RunDirError, SyncError
from wayfinder.recorded import recorded

OVERRIDES = ["+experiment=maze_easy", "tracking=none"]


def record(root: Path, work, *more: str) -> float:
    model = model_directory(root / "model")
    places = [f"paths.root={root / 'runs'}", f"model.path={model}", "run.name=job"]
    config = compose([*OVERRIDES, *places, *more])
    return recorded(config, OVERRIDES, 0.0, lambda directory, log, trackers: work(directory, log))


def summary(root: Path) -> dict:
    return json.loads((root / "runs" / "job" / "summary.json").read_text())


def evaluated(directory, log) -> None:
    log.log(0, {"eval/solve_rate": 0.5})


def fail(*_) -> None:
    raise SyncError("the adapter is lost")


def interrupt(*_) -> None:
    raise KeyboardInterrupt


def away(directory, log) -> None:
    directory.path.rename(directory.path.with_name("away"))


def test_a_finished_task_is_looked_up_the_second_time(tmp_path):
    assert record(tmp_path, evaluated) == 0.5
    assert record(tmp_path, fail) == 0.5


@pytest.mark.parametrize(
    ("work", "raised", "status"),
    [(fail, SyncError, "failed"), (interrupt, KeyboardInterrupt, "interrupted")],
)
def test_another_end_is_told_and_the_task_goes_on(tmp_path, work, raised, status):
    with pytest.raises(raised):
        record(tmp_path, work)
    assert summary(tmp_path)["status"] == status
    assert record(tmp_path, evaluated) == 0.5
    assert summary(tmp_path)["status"] == "finished"


@pytest.mark.parametrize(("work", "raised"), [(fail, SyncError), (interrupt, KeyboardInterrupt)])
def test_the_first_reason_is_told_where_nothing_can_be_written(tmp_path, caplog, work, raised):
    with pytest.raises(raised):
        record(tmp_path, lambda *run: (away(*run), work(*run)))
    assert "summary.json: a writable path was expected" in caplog.text
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["away"]


def test_without_its_summary_a_task_has_not_finished(tmp_path):
    with pytest.raises(RunDirError, match=r"summary\.json: a writable path"):
        record(tmp_path, away)


def test_memory_that_the_driver_cannot_see_is_not_given_as_a_figure(tmp_path):
    record(tmp_path / "own", evaluated)
    record(tmp_path / "joined", evaluated, "cluster.address=auto")
    assert summary(tmp_path / "own")["peak_memory_bytes"] > 2**20
    assert summary(tmp_path / "joined")["peak_memory_bytes"] is None

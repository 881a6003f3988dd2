"""Jobs in processes of their own, without Hydra: how each end of one is told, and in what time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from wayfinder import side_by_side
from wayfinder.errors import JobFailedError
from wayfinder.side_by_side import Job, do


class Noted(Job):
    result: Any = None

    def ended(self, result: Any) -> None:
        self.result = result


class Sleeps(Noted):
    def work(self) -> float:
        time.sleep(60)
        return 0.0


class LeavesAChild(Noted):
    """Is killed, and leaves a process behind that has all that it had open."""

    def __init__(self, file: Path) -> None:
        super().__init__(0)
        self.file = file

    def work(self) -> float:
        if not (child := os.fork()):
            time.sleep(60)
            os._exit(0)
        self.file.write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)


class TakesItsTime(Noted):
    """Sends its command a SIGTERM, and takes `seconds` to end when it gets one itself."""

    def __init__(self, seconds: float, file: Path) -> None:
        super().__init__(0)
        self.seconds, self.file = seconds, file

    def work(self) -> float:
        signal.signal(signal.SIGTERM, self.end)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
        return 0.0

    def end(self, *_: object) -> None:
        time.sleep(self.seconds)
        self.file.write_text("saved")
        os._exit(143)


class CannotBegin(Noted):
    def begins(self) -> None:
        raise OSError("Resource temporarily unavailable")


def test_a_job_that_cannot_be_started_leaves_no_other_behind():
    first = Sleeps(0)
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        do([first, CannotBegin(1)], 2, 0.0)
    first.process.join(10)
    assert first.process.exitcode == -signal.SIGTERM


def test_what_a_killed_job_leaves_behind_is_not_waited_for(tmp_path):
    job = LeavesAChild(tmp_path / "child")
    began = time.monotonic()
    assert do([job], 1, 0.0) == 0
    assert time.monotonic() - began < 30
    assert isinstance(job.result, JobFailedError)
    assert "its process was ended by SIGKILL" in str(job.result)
    child = int((tmp_path / "child").read_text())
    while _is_running(child):
        assert time.monotonic() - began < 30
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("grace_s", "saved"), [(30.0, True), (0.0, False)])
def test_an_interrupted_job_has_the_grace_that_it_was_given(tmp_path, monkeypatch, grace_s, saved):
    monkeypatch.setattr(side_by_side, "_LEAVE_S", 0.0)
    job = TakesItsTime(2.0, tmp_path / "file")
    assert do([job], 1, grace_s) == 143
    assert (tmp_path / "file").exists() == saved
    assert job.result is None

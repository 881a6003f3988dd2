"""Whole runs of a small job, started as a user starts them, and their processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from wayfinder.record.metrics import read_metrics

ROOT = Path(__file__).parents[2]
SMALL = [
    "+experiment=maze_easy",
    "steps=2",
    "eval.tasks=8",
    "eval.unseen_tasks=0",
    "eval.final_greedy=false",
    "algorithm.tasks_per_step=4",
    "algorithm.group_size=4",
    "env.max_turns=20",
]
# By the beginning of what `ps` shows.
TITLES = {
    "engine": "ray::EngineWorker",
    "core": "VLLM::EngineCore",
    "rank": "ray::PolicyWorker",
    "gcs": "gcs_server",
    "raylet": "raylet",
}


def command(root: Path, name: str, *extra: str) -> list[str]:
    """The command of a run of SMALL, in which `extra` wins."""
    keys = {override.partition("=")[0] for override in extra}
    small = [override for override in SMALL if override.partition("=")[0] not in keys]
    return [sys.executable, "run.py", *small, f"paths.root={root}", f"run.name={name}", *extra]


def run(root: Path, name: str, *extra: str, expect: int = 0) -> str:
    done = subprocess.run(
        command(root, name, *extra),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == expect, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def figures(directory: Path) -> list[dict]:
    """Metrics without what a clock says, or counts of what went wrong."""
    clocks = ("time", "elapsed_s")
    return [
        {
            key: value
            for key, value in line.items()
            if key not in clocks and not key.startswith(("time/", "throughput/", "faults/"))
        }
        for line in read_metrics(directory / "metrics.jsonl")
    ]


def assert_same_result(directory: Path, calm: Path, adapters: Path | None = None) -> None:
    """Two runs of SMALL have the same metrics, final adapter and episodes, bit for bit.

    `adapters`: where the first one published, if not in its directory.
    """
    assert figures(directory) == figures(calm)
    weights, episodes = "2/adapter_model.safetensors", "episodes/eval_step_000002.jsonl"
    mine = (adapters or directory / "adapters") / weights
    assert mine.read_bytes() == (calm / "adapters" / weights).read_bytes()
    assert (directory / episodes).read_bytes() == (calm / episodes).read_bytes()


class Command:
    """A command that a test disturbs. It leads a process group of its own."""

    def __init__(self, command: list[str]) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # Tests that are run in the background inherit an ignored SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        self.lines.extend(self.process.stdout)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def until(self, condition: Callable[[], object], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.output[-4000:]
            assert time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.02)

    def until_line(self, start: str) -> None:
        self.until(lambda: any(line.startswith(start) for line in self.lines))

    def end(self, seconds: float = 400) -> int:
        """Wait for the end of the command; its exit code."""
        try:
            code = self.process.wait(seconds)
            self._reader.join(30)
            return code
        finally:
            if self.process.poll() is None:
                self.process.kill()


class Running(Command):
    """A run, and its processes. `prefix`: a command that runs it."""

    def __init__(self, root: Path, name: str, *extra: str, prefix: Sequence[str] = ()) -> None:
        self.directory = root / name
        self._seen: dict[int, psutil.Process] = {}
        super().__init__([*prefix, *command(root, name, *extra)])

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def events(self) -> str:
        return (self.directory / "events.log").read_text()

    def processes(self) -> dict[str, psutil.Process]:
        """The processes of the run that are named in TITLES and exist now."""
        found: dict[str, psutil.Process] = {}
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return found
        for process in children:
            try:
                self._seen[process.pid] = process
                title = " ".join(process.cmdline()) + " " + process.name()
                for kind, start in TITLES.items():
                    if title.startswith(start) or process.name() == start:
                        found[kind] = process
            except psutil.NoSuchProcess:
                continue
        return found

    def until_playing(self) -> dict[str, psutil.Process]:
        """Wait until the engine plays episodes; the run's processes."""
        self.until(lambda: "EngineWorker.play" in " ".join(self._engine_title()))
        return self.processes()

    def _engine_title(self) -> list[str]:
        engine = self.processes().get("engine")
        try:
            return engine.cmdline() if engine else []
        except psutil.NoSuchProcess:
            return []

    def kill_left(self, seconds: float) -> list[str]:
        """Wait for the processes that were seen; kill those that stay. Their command lines."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=seconds)
        lines = []
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                lines.append(" ".join(process.cmdline())[:200])
                process.kill()
        return lines

    def end(self, seconds: float = 400) -> int:
        """Wait for the end of the command; its exit code. None of its processes may be left."""
        code = super().end(seconds)
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=30)
        assert not alive, alive
        return code

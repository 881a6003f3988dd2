"""The runs below a directory as their files tell, whether finished, failed, running or partial.

Nothing that lies there stops the reader. A directory that cannot be a row of a table is named with
the reason; what is missing in one that can is noted.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wayfinder.config.identity import changed_values, flat
from wayfinder.errors import RunDirError
from wayfinder.record.layout import (
    ADAPTERS_DIR,
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    EPISODES_DIR,
    EVENTS_FILE,
    LOCK_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    WANDB_DIR,
)
from wayfinder.record.lock import read_holder
from wayfinder.record.metrics import broken_lines, read_metrics
from wayfinder.record.summary import SOLVE_RATE

FINISHED = "finished"
RUNNING = "running"
UNFINISHED = "unfinished"
"""No summary, and no process that will write one: the run was killed."""
DAMAGED = "damaged"
"""The summary tells of an end that the metrics do not reach: their file was cut since."""

_INSIDE_RUNS = {ADAPTERS_DIR, CHECKPOINTS_DIR, EPISODES_DIR, WANDB_DIR}
_ATTEMPT = re.compile(r"^\S+ (?:created|resumed) pid=", re.MULTILINE)
_MARKS = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, EVENTS_FILE)


@dataclass(frozen=True)
class RunRecord:
    """What one run directory says. Metrics are those of `read_metrics`, one line a step."""

    path: Path
    name: str  # path below the directory that was searched
    stored: dict[str, Any]  # config.resolved.json
    lines: list[dict[str, Any]]
    summary: dict[str, Any]  # empty: the run has not ended
    status: str  # of the summary, or RUNNING, UNFINISHED or DAMAGED
    attempts: int  # starts and resumes
    notes: tuple[str, ...]  # what is missing or was left out

    @property
    def config(self) -> dict[str, Any]:
        return self.stored["config"]

    @property
    def experiment(self) -> str:
        return str(self.config.get("experiment", ""))

    @property
    def overrides(self) -> list[str]:
        """Of the first attempt."""
        given = self.stored.get("overrides")
        return [str(override) for override in given] if isinstance(given, list) else []

    @cached_property
    def changed(self) -> dict[str, str]:
        """The overrides that make it another run than its experiment, the seed apart."""
        return changed_values(self.overrides)

    @cached_property
    def values(self) -> dict[str, Any]:
        """The configuration by dotted keys."""
        return flat(self.config)

    def value(self, key: str) -> Any:
        """What the run had for a key, or for a group (its option or name); None if it says none."""
        if key in self.values:
            found = self.values[key]
            return json.dumps(found) if isinstance(found, list) else found
        return self.changed.get(key, self.values.get(f"{key}.name"))

    @property
    def wall_s(self) -> float | None:
        """Seconds over all attempts; of a run that has not ended, up to its last line."""
        ended = as_number(self.summary.get("wall_s"))
        if ended is not None:
            return ended
        return max((line["elapsed_s"] for line in self.lines), default=None)

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric is a number."""
        pairs = ((line["step"], as_number(line.get(metric))) for line in self.lines)
        return [(step, value) for step, value in pairs if value is not None]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A directory that looks like a run and cannot be read as one."""

    name: str
    reason: str


def read_runs(root: Path) -> tuple[list[RunRecord], list[LeftOut]]:
    """Every run at or below `root`, by name, and what was left out."""
    runs: list[RunRecord] = []
    left_out: list[LeftOut] = []
    for path in _run_directories(root):
        found = read_run(path, root)
        (runs if isinstance(found, RunRecord) else left_out).append(found)
    return runs, left_out


def read_run(path: Path, root: Path | None = None) -> RunRecord | LeftOut:
    """One run directory; it is named by its path below `root`."""
    name = path.name if root in (None, path) else path.relative_to(root).as_posix()
    stored = _read_json(path / CONFIG_FILE)
    if isinstance(stored, str):
        return LeftOut(name, stored)
    if not isinstance(stored.get("config"), dict):
        return LeftOut(name, f"{CONFIG_FILE} holds no config")
    notes = []
    summary = _read_json(path / SUMMARY_FILE) if (path / SUMMARY_FILE).exists() else {}
    if isinstance(summary, str):
        notes.append(summary)
        summary = {}
    try:
        lines = read_metrics(path / METRICS_FILE)
        broken = broken_lines(path / METRICS_FILE, ended=bool(summary))
    except OSError as error:
        lines, broken = [], 0
        notes.append(f"{METRICS_FILE}: {error.strerror or error}")
    if broken:
        notes.append(f"{METRICS_FILE}: {broken} broken lines were left out")
    status, note = _status(path, summary, lines)
    if note:
        notes.append(note)
    return RunRecord(path, name, stored, lines, summary, status, _attempts(path), tuple(notes))


def one_run(path: Path) -> RunRecord:
    """The run in a directory. Raises `RunDirError` with the reason where none can be read."""
    found = read_run(path)
    if isinstance(found, LeftOut):
        raise RunDirError(f"{path}: a run directory was expected, found: {found.reason}.")
    return found


def as_number(value: Any) -> float | None:
    """The value if it is a finite number, which a broken or older file does not promise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _run_directories(root: Path) -> Iterator[Path]:
    """Links are followed to other places, and no directory is given twice."""
    top = Path(root).resolve()

    def is_elsewhere(path: Path) -> bool:
        """What lies below the root has its own path there; what holds the root has more than it."""
        place = path.resolve()
        return not (path.is_symlink() and (place.is_relative_to(top) or top.is_relative_to(place)))

    seen: set[str] = set()
    for directory, below, files in os.walk(root, followlinks=True):
        place = os.path.realpath(directory)
        if place in seen:
            below.clear()
            continue
        seen.add(place)
        if any(mark in files for mark in _MARKS):
            yield Path(directory)
            below[:] = [name for name in below if name not in _INSIDE_RUNS]
        below[:] = sorted(
            name
            for name in below
            if not name.startswith(".") and is_elsewhere(Path(directory, name))
        )


def _status(
    path: Path, summary: dict[str, Any], lines: list[dict[str, Any]]
) -> tuple[str, str | None]:
    if summary:
        status = str(summary.get("status", "unknown"))
        told, there = as_number(summary.get("steps")), max((li["step"] for li in lines), default=0)
        if status == FINISHED and told is not None and there < told:
            return DAMAGED, f"{METRICS_FILE} ends at step {there}, {SUMMARY_FILE} at step {told:g}"
        last = as_number(summary.get("solve_rate_last"))
        rates = [rate for line in lines if (rate := as_number(line.get(SOLVE_RATE))) is not None]
        if status == FINISHED and last is not None and last not in rates[-1:]:
            return DAMAGED, f"{METRICS_FILE} lacks the last evaluation, of {last:g}"
        return status, None
    holder = read_holder(path / LOCK_FILE)
    if holder is None or holder.is_gone():
        return UNFINISHED, "no summary, and its process is gone: repeat its command to go on"
    return RUNNING, f"still running, as far as can be seen from here: {holder}"


def _attempts(path: Path) -> int:
    try:
        return len(_ATTEMPT.findall((path / EVENTS_FILE).read_text(errors="replace")))
    except OSError:
        return 0


def _read_json(path: Path) -> dict[str, Any] | str:
    """The object in a file, or why there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return f"no {path.name}"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    except ValueError as error:
        return f"{path.name} is not JSON: {error}"
    return value if isinstance(value, dict) else f"{path.name} holds no object"

"""`metrics.jsonl`: every number of a run, on disk before anything else happens with it.

One JSON object a line: `step`, `time` (Unix), `elapsed_s` (seconds that the run has run, over all
its attempts) and the metrics by name. A step usually has one line; a later line of the same step
(an evaluation at the end) adds to it. A number that is NaN or infinite is written as null, warned
about, and counted in `record/nonfinite` of its line.

Nothing is lost on a resume: lines of steps after the checkpoint, and a line that a crash cut in
half, move to `metrics.discarded.jsonl`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wayfinder.errors import RunDirError
from wayfinder.record.atomic import (
    atomic_write_bytes,
    nonfinite_to_null,
    strict_json,
    write_error,
)

NONFINITE = "record/nonfinite"
RESERVED = ("step", "time", "elapsed_s")
_MOST_STEPS = 2**53  # what every reader of JSON can hold

logger = logging.getLogger(__name__)


class MetricsLog:
    """Append-only log of one run; also the first of its trackers, the one that must not fail."""

    name = "metrics.jsonl"
    required = True

    def __init__(self, path: Path, started: float | None = None) -> None:
        """Open or make the file; `started` is the Unix time at which this attempt began.

        Raises `RunDirError` when a line other than the last is broken.
        """
        self.path = path
        self.discarded_path = path.with_name(f"{path.stem}.discarded{path.suffix}")
        self._started = time.time() if started is None else started
        lines = self._repair()
        self._earlier_s = max((line["elapsed_s"] for line in lines), default=0.0)
        self.last_step: int | None = max((line["step"] for line in lines), default=None)
        self._file = self._open()

    @property
    def elapsed_s(self) -> float:
        """Seconds of this attempt, plus those of earlier ones up to their last line."""
        return self._earlier_s + time.time() - self._started

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of one step and wait until it is on disk. Steps never go back."""
        clash = metrics.keys() & set(RESERVED)
        if clash:
            raise ValueError(f"metrics may not be named {sorted(clash)}")
        if self.last_step is not None and step < self.last_step:
            raise ValueError(f"step {step} after step {self.last_step}: truncate_after comes first")
        values, bad = nonfinite_to_null(dict(metrics))
        if bad:
            logger.warning("step %d: not finite, written as null: %s", step, ", ".join(bad))
            values[NONFINITE] = len(bad)
        head = {"step": step, "time": round(time.time(), 3), "elapsed_s": round(self.elapsed_s, 3)}
        self._append(strict_json(head | values) + "\n")
        self.last_step = step

    def truncate_after(self, step: int) -> int:
        """Move the lines of later steps to `metrics.discarded.jsonl`; return how many.

        Lines of `step` itself stay, so they must be written before the checkpoint of that step is
        committed. -1 starts over.
        """
        kept, dropped = [], []
        for raw in self.path.read_bytes().splitlines(keepends=True):
            (kept if json.loads(raw)["step"] <= step else dropped).append(raw)
        if dropped:
            self._file.close()
            self._discard(b"".join(dropped))
            atomic_write_bytes(self.path, b"".join(kept))
            self._file = self._open()
        self.last_step = max((json.loads(raw)["step"] for raw in kept), default=None)
        return len(dropped)

    def phase(self, text: str) -> None:
        """Not a metric."""

    def pictures(self, step: int, pictures: Mapping[str, Path]) -> None:
        """Pictures lie in the run directory already."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the file; the summary has its own."""
        self._file.close()

    def _open(self):
        try:
            return open(self.path, "ab", buffering=0)
        except OSError as error:
            raise write_error(self.path, error) from error

    def _append(self, line: str) -> None:
        data = memoryview(line.encode())
        end = self._file.tell()
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # half a line would spoil the next one
                self._file.truncate(end)
            raise write_error(self.path, error) from error

    def _repair(self) -> list[dict[str, Any]]:
        """Cut a half-written last line off; return the whole ones."""
        if not self.path.exists():
            return []
        raws = self.path.read_bytes().splitlines(keepends=True)
        lines = [_parse(raw) for raw in raws]
        if lines and lines[-1] is None:
            half = json.dumps({"half_line": raws[-1].decode(errors="replace")}) + "\n"
            self._discard(half.encode())
            atomic_write_bytes(self.path, b"".join(raws[:-1]))
            lines.pop()
        if None in lines:
            raise RunDirError(
                f"{self.path}: one JSON object a line was expected, line {lines.index(None) + 1} "
                "is none. Mend: restore the file, or delete that line."
            )
        return [line for line in lines if line is not None]

    def _discard(self, data: bytes) -> None:
        try:
            with open(self.discarded_path, "ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise write_error(self.discarded_path, error) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One dictionary a step, in order; lines of the same step are merged, the later one winning.

    For readers of finished, running and broken runs: no file gives an empty list, lines that are
    not whole are left out.
    """
    if not path.exists():
        return []
    steps: dict[int, dict[str, Any]] = {}
    for raw in path.read_bytes().splitlines(keepends=True):
        line = _parse(raw)
        if line is not None:
            steps.setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps)]


def broken_lines(path: Path, ended: bool) -> int:
    """How many lines `read_metrics` leaves out; of a run that has not `ended`, without a last one
    that is still being written."""
    if not path.exists():
        return 0
    raws = path.read_bytes().splitlines(keepends=True)
    return sum((ended or raw.endswith(b"\n")) and _parse(raw) is None for raw in raws)


def _parse(raw: bytes) -> dict[str, Any] | None:
    """The object of one line, None if it is not a whole one."""
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    if not (raw.endswith(b"\n") and isinstance(line, dict)):
        return None
    step, elapsed_s = line.get("step"), line.get("elapsed_s")
    whole = isinstance(step, int) and 0 <= step < _MOST_STEPS and isinstance(elapsed_s, int | float)
    return line if whole else None

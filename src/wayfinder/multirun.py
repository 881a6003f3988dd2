"""The last word of a multirun: which jobs failed, and the table of all runs.

Hydra says this late and in part. It tells of the first failed job alone, when all have ended; it
does not call `on_multirun_end` when a job failed; and what a callback raises becomes a warning. So
the callback takes notes, and `run.py` asks for the last word, however Hydra returns.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wayfinder.config.identity import run_name
from wayfinder.errors import ConfigError, JobFailedError, WayfinderError
from wayfinder.record.layout import ERROR_FILE

_LONGEST_REASON = 600
_begun: list[JobNotes] = []


class JobNotes:
    """Hydra callback (`hydra.callbacks` in `conf/config.yaml`)."""

    def __init__(self) -> None:
        self.roots: dict[Path, None] = {}  # of the jobs, in their order
        self.num_jobs = 0
        self.failed: list[str] = []
        self.num_running = 0

    def on_multirun_start(self, **_: Any) -> None:
        _begun.append(self)

    def on_job_start(self, config: Any, **_: Any) -> None:
        if (root := _root(config)) is not None:
            self.roots[root] = None
        self.num_jobs += 1
        self.num_running += 1

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        self.num_running -= 1  # not called for a job that is interrupted
        if self not in _begun:  # a single run tells of itself
            return
        if job_return.status.name == "FAILED":
            problem = job_return._return_value  # its property would raise it
            job = " ".join(job_return.overrides)
            self.failed.append(f"#{config.hydra.job.num} {job}: {reason(problem)}")
            name = config.run.name or run_name(config.experiment, job_return.overrides, config.seed)
            root = _root(config)
            if root is not None and (log := root / name / ERROR_FILE).exists():
                self.failed[-1] += f"\n    traceback: {log}"
            print(f"job failed, the others go on: {self.failed[-1]}", file=sys.stderr)

    def on_multirun_end(self, **_: Any) -> None:
        """Hydra asks every callback for all of its hooks."""

    on_run_start = on_run_end = on_multirun_end


def _root(config: Any) -> Path | None:
    """`paths.root` of a job; None where it refers to what is not there, of which the job tells."""
    try:
        return Path(config.paths.root).expanduser().absolute()
    except ValueError:
        return None


def objective(solve_rate: float, sweeper: Mapping[str, Any]) -> float:
    """What a job returns to Hydra. A sweeper that optimises would end its study at a NaN; it goes
    on after a failed job."""
    if math.isnan(solve_rate) and "direction" in sweeper:
        raise ConfigError(
            "the sweeper optimises the solve rate, and this job has none. Set task=train or "
            "task=evaluate, or leave +sweep=optuna out."
        )
    return solve_rate


def conclude() -> bool:
    """After a multirun of this process: list its failed jobs, report the runs below their
    `paths.root`, and return whether all went well. Nothing after a single run, or when no job was
    begun or one was interrupted."""
    for notes in _begun:
        if notes.num_running or not notes.num_jobs:
            continue
        if notes.failed:
            title = f"{len(notes.failed)} of {notes.num_jobs} jobs failed:"
            print(title, *notes.failed, sep="\n  ", file=sys.stderr)
            print("repeat the command to try them again; the others are kept", file=sys.stderr)
        for root in notes.roots:
            _report(root)
    return not any(notes.failed for notes in _begun)


def _report(root: Path) -> None:
    from wayfinder.reporting import report_runs

    if not root.is_dir():  # every job was refused
        return
    try:
        report_runs(root)
    except WayfinderError as error:
        print(error, file=sys.stderr)
    except Exception:  # loud, but no job failed
        traceback.print_exc()
        print(f"no table of the runs below {root}; their records are whole", file=sys.stderr)


def reason(problem: BaseException) -> str:
    """Kind and message; `run.py` hands our own errors to Hydra as the cause of one of Hydra's."""
    problem = problem.__cause__ if isinstance(problem.__cause__, WayfinderError) else problem
    kind = "" if isinstance(problem, JobFailedError) else f"{type(problem).__name__}: "
    return f"{kind}{' '.join(str(problem).split())}"[:_LONGEST_REASON]

"""`summary.json`: how a run ended, in one flat dictionary that tables are built from."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from wayfinder.record.layout import METRICS_FILE
from wayfinder.record.metrics import read_metrics
from wayfinder.record.provenance import commit, versions
from wayfinder.record.run_dir import RunDir

SOLVE_RATE = "eval/solve_rate"


class Status(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"  # an exception ended it
    INTERRUPTED = "interrupted"  # a person or the scheduler did


def build_summary(
    run: RunDir,
    status: Status,
    *,
    wall_s: float,
    peak_memory_bytes: int | None,
    error: str | None = None,
) -> dict[str, Any]:
    """The summary of a run, with its rates and steps as `metrics.jsonl` has them.

    `wall_s`: seconds of all attempts (`MetricsLog.elapsed_s`). `peak_memory_bytes`: see
    `PeakMemory`; None where it was not measured. `error`: text of the exception.
    """
    rates = solve_rates(run.path)
    values = [rate for _, rate in rates]
    revision, dirty = commit()
    best_step, best = max(rates, key=lambda pair: pair[1], default=(None, None))
    return {
        "status": str(status),
        "solve_rate_first": values[0] if values else None,
        "solve_rate_best": best,
        "solve_rate_best_step": best_step,
        "solve_rate_last": values[-1] if values else None,
        "steps": max((line["step"] for line in read_metrics(run.path / METRICS_FILE)), default=0),
        "wall_s": round(wall_s, 3),
        "peak_memory_bytes": peak_memory_bytes,
        "name": run.name,
        "config_hash": run.config_hash,
        "commit": revision,
        "dirty": dirty,
        "versions": versions(),
        "error": error,
    }


def solve_rates(run_path: Path) -> list[tuple[int, float]]:
    """(step, solve rate) of each evaluation on the fixed set, in order."""
    lines = read_metrics(run_path / METRICS_FILE)
    return [(line["step"], line[SOLVE_RATE]) for line in lines if line.get(SOLVE_RATE) is not None]

"""A task with its records around it: directory, trackers, and a summary that tells how it ended."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

from wayfinder.config.identity import config_hash, run_name, to_dict
from wayfinder.config.schema import Config
from wayfinder.record.memory import PeakMemory
from wayfinder.record.metrics import MetricsLog
from wayfinder.record.run_dir import RunDir
from wayfinder.record.summary import Status, build_summary
from wayfinder.record.tracking import Trackers, start_trackers

logger = logging.getLogger(__name__)


def recorded(
    config: Config,
    overrides: list[str],
    began: float,
    work: Callable[[RunDir, MetricsLog, Trackers], None],
) -> float:
    """Do `work` in its run directory and leave a summary there, however it ends. The solve rate.

    A run that is finished already is looked up. `began`: Unix time at which the job began.
    """
    name = config.run.name or run_name(config.experiment, overrides, config.seed)
    resolved = to_dict(config)
    with RunDir.open(
        Path(config.paths.root),
        name,
        resolved,
        config_hash(config),
        str(config.run.on_existing),
        overrides,
    ) as directory:
        if directory.finished_summary is not None:
            print(f"finished already: {directory.path} (run.on_existing=new starts another)")
            return _rate(directory.finished_summary["solve_rate_last"])
        log = MetricsLog(directory.metrics_file, began)
        trackers = start_trackers(directory, config, resolved, overrides, log)
        with PeakMemory() as memory:
            status, error = Status.FAILED, None
            try:
                work(directory, log, trackers)
                status = Status.FINISHED
            except KeyboardInterrupt:
                status = Status.INTERRUPTED
                raise
            except BaseException as problem:
                error = f"{type(problem).__name__}: {problem}"
                directory.failure(problem)
                raise
            finally:
                try:
                    summary = build_summary(
                        directory,
                        status,
                        wall_s=log.elapsed_s,
                        # Workers of a Ray that was joined are not below this process.
                        peak_memory_bytes=None if config.cluster.address else memory.peak_bytes,
                        error=error,
                    )
                    trackers.finish(summary, 0 if status is Status.FINISHED else 1)
                    directory.write_summary(summary)
                except OSError as problem:
                    if status is Status.FINISHED:
                        raise
                    # A run that ends badly says why it did, even where that cannot be written.
                    logger.warning("%s", problem)
    print(f"{status} {directory.path} solve rate {summary['solve_rate_last']}")
    return _rate(summary["solve_rate_last"])


def _rate(value: float | None) -> float:
    return math.nan if value is None else float(value)

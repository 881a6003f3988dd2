"""Hydra launcher `side_by_side`: `wayfinder.side_by_side` as Hydra's multirun uses it.

Hydra takes plugins from the package `hydra_plugins` alone, and loads them all at every start.

Callbacks are told of jobs in this process, where the notes of `wayfinder.multirun` are; the
processes of the jobs call none.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.utils import (
    JobReturn,
    JobStatus,
    configure_log,
    filter_overrides,
    run_job,
    setup_globals,
)
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from wayfinder import side_by_side
from wayfinder.config.violation import Violation, report
from wayfinder.errors import ConfigError, JobFailedError
from wayfinder.multirun import reason

logger = logging.getLogger(__name__)

_ON_RAY = ("train", "evaluate")


class SideBySideLauncher(Launcher):
    def __init__(self, n_jobs: int) -> None:
        self.n_jobs = n_jobs

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.context = hydra_context
        self.task = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Do all jobs; those that fail say so in what is returned, as with Hydra's own launcher."""
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        jobs = [
            HydraJob(self, initial_job_idx + index, list(overrides))
            for index, overrides in enumerate(job_overrides)
        ]
        try:
            _check(self.n_jobs, [job.config for job in jobs])
        except ConfigError as error:  # which Hydra would make exit code 1
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)
        logger.info("Launching %d jobs, at most %d at once", len(jobs), self.n_jobs)
        grace_s = max((job.config.checkpoint.grace_s for job in jobs), default=0.0)
        if exit_code := side_by_side.do(jobs, self.n_jobs, grace_s):
            sys.exit(exit_code)
        return [job.result for job in jobs]


class HydraJob(side_by_side.Job):
    """One job as Hydra's own launcher would run it."""

    def __init__(self, launcher: SideBySideLauncher, number: int, overrides: list[str]) -> None:
        super().__init__(number)
        self.context, self.task = launcher.context, launcher.task
        self.shown = " ".join(filter_overrides(overrides))
        self.config = self.context.config_loader.load_sweep_config(launcher.config, overrides)
        with open_dict(self.config):
            self.config.hydra.job.id = number
            self.config.hydra.job.num = number
        self.result = JobReturn(overrides=list(self.config.hydra.overrides.task))

    def begins(self) -> None:
        logger.info("\t#%d : %s", self.number, self.shown)
        self.context.callbacks.on_job_start(config=self.config, task_function=self.task)

    def work(self) -> float:
        done = run_job(
            hydra_context=HydraContext(self.context.config_loader, Callbacks()),
            task_function=self.task,
            config=self.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        if done.status is JobStatus.FAILED:
            problem = done._return_value  # its property would raise it
            if not isinstance(problem, CompactHydraException):
                traceback.print_exception(problem)
            raise JobFailedError(reason(problem))
        return done.return_value

    def ended(self, result: Any) -> None:
        self.result.status = JobStatus.COMPLETED
        if isinstance(result, JobFailedError):
            self.result.status = JobStatus.FAILED
            problem = CompactHydraException(str(result))  # its trace is told where it happened
            problem.__cause__ = result
            result = problem
        self.result.return_value = result
        self.context.callbacks.on_job_end(config=self.config, job_return=self.result)


def _check(n_jobs: int, jobs: Sequence[DictConfig]) -> None:
    """Raise one ConfigError when these jobs would be in each other's way."""
    if n_jobs < 1:
        mend = "Set hydra.launcher.n_jobs=4"
        raise ConfigError(report([Violation("hydra.launcher.n_jobs", "1 or more", n_jobs, mend)]))
    if n_jobs == 1:
        return
    serially = "leave hydra/launcher=side_by_side out: then one job follows the other"
    found: dict[str, Violation] = {}
    for job in jobs:
        if job.task.value not in _ON_RAY:
            found[job.task.value] = Violation(
                "task",
                f"{' or '.join(_ON_RAY)} with jobs side by side: the others do not run on Ray, "
                "which keeps jobs from sharing a device",
                job.task.value,
                serially.capitalize(),
            )
        elif job.cluster.address is None:
            found["address"] = Violation(
                "cluster.address",
                "the Ray that the jobs share, with jobs side by side: each would start one of its "
                "own, for which all devices and memory of this machine are free",
                None,
                "Set cluster.address=auto (on one machine after `ray start --head`), or "
                + serially,
            )
    if found:
        raise ConfigError(report(found.values()))

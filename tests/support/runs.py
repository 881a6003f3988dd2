"""Run directories as a run leaves them, without the hours: real writers, made-up figures."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from wayfinder.config.identity import config_hash, run_name, to_dict
from wayfinder.config.load import compose_unchecked
from wayfinder.config.schema import Config
from wayfinder.record.metrics import MetricsLog
from wayfinder.record.run_dir import RunDir
from wayfinder.record.summary import Status, build_summary


def make_run(
    root: Path,
    overrides: list[str],
    rates: Mapping[int, float] | None = None,
    status: Status | None = Status.FINISHED,
    error: str | None = None,
) -> Path:
    """A run of `+experiment=maze_easy` below `root`: evaluations with 64 episodes at the steps of
    `rates`, training metrics at every step from 1 to the last of them, and a summary with `status`
    (None: the process died)."""
    command = ["+experiment=maze_easy", *overrides]
    config = copy.deepcopy(_composed(tuple(o for o in command if not o.startswith("seed="))))
    config.seed = next((int(o[5:]) for o in command if o.startswith("seed=")), 0)
    name = run_name(config.experiment, command, config.seed)
    rates = rates or {}
    with RunDir.open(root, name, to_dict(config), config_hash(config), "resume", command) as run:
        log = MetricsLog(run.metrics_file)
        for step in range(max(rates, default=0) + 1):
            if step:
                log.log(step, training_metrics(step))
            if step in rates:
                log.log(step, evaluation_metrics(rates[step]))
        if status is not None:
            run.write_summary(
                build_summary(run, status, wall_s=600.0, peak_memory_bytes=5 * 2**30, error=error)
            )
    return run.path


@cache
def _composed(command: tuple[str, ...]) -> Config:
    return OmegaConf.to_object(compose_unchecked(command))


def training_metrics(step: int) -> dict[str, float]:
    """1000 tokens in each step; the mismatch grows with the step."""
    return {
        "train/solve_rate": 0.5,
        "throughput/sampled_tokens_per_s": 500.0,
        "time/rollout_s": 2.0,
        "mismatch/abs_logprob_diff_max": 1e-6 * step,
    }


def evaluation_metrics(rate: float) -> dict[str, float]:
    return {
        "eval/solve_rate": rate,
        "eval/solve_rate_low": rate - 0.05,
        "eval/solve_rate_high": min(1.0, rate + 0.05),
        "eval/num_episodes": 64.0,
        "eval/ceiling": 1.0,
    }


def rewrite(path: Path, change: Mapping[str, Any]) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(change)))

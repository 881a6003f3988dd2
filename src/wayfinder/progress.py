"""Where a training run stands, and what is due there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from wayfinder.config.identity import config_hash
from wayfinder.config.schema import Config, LrSchedule, OptimizerConfig


@dataclass
class Progress:
    """Where a run stands; what a checkpoint stores beside the policy. No random state is part of
    it: every draw is a function of the run seed and of what is counted here."""

    step: int = 0
    policy_version: int = 0
    next_task: int = 0
    best_solve_rate: float | None = None
    best_step: int | None = None
    last_solve_rate: float | None = None
    evaluated_step: int | None = None

    def state(self, config: Config) -> dict[str, Any]:
        return {**vars(self), "config_hash": config_hash(config), "seed": config.seed}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        return cls(**{name: state[name] for name in cls.__dataclass_fields__})

    @property
    def measured_rate(self) -> float | None:
        """The solve rate of exactly this policy; None if it was not evaluated."""
        return self.last_solve_rate if self.evaluated_step == self.step else None

    def note_evaluation(self, solve_rate: float) -> None:
        self.last_solve_rate = solve_rate
        self.evaluated_step = self.step
        if self.best_solve_rate is None or solve_rate > self.best_solve_rate:
            self.best_solve_rate = solve_rate
            self.best_step = self.step

    def is_over(self, config: Config) -> bool:
        """No step follows: all are done, or the newest evaluation reached `eval.stop_at`."""
        goal, rate = config.eval.stop_at, self.last_solve_rate
        reached = goal is not None and rate is not None and rate >= goal
        return reached or self.step >= config.steps

    def evaluation_is_due(self, config: Config) -> bool:
        """Before the first step, after the last, and every `eval.interval` steps."""
        if self.evaluated_step == self.step:
            return False
        return self.step in (0, config.steps) or _is_multiple(self.step, config.eval.interval)

    def checkpoint_is_due(self, config: Config, saved: Progress, minutes: float) -> bool:
        """`saved`: what the newest checkpoint holds, which is `minutes` old."""
        if self.step == 0 or self == saved:
            return False
        limit = config.checkpoint.every_minutes
        return (
            self.is_over(config)
            or _is_multiple(self.step, config.checkpoint.interval)
            or (limit is not None and minutes >= limit)
        )


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """Rate of step 1 .. `steps`: linear warm-up, then constant, or linear or cosine towards 0."""
    warmup = optimizer.warmup_steps
    if step <= warmup:
        return optimizer.lr * step / (warmup + 1)
    done = (step - 1 - warmup) / max(1, steps - warmup)
    match optimizer.schedule:
        case LrSchedule.linear:
            return optimizer.lr * (1 - done)
        case LrSchedule.cosine:
            return optimizer.lr * 0.5 * (1 + math.cos(math.pi * done))
    return optimizer.lr


def _is_multiple(step: int, interval: int) -> bool:
    """An interval of 0 has no multiples."""
    return interval > 0 and step % interval == 0

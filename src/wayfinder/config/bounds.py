"""Ranges of single numbers: each key with what it must satisfy, whatever the other keys are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from wayfinder.config.schema import Config
from wayfinder.config.violation import Violation

GREATEST_SEED = 2**32 - 1
"""What every generator of random numbers takes."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A range, and the value that the mend proposes."""

    key: str
    holds: Callable[[Any], bool]
    expected: str
    instead: object
    optional: bool = False  # null is allowed


def at_least(key: str, low: float, instead: object) -> Bound:
    return Bound(key, lambda value: low <= value < math.inf, f"{low} or more", instead)


def above(key: str, low: float, instead: object) -> Bound:
    return Bound(key, lambda value: low < value < math.inf, f"more than {low}", instead)


def between(key: str, low: float, high: float, instead: object) -> Bound:
    return Bound(key, lambda value: low <= value <= high, f"{low} to {high}", instead)


def maze_seed(key: str, instead: int) -> Bound:
    # Seeds of environments end at 2^31; a set of mazes follows its first seed.
    return between(key, 0, 2_000_000_000, instead)


def share(key: str, instead: object, optional: bool = False) -> Bound:
    return Bound(
        key, lambda value: 0 < value <= 1, "more than 0 and at most 1", instead, optional=optional
    )


def decay(key: str, instead: object) -> Bound:
    return Bound(key, lambda value: 0 <= value < 1, "0 or more and less than 1", instead)


ALWAYS = (
    between("seed", 0, GREATEST_SEED, 0),
    at_least("env.max_turns", 1, 30),
    above("env.step_timeout_s", 0, 10),
    at_least("rollout.max_tokens", 1, 16),
    at_least("rollout.max_num_seqs", 1, 128),
    share("rollout.gpu_memory_utilization", 0.45),
    above("rollout.kv_cache_gib", 0, 1),
    above("rollout.request_timeout_s", 0, 300),
    at_least("model.lora.rank", 1, 16),
    at_least("model.lora.alpha", 1, 32),
    at_least("cluster.slots", 1, 1),
    at_least("cluster.threads_per_slot", 0, 0),
    above("cluster.cpus_per_slot", 0, 1),
    above("cluster.start_timeout_s", 0, 300),
    above("cluster.step_timeout_s", 0, 900),
    # Ray itself refuses a smaller store.
    at_least("cluster.object_store_mib", 80, 512),
    at_least("cluster.max_restarts", 0, 3),
    at_least("sync.keep", 1, 2),
    at_least("sync.retry_s", 0, 60),
    above("sync.probe_tolerance", 0, 1e-3),
    at_least("eval.tasks", 1, 64),
    maze_seed("eval.first_seed", 0),
    at_least("eval.samples", 1, 1),
    Bound("eval.temperature", lambda value: 0 <= value < math.inf, "0 or more", "null", True),
    at_least("eval.unseen_tasks", 0, 0),
    maze_seed("eval.unseen_first_seed", 1_000_000),
)

TRAIN = (
    at_least("steps", 1, 20),
    above("rollout.temperature", 0, 0.7),
    above("env.reward.task", 0, 1),
    at_least("env.reward.format", 0, 0),
    at_least("algorithm.tasks_per_step", 1, 16),
    at_least("algorithm.group_size", 1, 8),
    at_least("algorithm.mini_batches", 1, 2),
    at_least("algorithm.constant_length", 1, 512),
    Bound("algorithm.clip_low", lambda value: 0 < value <= 1, "more than 0 and at most 1", 0.2),
    above("algorithm.clip_high", 0, 0.28),
    Bound("algorithm.dual_clip", lambda value: 1 < value < math.inf, "more than 1", "null", True),
    at_least("algorithm.kl_coef", 0, 0),
    Bound("algorithm.entropy_coef", math.isfinite, "a finite number", 0),
    at_least("algorithm.importance_cap", 1, 2),
    at_least("algorithm.refill_groups", 1, 16),
    at_least("algorithm.micro_batch_tokens", 1, 16384),
    above("algorithm.mismatch.alarm", 0, 1e-3),
    above("algorithm.mismatch.stop", 0, 5e-2),
    # 0 is allowed: the canary shows that nothing is learnt then.
    at_least("algorithm.optimizer.lr", 0, 1e-3),
    decay("algorithm.optimizer.beta1", 0.9),
    decay("algorithm.optimizer.beta2", 0.95),
    above("algorithm.optimizer.eps", 0, 1e-8),
    at_least("algorithm.optimizer.weight_decay", 0, 0),
    at_least("algorithm.optimizer.max_grad_norm", 0, 1),
    at_least("algorithm.optimizer.warmup_steps", 0, 0),
    at_least("eval.interval", 0, 10),
    share("eval.stop_at", "null", optional=True),
    at_least("checkpoint.interval", 0, 20),
    Bound("checkpoint.every_minutes", lambda v: 0 < v < math.inf, "more than 0", "null", True),
    at_least("checkpoint.keep", 1, 2),
    above("checkpoint.grace_s", 0, 10),
)

EVALUATE = (at_least("rollout.temperature", 0, 0.7),)

PLAY = (*EVALUATE, maze_seed("play.seed", 0), at_least("play.delay_s", 0, 0.4))


def broken(config: Config, bounds: tuple[Bound, ...]) -> Iterator[Violation]:
    """The bounds that do not hold. NaN holds in none of them."""
    for bound in bounds:
        value = reduce(getattr, bound.key.split("."), config)
        if not (bound.optional and value is None) and not bound.holds(value):
            expected = f"{bound.expected}, or null" if bound.optional else bound.expected
            yield Violation(bound.key, expected, value, f"Set {bound.key}={bound.instead}")

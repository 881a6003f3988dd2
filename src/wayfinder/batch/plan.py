"""Groups of episodes to what every rank does in one update: advantages, samples, mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wayfinder.algo.advantage import advantages
from wayfinder.algo.filters import count_signals, group_signal, select
from wayfinder.algo.reduce import token_weights
from wayfinder.batch.packing import plan_micro_batches, sample_key
from wayfinder.batch.samples import episode_samples
from wayfinder.choices import GroupFilter
from wayfinder.types import Episode, Group, MicroBatch, Sample


@dataclass(frozen=True, slots=True, eq=False)
class MiniBatch:
    """What one rank does for one optimizer update.

    Arrays are indexed by the step's episodes [num_episodes] and hold global values: with them every
    split over ranks and micro-batches gives the same update.
    """

    micro_batches: tuple[MicroBatch, ...]
    advantages: np.ndarray  # float64
    sequence_weight: np.ndarray  # float64, from algo.reduce.token_weights
    sequence_length: np.ndarray  # int64, loss tokens of the whole episode
    global_denominator: float


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """How a step's groups become updates."""

    advantage: str
    group_filter: str
    drop_is_exact: bool
    reduction: str
    constant_length: float | None
    mini_batches: int
    micro_batch_tokens: int
    packing: bool
    num_ranks: int


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePlan:
    """Mini-batches of each rank, [num_ranks][mini_batches], and what was left out."""

    ranks: tuple[tuple[MiniBatch, ...], ...]
    metrics: dict[str, float]

    @property
    def is_empty(self) -> bool:
        """No group has signal: there is nothing to train on."""
        return not any(mini.micro_batches for mini in self.ranks[0])


def step_episodes(groups: Sequence[Group]) -> list[Episode]:
    """The episodes that count, in the order in which the step's arrays are indexed."""
    return [episode for group in groups for episode in group.valid]


def score_plan(groups: Sequence[Group], spec: PlanSpec) -> list[list[MicroBatch]]:
    """Every sample of the step in micro-batches, [num_ranks][count]: no group is left out."""
    samples = [
        sample
        for index, episode in enumerate(step_episodes(groups))
        for sample in episode_samples(episode, index)
    ]
    return plan_micro_batches(samples, spec.num_ranks, spec.micro_batch_tokens, spec.packing)


def update_plan(
    groups: Sequence[Group], spec: PlanSpec, reward_change: np.ndarray | None = None
) -> UpdatePlan:
    """Plan one step. `reward_change` [num_episodes] is added to the rewards (KL in the reward).

    Whole groups go to a mini-batch. A group that `drop` leaves out of the passes keeps its tokens
    in the denominators, so that the update does not depend on the filter; one that `refill` has
    replaced does not count.
    """
    valid = [group.valid for group in groups]
    sizes = [len(episodes) for episodes in valid]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    change = np.zeros(offsets[-1]) if reward_change is None else reward_change
    rewards = [
        [e.reward + change[offsets[g] + m] for m, e in enumerate(episodes)]
        for g, episodes in enumerate(valid)
    ]
    by_group = advantages(rewards, spec.advantage)
    chosen = set(select(rewards, spec.group_filter, spec.drop_is_exact))
    signals = [
        group_signal(r, [e.success for e in episodes])
        for r, episodes in zip(rewards, valid, strict=True)
    ]
    flat = np.array([value for group in by_group for value in group], dtype=np.float64)
    lengths = np.array([e.num_sampled_tokens for eps in valid for e in eps], dtype=np.int64)

    per_rank: list[list[MiniBatch]] = [[] for _ in range(spec.num_ranks)]
    num_samples = num_tokens = num_unique = 0
    refill = GroupFilter(spec.group_filter) is GroupFilter.refill
    counted = sorted(chosen) if refill else range(len(groups))
    for members in np.array_split(np.array(counted, dtype=int), spec.mini_batches):
        inside = np.zeros(len(flat), dtype=bool)
        samples: list[Sample] = []
        for g in members:
            inside[offsets[g] : offsets[g + 1]] = int(g) in chosen or spec.drop_is_exact
            if int(g) in chosen:
                for m, episode in enumerate(valid[g]):
                    samples += episode_samples(episode, int(offsets[g]) + m)
        weights = token_weights(np.where(inside, lengths, 0), spec.reduction, spec.constant_length)
        plan = plan_micro_batches(samples, spec.num_ranks, spec.micro_batch_tokens, spec.packing)
        num_samples += len(samples)
        num_tokens += sum(len(s.ids) for s in samples)
        num_unique += len({sample_key(s) for s in samples})
        for rank, micro_batches in enumerate(plan):
            per_rank[rank].append(
                MiniBatch(
                    micro_batches=tuple(micro_batches),
                    advantages=flat,
                    sequence_weight=weights.per_sequence,
                    sequence_length=lengths,
                    global_denominator=weights.global_denominator,
                )
            )
    failed = sum(len(group.episodes) - size for group, size in zip(groups, sizes, strict=True))
    metrics = {f"train/{name}": float(n) for name, n in count_signals(signals).items()}
    metrics |= {
        "train/failed_episodes": float(failed),
        "train/samples": float(num_samples),
        "train/distinct_samples": float(num_unique),
        "train/sample_tokens": float(num_tokens),
    }
    return UpdatePlan(tuple(tuple(minis) for minis in per_rank), metrics)

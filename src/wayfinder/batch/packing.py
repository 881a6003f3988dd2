"""Samples to micro-batches: the driver plans for all ranks, so all make equally many passes."""

from __future__ import annotations

from wayfinder.types import MicroBatch, Sample


def plan_micro_batches(
    samples: list[Sample], num_ranks: int, max_tokens: int, packing: bool = False
) -> list[list[MicroBatch]]:
    """Micro-batches of each rank, [num_ranks][equal count], short ranks padded with empty ones.

    Samples of similar length share a micro-batch, whose rows times longest length, or with
    `packing` the sum of lengths, stay within `max_tokens` (a longer single sample stands alone).
    Samples with equal ids and frames come to lie in one micro-batch, where one forward pass serves
    them all, so only distinct ones count. The result is a function of the samples and their order,
    not of timing.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be positive, not {num_ranks}")
    duplicates: dict[tuple[bytes, tuple[str, ...], bytes], list[Sample]] = {}
    for sample in samples:
        duplicates.setdefault(sample_key(sample), []).append(sample)
    # A stable sort: equal lengths keep the order of the episodes, which keeps a maze together.
    rows = sorted(duplicates.values(), key=lambda same: len(same[0].ids))
    batches: list[list[Sample]] = []
    cost: list[int] = []
    count = tokens = 0
    for same in rows:
        length = len(same[0].ids)
        grown = tokens + length if packing else (count + 1) * length
        if count and grown > max_tokens:
            count, grown = 0, length
        if count == 0:
            batches.append([])
            cost.append(0)
        batches[-1] += same
        cost[-1] = tokens = grown
        count += 1

    # Largest first onto the least loaded rank.
    loads = [0] * num_ranks
    plan: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(batches)), key=lambda i: (-cost[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], len(plan[r]), r))
        loads[rank] += cost[index]
        plan[rank].append(MicroBatch(tuple(batches[index])))
    most = max(len(batches) for batches in plan)
    for batches_of_rank in plan:
        batches_of_rank.extend([MicroBatch(())] * (most - len(batches_of_rank)))
    return plan


def sample_key(sample: Sample) -> tuple[bytes, tuple[str, ...], bytes]:
    """Samples with equal keys have equal forward passes and equal loss positions."""
    return sample.ids.tobytes(), sample.frames, sample.loss_mask.tobytes()

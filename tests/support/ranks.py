"""Policy ranks in processes of their own, over gloo, for tests of what ranks compute together."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wayfinder.batch.plan import MiniBatch
from wayfinder.types import MicroBatch, Sample, frame_hash


def run_on_ranks(world: int, work: Callable, arguments: tuple, directory: Path) -> list[Any]:
    """`work(rank, *arguments)` on `world` ranks of one gloo group; results in order of rank."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = str(directory / f"store-{world}-{work.__name__}")
    processes = [
        context.Process(target=_rank, args=(rank, world, store, work, arguments, results))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    answers = dict(results.get(timeout=240) for _ in processes)
    for process in processes:
        process.join(60)
    # All of them: when one rank fails, the others often only report that it went away.
    failed = [
        f"rank {r} of {world}:\n{a}" for r, a in sorted(answers.items()) if isinstance(a, _Failure)
    ]
    if failed:
        raise AssertionError("\n".join(failed))
    return [answers[rank] for rank in range(world)]


class _Failure(str):
    """The traceback of a rank."""


def _rank(rank: int, world: int, store: str, work: Callable, arguments: tuple, results) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        results.put((rank, work(rank, *arguments)))
    except Exception:
        results.put((rank, _Failure(traceback.format_exc())))
    finally:
        results.close()
        results.join_thread()
        dist.destroy_process_group()


def make_samples(processor, seed: int = 0) -> tuple[list[Sample], dict[str, np.ndarray]]:
    """Six samples of six episodes: 1 to 3 turns, images of different sizes and contents, replies
    of 3, 17 and 40 tokens, one sample twice (as two members of a group often act alike)."""
    from wayfinder.chat.render import ChatRenderer
    from wayfinder.chat.vision import VisionProcessor

    random = np.random.default_rng(seed)
    vision = VisionProcessor(processor)
    renderer = ChatRenderer(processor.tokenizer, vision.tokens, "Find the way.")
    plain = [t for t in range(7, len(processor.tokenizer)) if t not in vision.tokens.banned]
    frames: dict[str, np.ndarray] = {}
    samples = []
    sizes = [(225, 225), (275, 225), (200, 300)]
    for episode, replies in enumerate([(3,), (17, 3), (40,), (3, 3, 3), (17,)]):
        ids: list[int] = list(renderer.prefix_ids)
        mask = [False] * len(ids)
        turns, after, names = [-1] * len(ids), [False] * len(ids), []
        for turn, length in enumerate(replies):
            frame = random.integers(0, 256, (*sizes[(episode + turn) % 3], 3), dtype=np.uint8)
            name = frame_hash(frame)
            frames[name] = frame
            names.append(name)
            shown = renderer.observation("Moved.", (vision.num_tokens(*frame.shape[:2]),))
            observation = shown.following if turn else shown.opening
            reply = [*random.choice(plain, length - 1).tolist(), renderer.end_of_turn]
            ids += [*observation, *reply]
            mask += [False] * len(observation) + [True] * length
            turns += [-1] * len(observation) + [turn] * length
            after += [False] * len(observation) + [True] + [False] * (length - 1)
        samples.append(
            Sample(
                ids=np.array(ids, dtype=np.int64),
                loss_mask=np.array(mask),
                behavior_logprobs=np.where(mask, random.normal(-6, 0.3, len(ids)), 0).astype(
                    np.float32
                ),
                after_image=np.array(after),
                turn_index=np.array(turns, dtype=np.int32),
                frames=tuple(names),
                episode=episode,
            )
        )
    last = samples[0]
    twin = Sample(**{f: getattr(last, f) for f in last.__slots__} | {"episode": 5})
    return [*samples, twin], frames


def mini_batch(
    micro_batches: list[list[Sample]], samples: list[Sample], weight: np.ndarray, denominator: float
) -> MiniBatch:
    """A mini-batch of the given split, with the global figures of `samples`."""
    lengths = np.array([sample.num_loss_tokens for sample in samples], dtype=np.int64)
    return MiniBatch(
        micro_batches=tuple(MicroBatch(tuple(batch)) for batch in micro_batches),
        advantages=np.array([1.0, -0.5, 2.0, -1.5, 0.7, -0.2]),
        sequence_weight=weight,
        sequence_length=lengths,
        global_denominator=denominator,
    )

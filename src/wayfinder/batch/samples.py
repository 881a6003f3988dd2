"""Episodes to training samples: the windows that were sampled are the windows that are trained."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from wayfinder.types import Episode, Sample, Turn


def episode_samples(episode: Episode, index: int) -> list[Sample]:
    """One sample for each distinct window start of the episode.

    Turns that share a window start extend each other's context, so one sequence holds them all.
    Every sampled token is trained in exactly one sample, behind exactly the ids that the model saw.
    """
    samples = []
    numbered = list(enumerate(episode.turns))
    for start, members in groupby(numbered, key=lambda pair: pair[1].window_start):
        trained = [number for number, _ in members]
        samples.append(_window(episode, start, trained, index))
    return samples


def _window(episode: Episode, start: int, trained: list[int], index: int) -> Sample:
    ids: list[int] = list(episode.prefix_ids)
    mask: list[bool] = [False] * len(ids)
    logprobs: list[float] = [0.0] * len(ids)
    turn_index: list[int] = [-1] * len(ids)
    after_image: list[bool] = [False] * len(ids)
    frames: list[str] = []

    def extend(new: tuple[int, ...]) -> None:
        ids.extend(new)
        mask.extend([False] * len(new))
        logprobs.extend([0.0] * len(new))
        turn_index.extend([-1] * len(new))
        after_image.extend([False] * len(new))

    for number in range(start, trained[-1] + 1):
        turn: Turn = episode.turns[number]
        extend(turn.opening_ids if number == start else turn.observation_ids)
        frames.extend(turn.frames)
        if number < trained[0]:
            extend(turn.reply_ids)
        else:
            count = len(turn.reply_ids)
            ids.extend(turn.reply_ids)
            mask.extend([True] * count)
            logprobs.extend(turn.logprobs)
            turn_index.extend([number] * count)
            after_image.extend([bool(turn.frames)] + [False] * (count - 1) if count else [])
        if number < trained[-1]:
            extend(turn.closing_ids)
    return Sample(
        ids=np.asarray(ids, dtype=np.int64),
        loss_mask=np.asarray(mask, dtype=bool),
        behavior_logprobs=np.asarray(logprobs, dtype=np.float32),
        after_image=np.asarray(after_image, dtype=bool),
        turn_index=np.asarray(turn_index, dtype=np.int32),
        frames=tuple(frames),
        episode=index,
    )

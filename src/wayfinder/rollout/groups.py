"""Many episodes at once on one generator, under one of two schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from wayfinder.rollout.episode import EpisodeRun
from wayfinder.rollout.generator import Generator


async def run_lockstep(
    runs: Sequence[EpisodeRun], generator: Generator, frames: Mapping[str, np.ndarray]
) -> None:
    """All episodes take turn k together, in the order of `runs`: repeatable on CPU bit for bit."""
    for run in runs:
        await run.start()
    while True:
        asked = [(run, request) for run in runs if (request := run.request()) is not None]
        if not asked:
            return
        replies = await generator.replies([request for _, request in asked], frames)
        for (run, _), reply in zip(asked, replies, strict=True):
            await run.take(reply)


async def run_free(
    runs: Sequence[EpisodeRun], generator: Generator, frames: Mapping[str, np.ndarray]
) -> None:
    """Each episode goes on as soon as its reply is there: no episode waits for another."""

    async def play(run: EpisodeRun) -> None:
        await run.start()
        while (request := run.request()) is not None:
            await run.take(await generator.reply(request, frames))

    await asyncio.gather(*(play(run) for run in runs))

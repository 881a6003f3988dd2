"""Actors in the place of engines and ranks, which play and save nothing: light enough that what
watches over the real ones is tested in seconds. Imports stay few: each actor pays for them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import ray

DIGEST = "digest"
VERSION = 1


class StandInEngine:
    """Answers the probe rightly once it loaded an adapter; notes its process id when it plays."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.loaded = False

    async def start(self, notes: Path, env: None) -> None:
        self.notes = notes
        while (notes / "never start").exists():
            await asyncio.sleep(0.1)

    async def load_latest(self, root: str) -> tuple[int, str]:
        self.loaded = not (self.notes / "serve nothing").exists()
        return VERSION, DIGEST

    async def probe(self, *_: object) -> list[float]:
        return [-1.0, -2.0] if self.loaded else [-1.0, -2.5]

    async def play(self, places: list, spec: None, lockstep: bool) -> tuple[list, dict]:
        assert self.loaded
        (self.notes / f"engine {self.index}").write_text(str(os.getpid()))
        longer = self.notes / "seconds"
        await asyncio.sleep(float(longer.read_text()) if longer.exists() else 2)
        return [(place.task.index, place.member) for place in places], {
            # As large as frames, which stay in the object store of the node.
            str(self.index): str(os.getpid()).ljust(200_000)
        }

    async def close(self) -> None:
        pass


class StandInRank:
    """Its collectives do what the argument says."""

    def __init__(self, rank: int, *_: object) -> None:
        self.rank = rank

    def bind(self) -> None:
        pass

    def start(self, *_: object) -> None:
        pass

    def publish(self, *_: object):
        from wayfinder.runtime.adapter_sync import Publication

        return Publication(VERSION, str(VERSION), DIGEST, 1) if self.rank == 0 else None

    def probe(self, *_: object) -> list[float]:
        return [-1.0, -2.0]

    def score(self, plan: None, frames: list, episodes: int) -> int:
        """How many engines the frames came from."""
        return len(ray.get(frames))

    def save(self, what: str) -> None:
        """`die`: rank 1 is killed, and rank 0, whose collective breaks, says so first. `fail`: both
        raise. `hang`: nobody answers."""
        if what == "hang":
            time.sleep(60)
        if what == "die" and self.rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection closed by peer")

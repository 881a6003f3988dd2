"""Actors in the place of engines and ranks, which play and save nothing: light enough that what
watches over the real ones is tested in seconds. Imports stay few: each actor pays for them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

DIGEST = "digest"
VERSION = 1


class StandInEngine:
    """Answers the probe rightly once it loaded an adapter; notes its process id when it plays."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.loaded = False

    async def start(self, notes: Path, env: None) -> None:
        self.notes = notes

    async def load_latest(self, root: str) -> tuple[int, str]:
        self.loaded = not (self.notes / "serve nothing").exists()
        return VERSION, DIGEST

    async def probe(self, *_: object) -> list[float]:
        return [-1.0, -2.0] if self.loaded else [-1.0, -2.5]

    async def play(self, places: list, spec: None, lockstep: bool) -> tuple[list, dict]:
        assert self.loaded
        (self.notes / f"engine {self.index}").write_text(str(os.getpid()))
        await asyncio.sleep(2)
        return [(place.task.index, place.member) for place in places], {
            str(self.index): os.getpid()
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

    def save(self, what: str) -> None:
        """`die`: rank 1 is killed, and rank 0, whose collective breaks, says so first. `fail`: both
        raise. `hang`: nobody answers."""
        if what == "hang":
            time.sleep(60)
        if what == "die" and self.rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection closed by peer")

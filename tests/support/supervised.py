"""`Workers` of stand-ins on a real `Cluster`: what watches over engines and ranks, in seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.standins import VERSION, StandInEngine, StandInRank
from wayfinder.rollout.episode import Place
from wayfinder.runtime import cluster as runtime
from wayfinder.runtime.cluster import Cluster
from wayfinder.runtime.recovery import Restarts
from wayfinder.runtime.workers import Probe, Workers
from wayfinder.types import Task

TESTS = Path(__file__).parents[1]


def find_support(patch: pytest.MonkeyPatch) -> None:
    """Let processes that are started from now on import what lies beside the tests."""
    path = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(path))


class Question(Probe):
    def micro_batch(self) -> None:
        return None


@contextmanager
def standins() -> Iterator[None]:
    """Clusters that are made inside put stand-ins on their slots."""
    with pytest.MonkeyPatch.context() as patch:
        find_support(patch)
        patch.setattr(runtime, "EngineWorker", StandInEngine)
        patch.setattr(runtime, "PolicyWorker", StandInRank)
        yield


def started(cluster: Cluster, root: Path, restarts: Restarts) -> Workers:
    """Stand-ins that are started and serve adapter version VERSION; their notes lie in `root`."""
    adapters = root / "adapters"
    adapters.mkdir(exist_ok=True)
    workers = Workers(cluster, adapters, 2, 0, Question((1,), (), {}), 1e-3, False, restarts)
    workers.start([root] * len(cluster.engines), None, None, None, None, 1.0, 60)
    workers.publish(VERSION, 0)
    return workers


def places(tasks: int) -> list[Place]:
    """Two members of each task."""
    return [Place(Task("maze_2d/easy", i, i), member) for i in range(tasks) for member in range(2)]


def episodes(tasks: int) -> list[tuple[int, int]]:
    """What stand-ins answer when `places(tasks)` are played."""
    return [(place.task.index, place.member) for place in places(tasks)]

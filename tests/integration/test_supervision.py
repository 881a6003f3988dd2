"""Two engines and two ranks that die or fall silent, under a real Ray, with light actors."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray

from support.supervised import episodes, places, standins, started
from wayfinder.errors import ClusterError, SyncError, WorkerLostError
from wayfinder.runtime.cluster import Cluster, ClusterSpec
from wayfinder.runtime.recovery import Restarts
from wayfinder.runtime.workers import Played

pytestmark = [pytest.mark.slow, pytest.mark.long]
PLAYED = episodes(4)
STEP_TIMEOUT_S = 12.0


class Stage:
    def __init__(self, root: Path, cluster: Cluster) -> None:
        self.notes = root
        self.events: list[str] = []
        self.restarts = Restarts(99, self.events.append)
        self.workers = started(cluster, root, self.restarts)

    def pid(self, engine: int) -> int:
        return int((self.notes / f"engine {engine}").read_text())

    def play(self, number: int | None = None) -> Played:
        """Play on both engines; engine 1 gets the signal in the middle of it."""
        for file in self.notes.glob("engine *"):
            file.unlink()

        def disturb() -> None:
            while not (self.notes / "engine 1").exists():
                time.sleep(0.05)
            time.sleep(0.5)
            os.kill(self.pid(1), number)

        if number is not None:
            threading.Thread(target=disturb).start()
        return self.workers.play(places(4), None, True)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    spec = ClusterSpec("cpu", 2, 1, 1.0, None, 120.0, STEP_TIMEOUT_S, 100)
    with pytest.MonkeyPatch.context() as patch:
        # What Ray would join by itself, which is not what cluster.address=null says.
        patch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        with standins(), Cluster(spec) as cluster:
            yield Stage(tmp_path_factory.mktemp("stage"), cluster)
    assert not ray.is_initialized()


def test_rays_processes_are_out_of_reach_of_signals_to_the_group(stage):
    groups = {
        child.name(): os.getpgid(child.pid)
        for child in psutil.Process().children()
        if child.name() in ("gcs_server", "raylet")
    }
    assert len(groups) == 2
    assert os.getpgid(0) not in groups.values()


def test_a_dead_engine_is_replaced_and_the_others_episodes_are_kept(stage):
    played = stage.play(signal.SIGKILL)
    assert played.episodes == PLAYED
    frames = stage.workers.fetch_frames(played)
    assert {name: int(frame) for name, frame in frames.items()} == {
        "0": stage.pid(0),
        "1": stage.pid(1),
    }
    assert stage.restarts.engines == 1
    assert "a rollout engine, in play, died" in stage.events[-1]
    assert "\n" not in stage.events[-1]


def test_a_silent_engine_is_replaced(stage):
    before = stage.restarts.engines
    began = time.monotonic()
    assert stage.play(signal.SIGSTOP).episodes == PLAYED
    assert time.monotonic() - began > STEP_TIMEOUT_S
    assert stage.restarts.engines == before + 1
    assert "gave no answer within 12 s" in stage.events[-1]


def test_an_engine_made_anew_must_prove_the_adapter(stage):
    (stage.notes / "serve nothing").touch()
    with pytest.raises(SyncError, match=r"engine 1 does not serve adapter version 1"):
        stage.play(signal.SIGKILL)
    (stage.notes / "serve nothing").unlink()
    stage.workers._on_engines("load_latest", "")


def test_a_dead_rank_is_told_from_a_rank_that_fails(stage):
    with pytest.raises(WorkerLostError, match=r"a policy rank, in save, died"):
        stage.workers.save("die")


def test_a_silent_rank_is_lost(stage):
    # Rank 1 is dead by now; the one who lives is asked for something it never answers.
    rank = stage.workers._cluster.ranks[0]
    with pytest.raises(WorkerLostError, match=r"rank 0 gave no answer within 2 s"):
        stage.workers._cluster.wait([rank.save.remote("hang")], 2, "rank 0")


def test_a_lost_ray_is_neither_waited_for_nor_mended(stage):
    (raylet,) = [p for p in psutil.Process().children() if p.name() == "raylet"]
    raylet.kill()
    began = time.monotonic()
    with pytest.raises(
        ClusterError, match=r"Ray was lost: its raylet .* Repeat the command"
    ) as lost:
        stage.play()
    assert not isinstance(lost.value, WorkerLostError)
    assert time.monotonic() - began < 10

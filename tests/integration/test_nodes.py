"""Jobs on a cluster of several nodes that they join by its address, as on the reference cluster.

The nodes are Ray's own, all on this machine. Most jobs put stand-ins on the slots; they are
commands of their own (support/joined.py), as Ray may end the process that loses it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.jobs import Command
from support.joined import TASKS
from support.nodes import Nodes
from support.supervised import episodes, find_support

pytestmark = [pytest.mark.slow, pytest.mark.long]
SLOTS = 6
PLAYED = [list(episode) for episode in episodes(TASKS)]


class Driver(Command):
    """A job that stand-ins do; see support/joined.py."""

    def __init__(self, address: str, root: Path, start_timeout_s: float = 120) -> None:
        self.root = root
        arguments = (address, SLOTS, start_timeout_s, root)
        super().__init__([sys.executable, "tests/support/joined.py", *map(str, arguments)])

    def told(self, what: str) -> list[Any]:
        lines = [json.loads(line) for line in self.lines if line.startswith('{"')]
        return [line[what] for line in lines if what in line]

    def until_told(self, what: str) -> Any:
        self.until(lambda: self.told(what))
        return self.told(what)[-1]

    def until_playing(self) -> list[dict[str, Any]]:
        """Until all engines of the newest workers play; where they are, by slot."""
        self.until(lambda: len(list(self.root.glob("engine *"))) == SLOTS)
        return self.told("engines")[-1]


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def nodes_of(actors: list[dict[str, Any]]) -> list[str]:
    return [actor["node"] for actor in actors]


@pytest.fixture(scope="module")
def three() -> Iterator[Nodes]:
    with Nodes(3, 2) as nodes:
        yield nodes


@pytest.fixture
def nodes(three) -> Iterator[Nodes]:
    """Three nodes with two slots each; afterwards nothing of a job may be left on them."""
    yield three
    until(lambda: not three.held())
    while len(three.ids) < 3:
        three.add()
    until(lambda: three.free_slots() == SLOTS)


def test_each_bundle_holds_a_rank_and_an_engine_and_the_head_holds_none(nodes, tmp_path):
    driver = Driver(nodes.address, tmp_path)
    assert driver.end(120) == 0, driver.output
    ranks, engines = driver.told("ranks")[0], driver.told("engines")[0]
    assert sorted(nodes_of(ranks)) == sorted(2 * nodes.ids)
    for slot, (rank, engine) in enumerate(zip(ranks, engines, strict=True)):
        assert rank["node"] == engine["node"]
        assert rank["held"] == engine["held"]
        assert any(name.startswith(f"CPU_group_{slot}_") for name in rank["held"])
    assert driver.told("played") == [PLAYED]
    assert len(driver.told("frames")[0]) == SLOTS


@pytest.mark.parametrize("way", ["remove", "kill"])
def test_the_work_of_a_lost_node_is_done_again_on_another(nodes, tmp_path, way):
    (tmp_path / "seconds").write_text("5")
    driver = Driver(nodes.address, tmp_path)
    victim = driver.until_playing()[0]["node"]
    began = time.monotonic()
    getattr(nodes, way)(victim)
    added = nodes.add()
    assert driver.end(120) == 0, driver.output
    assert time.monotonic() - began < 90  # less than cluster.start_timeout_s
    (told,) = driver.told("event")
    assert told.startswith("a policy rank, beside a lost engine, died")
    assert told.endswith("all workers are made anew from the last checkpoint")
    where = nodes_of(driver.told("engines")[1])
    assert victim not in where
    assert where.count(added) == 2
    assert driver.told("played") == [PLAYED]


@pytest.mark.parametrize("use", ["score", "fetch"])
def test_frames_of_a_lost_node_are_made_again(nodes, tmp_path, use):
    """They lie in its object store until they are used."""
    (tmp_path / "hold").touch()
    if use == "score":
        (tmp_path / "score").touch()
    driver = Driver(nodes.address, tmp_path)
    driver.until_told("played")
    nodes.kill(driver.told("engines")[0][0]["node"])
    nodes.add()
    (tmp_path / "hold").unlink()
    assert driver.end(120) == 0, driver.output
    (told,) = driver.told("event")
    if use == "fetch":
        assert told.startswith("what an engine keeps of its frames is lost: Failed to retrieve")
    assert told.endswith("all workers are made anew from the last checkpoint")
    assert driver.told("played") == [PLAYED, PLAYED]
    assert len(driver.told("frames")[0]) == SLOTS


def test_a_rank_that_dies_while_an_engine_is_made_anew_is_noticed(nodes, tmp_path):
    """A machine's processes do not all end at once."""
    (tmp_path / "seconds").write_text("5")
    driver = Driver(nodes.address, tmp_path)
    engines, ranks = driver.until_playing(), driver.told("ranks")[0]
    (tmp_path / "never start").touch()
    os.kill(engines[3]["pid"], signal.SIGKILL)
    assert "engine 3 is made anew" in driver.until_told("event")
    began = time.monotonic()
    os.kill(ranks[3]["pid"], signal.SIGKILL)
    driver.until(lambda: len(driver.told("event")) == 2)
    assert time.monotonic() - began < 30
    (tmp_path / "never start").unlink()
    assert driver.end(120) == 0, driver.output
    assert "a policy rank, beside a lost engine, died" in driver.told("event")[1]
    assert driver.told("played") == [PLAYED]


def test_slots_that_stay_away_are_told_by_node(nodes, tmp_path):
    """Of three nodes one is lost in the middle of a job, and no other comes in its place."""
    (tmp_path / "seconds").write_text("5")
    driver = Driver(nodes.address, tmp_path, start_timeout_s=8)
    nodes.remove(driver.until_playing()[0]["node"])
    began = time.monotonic()
    assert driver.end(120) == 1
    assert time.monotonic() - began < 60
    (told,) = driver.told("error")
    assert "cluster.slots=6 needs 6 x {'CPU': 1.0}, and there is room for 4: 2 on " in told
    assert told.count("(CPU 2 of 2 free)") == 2
    assert told.count("(CPU 0 of 0 free)") == 1  # the head
    assert "cluster.start_timeout_s=8" in told
    # What the end waits for is bounded, and nothing is left: see the fixture.


def test_a_cluster_that_is_too_small_is_told_and_nothing_is_left(nodes, tmp_path):
    nodes.remove(nodes.ids[0])
    driver = Driver(nodes.address, tmp_path, start_timeout_s=3)
    until(lambda: nodes.held() == ["placement group"], 60)
    began = time.monotonic()
    assert driver.end(60) == 1
    assert time.monotonic() - began < 60
    (told,) = driver.told("error")
    assert "and there is room for 4: " in told
    assert not nodes.held()
    assert nodes.free_slots() == 4


def test_an_address_at_which_nobody_answers_is_told(monkeypatch, tmp_path):
    find_support(monkeypatch)
    began = time.monotonic()
    driver = Driver("127.0.0.1:1", tmp_path, start_timeout_s=3)
    assert driver.end(60) == 1
    assert time.monotonic() - began < 30
    (told,) = driver.told("error")
    assert told.startswith("ClusterError: cluster.address=127.0.0.1:1: cannot start or reach Ray")


def test_what_a_killed_driver_held_comes_free_by_itself(nodes, tmp_path):
    (tmp_path / "seconds").write_text("600")
    driver = Driver(nodes.address, tmp_path)
    driver.until_playing()
    assert len(nodes.held()) == 2 * SLOTS + 1
    driver.process.kill()
    driver.process.wait(30)
    (tmp_path / "seconds").write_text("1")
    for note in tmp_path.glob("engine *"):
        note.unlink()
    second = Driver(nodes.address, tmp_path)
    assert second.end(120) == 0, second.output
    assert sorted(nodes_of(second.told("ranks")[0])) == sorted(2 * nodes.ids)
    assert second.told("played") == [PLAYED]


@pytest.mark.parametrize("when", ["waiting", "playing"])
def test_a_lost_head_ends_the_job_with_a_clear_message(tmp_path, when):
    (tmp_path / "seconds").write_text("600")
    with Nodes(1, SLOTS if when == "playing" else SLOTS - 1) as nodes:
        driver = Driver(nodes.address, tmp_path)
        if when == "playing":
            driver.until_playing()
        else:
            driver.until(lambda: nodes.held() == ["placement group"])
        began = time.monotonic()
        address = nodes.address
        nodes.kill_head()
        assert driver.end(150) == 1, driver.output
        # It was silent for 40 s; 60 s after its loss Ray would have ended the process by itself.
        assert 40 < time.monotonic() - began < 90
        (told,) = driver.told("error")
        assert told.startswith(f"ClusterError: Ray was lost: its head at {address}")
        assert "Repeat the command" in told

"""Interruptions wait for what must not be broken off, but not for ever; restarts are bounded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from wayfinder.errors import AdapterFileError, ClusterError, WorkerLostError
from wayfinder.runtime.recovery import Restarts, interrupts_held

done: list[int] = []


class Interrupted(Exception):
    pass


@pytest.fixture(autouse=True)
def handlers():
    """SIGTERM raises here, as run.py has it; all handlers are back as they were afterwards."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    timer = signal.getitimer(signal.ITIMER_REAL)  # of pytest-timeout
    signal.setitimer(signal.ITIMER_REAL, 0)

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(number)

    signal.signal(signal.SIGTERM, interrupt)
    # Tests that are run in the background inherit an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    during = {number: signal.getsignal(number) for number in numbers}
    yield
    assert {number: signal.getsignal(number) for number in numbers} == during
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def held(limit_s: float, *parts: Callable[[], object]) -> list[int]:
    """Do the parts in turn while interruptions are held; `done` tells how far that got."""
    done.clear()
    with interrupts_held(limit_s):
        for part in parts:
            part()
            done.append(len(done))
    return done


def test_without_a_signal_nothing_happens():
    assert held(0.01, lambda: time.sleep(0.05)) == [0]


def test_a_signal_takes_effect_at_the_end():
    with pytest.raises(Interrupted) as raised:
        held(30, lambda: send(signal.SIGTERM), lambda: time.sleep(0.05))
    assert len(done) == 2
    assert raised.value.args == (signal.SIGTERM,)


def test_ctrl_c_takes_effect_at_the_end():
    with pytest.raises(KeyboardInterrupt):
        held(30, lambda: send(signal.SIGINT), lambda: time.sleep(0.05))
    assert len(done) == 2


def test_it_is_not_held_for_ever():
    began = time.monotonic()
    with pytest.raises(Interrupted):
        held(0.2, lambda: send(signal.SIGTERM), lambda: time.sleep(20))
    assert len(done) == 1
    assert 0.15 < time.monotonic() - began < 5


def test_a_second_signal_takes_effect_at_once():
    with pytest.raises(Interrupted):
        held(30, lambda: send(signal.SIGTERM), lambda: send(signal.SIGTERM), lambda: time.sleep(9))
    assert len(done) == 1


def test_an_error_inside_does_not_hide_that_it_was_interrupted():
    with pytest.raises(Interrupted) as raised:
        held(30, lambda: send(signal.SIGTERM), lambda: 1 / 0)  # the workers got it too
    assert isinstance(raised.value.__context__, ZeroDivisionError)


def test_restarts_of_both_kinds_share_one_bound():
    notes: list[str] = []
    restarts = Restarts(2, notes.append)
    lost = WorkerLostError("engine 1 died: out of memory")
    restarts.engine(1, lost)
    restarts.policy(lost)
    restarts.publication(3, AdapterFileError("cut"))  # bounded by time, not by number
    restarts.publication(3, AdapterFileError("cut"))
    assert restarts.metrics() == {
        "faults/engine_restarts": 1,
        "faults/policy_restarts": 1,
        "faults/publication_retries": 2,
    }
    assert "engine 1 is made anew" in notes[0]
    assert "last checkpoint" in notes[1]
    with pytest.raises(ClusterError, match=r"out of memory.*cluster\.max_restarts=2") as raised:
        restarts.engine(0, lost)
    # Or else the loop would take it for one more loss to mend.
    assert not isinstance(raised.value, WorkerLostError)
    assert len(notes) == 3
    assert "version 3 is tried again" in notes[2]


def test_every_version_that_is_tried_again_is_told_once(caplog):
    notes: list[str] = []
    restarts = Restarts(0, notes.append)
    for version in (3, 3, 40, 40):  # hours lie between the two
        restarts.publication(version, AdapterFileError("cut"))
    expected = [f"cut; adapter version {v} is tried again for sync.retry_s" for v in (3, 40)]
    assert notes == expected
    assert caplog.messages == expected  # who watches the run sees why it stands still


def test_no_restart_may_be_allowed():
    with pytest.raises(ClusterError, match="replaced 0 times before"):
        Restarts(0, print).policy(WorkerLostError("a rank died"))

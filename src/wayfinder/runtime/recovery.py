"""What a run survives: workers that are replaced, a bounded number of times, and interruptions that
wait until they find the run in a state that can be saved."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from wayfinder.errors import AdapterFileError, ClusterError, WorkerLostError

logger = logging.getLogger(__name__)


@dataclass
class Restarts:
    """Lost workers that this process of a run replaced, and how many it may replace."""

    limit: int
    note: Callable[[str], None]  # writes one line to the run's events
    engines: int = 0
    policies: int = 0
    publications: int = 0  # attempts that failed; they are bounded by time
    _told: int | None = None  # the version of the last of them

    def engine(self, index: int, error: WorkerLostError) -> None:
        """Count a new engine in the place of a lost one, or stop the run."""
        self._spend(f"engine {index} is made anew and its unfinished episodes are run again", error)
        self.engines += 1

    def policy(self, error: WorkerLostError) -> None:
        """Count a restart of everything from the last checkpoint, or stop the run."""
        self._spend("all workers are made anew from the last checkpoint", error)
        self.policies += 1

    def publication(self, version: int, error: AdapterFileError) -> None:
        """Count a failed attempt to publish a version; the first one of each version is noted."""
        if version != self._told:
            message = f"{error}; adapter version {version} is tried again for sync.retry_s"
            self.note(message)
            logger.warning(message)
            self._told = version
        self.publications += 1

    def metrics(self) -> dict[str, float]:
        return {
            "faults/engine_restarts": float(self.engines),
            "faults/policy_restarts": float(self.policies),
            "faults/publication_retries": float(self.publications),
        }

    def _spend(self, what: str, error: WorkerLostError) -> None:
        if self.engines + self.policies >= self.limit:
            raise ClusterError(
                f"{error}. Lost workers were replaced {self.engines + self.policies} times before, "
                f"as often as cluster.max_restarts={self.limit} allows. Mend what ends them (memory"
                ", as a rule), then repeat the command: the run goes on from its last checkpoint."
            ) from error
        self.note(f"{error}; {what}")


@contextmanager
def interrupts_held(limit_s: float) -> Iterator[None]:
    """SIGINT and SIGTERM take effect after what is inside, or `limit_s` after they came, or at once
    when another one comes. For the main thread."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    came: list[int] = []

    def release() -> None:
        if came:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, on_alarm)
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came.pop())

    def hold(number: int, frame: object) -> None:
        if came:
            release()
        else:
            came.append(number)
            signal.signal(signal.SIGALRM, lambda *_: release())
            signal.setitimer(signal.ITIMER_REAL, limit_s)

    on_alarm = signal.getsignal(signal.SIGALRM)
    for number in before:
        signal.signal(number, hold)
    try:
        yield
    finally:
        release()

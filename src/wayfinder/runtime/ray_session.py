"""The driver's Ray: started apart from the job's signals, watched, and left within a bounded time.

A Ray that is started here is a handful of processes of this machine. A terminal and `timeout` send
their signals to a whole process group: without care, Ray's processes would end before the driver
could save anything, so they get groups of their own. Some schedulers signal every process of a job
whatever its group, and machines fail; then Ray is dead while the driver lives. Ray's client waits
for a dead Ray and after a minute ends the driver's process without a word, so nothing here waits
for Ray without a look at whether it is alive.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import psutil
import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import RayError

from wayfinder.errors import ClusterError

logger = logging.getLogger(__name__)

# Ray's client gives up, and the process with it, 60 s after the head fell silent.
_CLOSE_S = 30.0
_CONNECT_S = 5.0
# Between two attempts to start or reach Ray.
_LOOK_S = 1.0
# A head that is joined may be replaced by its operator and come back.
_SILENT_S = 40.0
_PROCESSES = ("gcs_server", "raylet")

_leave_group = False
_given_up = False


def is_given_up() -> bool:
    """Whether this process could not leave its Ray: it cannot start another one."""
    return _given_up


def end_process(code: int | None) -> NoReturn:
    """End a process that has given its Ray up, now. While Python ends, objects that lay there would
    still be given back to it, at which Ray's client ends the process with a code of its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _after_fork() -> None:
    if _leave_group:
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def _children_apart() -> Iterator[None]:
    """Children that are started inside lead process groups of their own."""
    global _leave_group
    _leave_group = True
    try:
        yield
    finally:
        _leave_group = False


class RaySession:
    """A connection of this process to Ray, which it started itself if `address` is None."""

    def __init__(self, address: str | None, options: dict[str, Any], timeout_s: float) -> None:
        """Start or reach Ray. Raises ClusterError when that does not work within `timeout_s`."""
        self._address = address
        self._processes: dict[str, psutil.Process] = {}
        self._workers: list[psutil.Process] = []
        self._silent_since: float | None = None
        if _given_up:
            raise ClusterError(
                "this process could not leave the Ray that it lost, so it cannot start another. "
                "Repeat the command: the run goes on from its last checkpoint."
            )
        self._owned = not ray.is_initialized()
        if self._owned:
            self._connect(options, timeout_s)

    def problem(self) -> str | None:
        """Why this Ray cannot be used any more; None while it is alive."""
        for name, process in self._processes.items():
            if not _is_alive(process):
                return f"Ray was lost: its {name} (process {process.pid}) died"
        if self._processes or self._answers():
            self._silent_since = None
            return None
        self._silent_since = self._silent_since or time.monotonic()
        if time.monotonic() - self._silent_since < _SILENT_S:
            return None
        return f"Ray was lost: its head at {self._head()} takes no connection"

    @property
    def is_silent(self) -> bool:
        """Whether the head took no connection at the last look: a question would wait for it, until
        Ray's client ends this process."""
        return self._silent_since is not None

    def remember_workers(self) -> None:
        """Note the processes that Ray runs for this job on this machine, for `close`."""
        known = {*self._workers}
        for process in self._processes.values():
            try:
                known |= {*process.children(recursive=True)}
            except psutil.NoSuchProcess:
                continue
        self._workers = [process for process in known if _is_alive(process)]

    def close(self, orderly: Callable[[], None]) -> None:
        """Let `orderly` end what runs on a Ray that is alive, and leave it, within a bounded time.

        What is left then of a Ray that was started here is killed.
        """
        global _given_up
        self.remember_workers()

        def leave() -> None:
            try:
                if self.problem() is None:
                    orderly()
            except RayError as error:  # it died meanwhile
                logger.warning("workers could not be ended in order: %s", error)
            if self._owned:
                ray.shutdown()

        leaving = threading.Thread(target=leave, daemon=True, name="leave Ray")
        leaving.start()
        try:
            leaving.join(_CLOSE_S)
        finally:
            if leaving.is_alive():
                _given_up = True
                logger.warning("Ray could not be left within %.0f s", _CLOSE_S)
                # It would be tried again, and waited for, when this process ends.
                atexit.unregister(ray.shutdown)
            if self._processes:
                _kill([*self._processes.values(), *self._workers])

    def _connect(self, options: dict[str, Any], timeout_s: float) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's default puts workers behind everything else on the machine; they are the job.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # An engine that is killed takes its core process along, or the next one finds no memory.
        os.environ.setdefault("RAY_process_group_cleanup_enabled", "true")
        # Without an address Ray would join whatever cluster this machine knows of.
        options = options | {"address": self._address or "local"}
        deadline = time.monotonic() + timeout_s
        # Ray installs a handler of its own, which would hide from the run that it was interrupted.
        on_terminate = signal.getsignal(signal.SIGTERM)
        earlier = {*psutil.Process().children(recursive=True)}
        while True:
            try:
                if self._address is not None:
                    _knock(canonicalize_bootstrap_address(self._address))
                with _children_apart():
                    ray.init(log_to_driver=False, logging_level="ERROR", **options)
                signal.signal(signal.SIGTERM, on_terminate)
                break
            except (KeyboardInterrupt, SystemExit) as stop:
                # A Ray that is half started does not end what it has started so far.
                signal.signal(signal.SIGTERM, on_terminate)
                _kill([*{*psutil.Process().children(recursive=True)} - earlier])
                if isinstance(stop, SystemExit):  # Ray's own answer to SIGTERM
                    signal.raise_signal(signal.SIGTERM)
                raise
            # Ray raises a bare Exception when its own processes come up too slowly, as they do on
            # a machine that is busy; another attempt then finds their files in the page cache.
            except Exception as error:
                ray.shutdown()
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"cluster.address={self._address}: cannot start or reach Ray: {error}"
                    ) from error
                time.sleep(_LOOK_S)
        if self._address is None:
            self._processes = {
                child.name(): child
                for child in psutil.Process().children()
                if child.name() in _PROCESSES
            }

    def _answers(self) -> bool:
        try:
            _knock(self._head())
        except OSError:
            return False
        return True

    def _head(self) -> str:
        return ray.get_runtime_context().gcs_address


def _knock(address: str) -> None:
    """Raises OSError when nobody takes a connection there: Ray's client would wait for minutes."""
    host, port = address.rsplit(":", 1)
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(processes: list[psutil.Process]) -> None:
    """End processes that are still there, and wait until they are gone."""
    left = [process for process in processes if _is_alive(process)]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=5)

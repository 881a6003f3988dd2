"""The largest memory that this process and all below it held at one time.

A Ray that the driver starts is below it: gcs_server and raylet are its children, the workers and
agents are children of the raylet, engine cores are children of workers. A Ray that was running
before (`cluster.address`) is not, and neither are other hosts: there the figure would be the
driver's share alone, and is left out of the summary.

Memory is the proportional set size: pages that several processes share (libraries, the object
store) count once. Asking the kernel for it walks page tables, about 7 ms a process that holds 250
MB, so the cheap resident size is sampled often, and the expensive figure is taken when the resident
size reaches a new height.
"""

from __future__ import annotations

import threading

import psutil

_GROWTH = 1.01  # of the resident size since the last exact figure
_EXACT_EVERY_S = 30.0


class PeakMemory:
    """A sampling thread; a context manager that stops it."""

    def __init__(self, interval_s: float = 1.0) -> None:
        """Begin to sample every `interval_s` seconds."""
        self._interval_s = interval_s
        self._peak = 0
        self._highest_resident = 0
        self._since_exact_s = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)
        self._thread.start()

    @property
    def peak_bytes(self) -> int:
        """The largest figure so far; asking takes one more sample."""
        self._sample(exact=True)
        return self._peak

    def stop(self) -> None:
        """End the thread. `peak_bytes` still answers."""
        self._stopped.set()
        self._thread.join()

    def __enter__(self) -> PeakMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._sample(exact=False)

    def _sample(self, exact: bool) -> None:
        with self._lock:
            me = psutil.Process()
            processes = [me, *me.children(recursive=True)]
            resident = sum(_resident(process) for process in processes)
            self._since_exact_s += self._interval_s
            grown = resident > _GROWTH * self._highest_resident
            if not (exact or grown or self._since_exact_s >= _EXACT_EVERY_S):
                return
            self._highest_resident = max(resident, self._highest_resident)
            self._since_exact_s = 0.0
            self._peak = max(self._peak, sum(_proportional(process) for process in processes))


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:  # it ended, or belongs to another user
        return 0


def _proportional(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
        # Linux has the proportional size; elsewhere what the process has for itself comes closest.
        return getattr(full, "pss", None) or full.uss
    except psutil.NoSuchProcess:
        return 0
    except psutil.Error:
        return _resident(process)

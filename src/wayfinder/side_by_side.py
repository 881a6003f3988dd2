"""Jobs at the same time, each in a process of its own, and one interruption for all.

A job is only a driver: it joins Ray, and Ray gives it slots that no other job has. So it is forked
from this process, which is light as long as no job ran in it, and has all that a single run has:
a main thread, signals, an exit code. What ends one job ends no other.

A signal reaches this process alone, because every job leads a process group. It is handed on, and
the jobs are waited for: they save what they have done.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

from wayfinder.errors import JobFailedError

# Between two looks at signals and at whether jobs are alive.
_LOOK_S = 0.2
# An interrupted job ends a step and saves, each within the grace that it is given, and then leaves
# Ray and its trackers.
_LEAVE_S = 100.0
_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1

_fork = multiprocessing.get_context("fork")


class Job:
    """What one process does. Subclasses say how; all but `work` is called in this process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: BaseProcess | None = None
        self.answer: connection.Connection | None = None

    def work(self) -> Any:
        """Do the job: a plain value that is not None, or `JobFailedError`. For its own process."""
        raise NotImplementedError

    def begins(self) -> None:
        """Hear that the job is about to begin."""

    def ended(self, result: Any) -> None:
        """Hear what `work` returned, or the JobFailedError. Not called when it is interrupted."""


def do(jobs: Sequence[Job], n_jobs: int, grace_s: float) -> int:
    """Do all jobs, at most `n_jobs` at once, in their order.

    0, or the exit code of an interruption: then no job is left running, and some were not begun.
    `grace_s`: the longest `checkpoint.grace_s` of the jobs.
    """
    waiting, running = deque(jobs), []
    handed_on, deadline = 0, 0.0
    with _interruptions() as came:
        try:
            while running or (waiting and not came):
                while waiting and len(running) < n_jobs and not came:
                    _start(waiting[0])
                    running.append(waiting.popleft())
                connection.wait([job.process.sentinel for job in running], timeout=_LOOK_S)
                for job in [job for job in running if not job.process.is_alive()]:
                    running.remove(job)
                    _end(job, bool(came))
                if len(came) > handed_on:
                    handed_on = len(came)
                    deadline = deadline or time.monotonic() + 2 * grace_s + _LEAVE_S
                    for job in running:
                        job.process.terminate()
                if deadline and time.monotonic() > deadline:
                    for job in running:
                        _kill_group(job)
        finally:  # none runs now, unless one could not be started
            for job in running:
                job.process.terminate()
    if not came:
        return 0
    return 143 if signal.SIGTERM in came else 130


def _start(job: Job) -> None:
    job.begins()
    job.answer, answer = _fork.Pipe(duplex=False)
    job.process = _fork.Process(target=_life, args=(job, answer))
    # Until the new process has handlers of its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
    try:
        job.process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTIONS)
    answer.close()


def _end(job: Job, interrupted: bool) -> None:
    with job.answer:
        try:
            # What the job left behind may hold the other end open: no answer would ever come.
            result = job.answer.recv() if job.answer.poll() else None
        except EOFError:
            result = None
    if result is None:
        _kill_group(job)
        if interrupted:
            return
        result = JobFailedError(_sudden_end(job.process.exitcode))
    job.ended(result)


def _life(job: Job, answer: connection.Connection) -> None:
    """All that happens in a job's process."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Interrupted also when the parent dies, of SIGKILL for example.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != multiprocessing.parent_process().pid:
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTIONS)
    out, error = (TaggedLines(s, f"#{job.number} ") for s in (sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = out, error
    # As multiprocessing itself does from Python 3.13 on.
    atexit._clear()
    try:
        answer.send(job.work())
    except JobFailedError as problem:
        answer.send(problem)
    finally:
        atexit._run_exitfuncs()
        out.end_line()
        error.end_line()


class TaggedLines(io.TextIOBase):
    """A stream of which every line says whose it is. Lines of several processes do not mix."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO, tag: str) -> None:
        self._stream = stream
        self._tag = tag
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._stream.write("".join(f"{self._tag}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def end_line(self) -> None:
        if self._begun:
            self.write("\n")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """The numbers of the signals that ask for an end, as they come. One that is ignored stays so,
    as with a shell's background job."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _INTERRUPTIONS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_group(job: Job) -> None:
    """Kill what is left of a job."""
    with suppress(ProcessLookupError):
        os.killpg(job.process.pid, signal.SIGKILL)


def _sudden_end(exit_code: int) -> str:
    if exit_code in (130, 143):  # of run.py
        return "it was interrupted, alone; repeat the command to go on with it"
    if exit_code >= 0:
        return f"its process ended by itself with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    memory = " (memory ran out, as a rule)" if -exit_code == signal.SIGKILL else ""
    return f"its process was ended by {name}{memory}"

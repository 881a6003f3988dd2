"""One process owns a run directory.

The first choice is `flock`: the kernel (or the lock server of a shared file system) gives the lock
back when its owner dies, on whatever host, so nothing is ever stale. The file stays where it is;
what is written in it only serves the message to the second process.

Where `flock` is not supported, or sees the locks of its own host only (`localflock` on Lustre,
`local_lock` and `nolock` on NFS), ownership is what the file says. It is read and changed only by
the creator of the exclusive file `lock.guard`. An owner on this host whose process is gone is
replaced; an owner on another host cannot be examined, so its lock must be deleted by hand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from wayfinder.errors import RunDirError
from wayfinder.record.atomic import atomic_write_json, write_error

_NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_START_TOLERANCE_S = 2.0  # psutil derives start times from the wall clock, which may be adjusted


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock. The start time tells a process from a later one with the same id."""

    pid: int
    host: str
    started: float  # Unix time at which the process started
    since: float  # Unix time at which it took the lock
    released: bool = False

    @classmethod
    def this_process(cls) -> Holder:
        process = psutil.Process()
        return cls(process.pid, socket.gethostname(), process.create_time(), time.time())

    def is_gone(self) -> bool:
        """True only when that is certain: released, or a dead process of this host."""
        if self.released:
            return True
        if self.host != socket.gethostname():
            return False
        try:
            started = psutil.Process(self.pid).create_time()
        except psutil.NoSuchProcess:
            return True
        return abs(started - self.started) > _START_TOLERANCE_S

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on host {self.host}, since {since}"


class DirLock:
    """A lock file that this process holds until `release` or its death."""

    def __init__(self, path: Path, fd: int | None, holder: Holder) -> None:
        self.path = path
        self._fd = fd  # None: held by what the file says
        self._holder = holder

    def release(self) -> None:
        """Give the lock back. A second call does nothing."""
        if self._holder.released:
            return
        self._holder = Holder(**{**asdict(self._holder), "released": True})
        if self._fd is None:
            with _guard(self.path):
                atomic_write_json(self.path, asdict(self._holder))
            return
        with contextlib.suppress(OSError):  # a full disk must not keep the lock
            _write_holder(self._fd, self._holder)
        os.close(self._fd)
        self._fd = None


def read_holder(path: Path) -> Holder | None:
    """What a lock file says about its owner; None when it says nothing that can be read."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def try_lock(path: Path, flock: Callable[[int, int], None] = fcntl.flock) -> DirLock | None:
    """Take the lock file at `path` for this process, or return None when another process has it.

    Raises `RunDirError` when the file cannot be written, or when a lock without `flock` cannot be
    judged. `flock` is the system call.
    """
    if not locks_stay_on_this_host(_mounts(), path.parent.resolve()):
        try:
            return _lock_by_kernel(path, flock)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise write_error(path, error) from error
    return _lock_by_file(path)


def _lock_by_kernel(path: Path, flock: Callable[[int, int], None]) -> DirLock:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder = Holder.this_process()
        _write_holder(fd, holder)
    except BaseException:
        os.close(fd)
        raise
    return DirLock(path, fd, holder)


def _lock_by_file(path: Path) -> DirLock | None:
    with _guard(path):
        if path.exists() and path.stat().st_size > 0:
            holder = read_holder(path)
            if holder is None:
                raise RunDirError(
                    f"{path}: cannot be read as a lock, and this file system has no flock. "
                    "Mend: if no run uses this directory, delete the file."
                )
            if not holder.is_gone():
                return None
        holder = Holder.this_process()
        atomic_write_json(path, asdict(holder))
        return DirLock(path, None, holder)


@contextlib.contextmanager
def _guard(path: Path):
    guard = path.with_name(path.name + ".guard")
    for _ in range(50):
        try:
            fd = os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            break
        except FileExistsError:
            time.sleep(0.1)
        except OSError as error:
            raise write_error(guard, error) from error
    else:
        raise RunDirError(
            f"{guard}: exists since {time.ctime(guard.stat().st_mtime)}, where it should last for "
            "milliseconds. Mend: if no run is starting in this directory, delete the file."
        )
    try:
        os.close(fd)
        yield
    finally:
        guard.unlink(missing_ok=True)


def _write_holder(fd: int, holder: Holder) -> None:
    data = json.dumps(asdict(holder)).encode()
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))
    os.fsync(fd)


def _mounts() -> str:
    try:
        return Path("/proc/self/mounts").read_text()
    except OSError:  # not Linux: no way to know, flock decides
        return ""


def locks_stay_on_this_host(mounts: str, path: Path) -> bool:
    """Whether the mount table says that `flock` below `path` is invisible to other hosts.

    `mounts` is the text of /proc/self/mounts. A local disk has no other hosts: False.
    """
    options: list[str] = []
    longest = -1
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        point = Path(fields[1].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= longest:
            longest, options = len(point.parts), fields[3].split(",")
    return any(o in ("localflock", "nolock", "local_lock=all", "local_lock=flock") for o in options)

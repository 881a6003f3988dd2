"""Files that are whole or absent, and JSON that every reader accepts."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wayfinder.errors import RunDirError

_MENDS = {
    errno.ENOSPC: "free space there, or move paths.root to another disk",
    errno.EDQUOT: "free space there, or move paths.root to another disk",
    errno.EACCES: "make it writable, or choose another paths.root",
    errno.EPERM: "make it writable, or choose another paths.root",
    errno.EROFS: "the file system is read-only; choose another paths.root",
    errno.ENOTDIR: "a part of the path is a file; choose another paths.root or run.name",
    errno.ENAMETOOLONG: "choose a shorter run.name",
}
_NO_DIR_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def write_error(path: Path, error: OSError) -> RunDirError:
    """The message for a user whose run directory cannot be written."""
    reason = error.strerror or str(error)
    mend = _MENDS.get(error.errno or 0, "check the disk, or choose another paths.root")
    return RunDirError(f"{path}: a writable path was expected, found: {reason}. Mend: {mend}.")


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` such that a reader, or a crash, sees the old file or the new one.

    Raises `RunDirError` when the disk is full or the place is not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _fsync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


def atomic_write_json(path: Path, value: Any) -> None:
    """`atomic_write_bytes` of indented strict JSON. NaN or infinity is a `ValueError`."""
    atomic_write_bytes(path, (strict_json(value, indent=2) + "\n").encode())


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON without NaN and infinity, which no other JSON reader knows (`ValueError`)."""
    return json.dumps(value, allow_nan=False, indent=indent, default=_plain)


def nonfinite_to_null(value: Any, key: str = "") -> tuple[Any, list[str]]:
    """`value` with every NaN and infinity replaced by None, and the dotted keys where they were."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None, [key]
    if isinstance(value, Mapping):
        pairs = {k: nonfinite_to_null(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
        return {k: v for k, (v, _) in pairs.items()}, [b for _, bad in pairs.values() for b in bad]
    if isinstance(value, list | tuple):
        items = [nonfinite_to_null(v, f"{key}[{i}]") for i, v in enumerate(value)]
        return [v for v, _ in items], [b for _, bad in items for b in bad]
    return value, []


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if (
            error.errno not in _NO_DIR_FSYNC
        ):  # some network file systems sync on rename by themselves
            raise
    finally:
        os.close(fd)

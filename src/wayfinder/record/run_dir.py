"""The directory of one run: who may use it (layout.py says what lies in it).

Repeating a command is the way to resume: a finished run gives its stored summary, an unfinished one
goes on, and a directory of another config is refused with the keys that differ.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wayfinder.config.identity import config_diff, determining_diff
from wayfinder.errors import RunDirError, RunRefusedError
from wayfinder.record.atomic import atomic_write_json, strict_json, write_error
from wayfinder.record.layout import (
    ADAPTERS_DIR,
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    EPISODES_DIR,
    ERROR_FILE,
    EVENTS_FILE,
    LOCK_FILE,
    METRICS_FILE,
    PREVIOUS_SUMMARY_FILE,
    SUMMARY_FILE,
    WANDB_DIR,
)
from wayfinder.record.lock import DirLock, read_holder, try_lock
from wayfinder.record.provenance import commit, versions

logger = logging.getLogger(__name__)

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


@dataclass
class RunDir:
    """An open run directory. `close` it, or use it in a `with` statement."""

    path: Path
    name: str  # path below paths.root
    config_hash: str
    created: float  # Unix time of the first attempt
    resumed: bool  # an earlier attempt of the same run was found
    finished_summary: dict[str, Any] | None  # not None: the run is finished, return this
    _lock: DirLock | None = field(repr=False)

    @classmethod
    def open(
        cls,
        root: Path,
        name: str,
        config: dict[str, Any],
        config_hash: str,
        on_existing: str,
        overrides: list[str],
    ) -> RunDir:
        """Make, resume or refuse `root/name` for one config; see the module's head.

        `on_existing`: `resume`; `fail` refuses a directory that a run has used; `new` takes the
        first of name, name-2, name-3, ... that is free. Files that Hydra puts into a directory
        (`.hydra`, `*.log`) do not make it used. A finished run is not locked.

        Raises `RunDirError`: unwritable, in use by another process, of another config, refused.
        """
        if not _NAME.fullmatch(name):
            raise RunRefusedError(
                f"run.name: letters, digits, dot, dash and underscore were expected, found {name!r}"
                ". Mend: choose another run.name."
            )
        if on_existing not in ("resume", "fail", "new"):
            raise ValueError(f"on_existing is resume, fail or new, not {on_existing!r}")
        root = Path(root).expanduser().absolute()
        # Through JSON, as the stored config went: tuples are lists, keys are strings.
        asked = _Request(json.loads(strict_json(config)), config_hash, overrides)
        if on_existing == "new":
            path, lock = _next_vacant(root, name)
            return cls._locked(root, path, asked, lock)
        path = root / name
        _make_directory(path)
        if on_existing == "fail" and not _is_vacant(path):
            raise RunRefusedError(
                f"{path}: a new directory was expected (run.on_existing=fail), found files of a "
                "run. Mend: choose another run.name, or run.on_existing=resume or new."
            )
        if (finished := cls._finished(root, path, asked)) is not None:
            return finished
        _require_run_or_vacant(path)
        lock = try_lock(path / LOCK_FILE)
        if lock is None:
            raise RunRefusedError(
                f"{path}: in use by {read_holder(path / LOCK_FILE) or 'an unknown process'}. "
                "Mend: wait for it or end it, or choose another run.name, or run.on_existing=new."
            )
        return cls._locked(root, path, asked, lock)

    @classmethod
    def _locked(cls, root: Path, path: Path, asked: _Request, lock: DirLock) -> RunDir:
        try:
            if (finished := cls._finished(root, path, asked)) is not None:
                lock.release()
                return finished
            stored = _require_run_or_vacant(path)
            record = stored or asked.first_record()
            if stored is None:
                atomic_write_json(path / CONFIG_FILE, record)
            for directory in (EPISODES_DIR, ADAPTERS_DIR, CHECKPOINTS_DIR, WANDB_DIR):
                _make_directory(path / directory)
            _set_summary_aside(path)
            run = cls(
                path=path,
                name=path.relative_to(root).as_posix(),
                config_hash=asked.config_hash,
                created=record["created"],
                resumed=stored is not None,
                finished_summary=None,
                _lock=lock,
            )
            run.event(
                f"{'resumed' if stored else 'created'} pid={os.getpid()} "
                f"commit={commit()[0]} overrides={asked.overrides}"
            )
            if stored is not None:
                for line in config_diff(stored["config"], asked.config):
                    run.event(f"another value than at the start: {line}")
            return run
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _finished(cls, root: Path, path: Path, asked: _Request) -> RunDir | None:
        stored = _read_config(path)
        if stored is None:
            return None
        asked.require_same(path, stored)
        summary = read_summary(path)
        if summary is None or summary.get("status") != "finished":
            return None
        return cls(
            path=path,
            name=path.relative_to(root).as_posix(),
            config_hash=asked.config_hash,
            created=stored["created"],
            resumed=True,
            finished_summary=summary,
            _lock=None,
        )

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS_FILE

    @property
    def adapters(self) -> Path:
        return self.path / ADAPTERS_DIR

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS_DIR

    def event(self, text: str) -> None:
        """Append one line to `events.log`. A disk that refuses it is no reason to end a run: what
        must be on disk raises by itself."""
        path = self.path / EVENTS_FILE
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {' '.join(text.split())}\n"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            logger.warning("not noted: %s (%s)", line.strip(), write_error(path, error))

    def failure(self, error: BaseException) -> None:
        """Note a failure in `events.log`, and its traceback in `error.log`."""
        self.event(f"failed: {type(error).__name__}: {error}")
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            with open(self.path / ERROR_FILE, "a", encoding="utf-8") as file:
                file.write(f"{now}\n{''.join(traceback.format_exception(error))}\n")
        except OSError as problem:
            logger.warning("%s", write_error(self.path / ERROR_FILE, problem))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`: the last thing that a run does."""
        atomic_write_json(self.path / SUMMARY_FILE, summary)

    def close(self) -> None:
        """Let other processes use the directory. A second call does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_summary(path: Path) -> dict[str, Any] | None:
    """The stored summary of a run directory; None when the run has not ended."""
    try:
        return json.loads((path / SUMMARY_FILE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunDirError(
            f"{path / SUMMARY_FILE}: JSON was expected, found: {error}. Mend: delete the file and "
            "repeat the command; the run then goes on from its last checkpoint."
        ) from error


@dataclass(frozen=True)
class _Request:
    config: dict[str, Any]
    config_hash: str
    overrides: list[str]

    def first_record(self) -> dict[str, Any]:
        revision, dirty = commit()
        return {
            "format": _FORMAT,
            "created": time.time(),
            "config_hash": self.config_hash,
            "overrides": self.overrides,
            "commit": revision,
            "dirty": dirty,
            "versions": versions(),
            "config": self.config,
        }

    def require_same(self, path: Path, stored: dict[str, Any]) -> None:
        if stored["config_hash"] == self.config_hash:
            return
        lines = determining_diff(stored["config"], self.config) or [
            "(none: another version wrote the hash)"
        ]
        raise RunRefusedError(
            f"{path}: belongs to a run with another config. Keys that differ, stored -> given:\n  "
            + "\n  ".join(lines)
            + "\nMend: choose another run.name, or run.on_existing=new, or repeat the stored run "
            f"with: {' '.join(stored['overrides']) or '(no overrides)'}"
        )


def _next_vacant(root: Path, name: str) -> tuple[Path, DirLock]:
    for number in itertools.count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        _make_directory(path)
        if not _is_vacant(path) or (lock := try_lock(path / LOCK_FILE)) is None:
            continue
        if _is_vacant(path):  # still, now that nobody else can change it
            return path, lock
        lock.release()
    raise AssertionError("unreachable: there is always a next number")


def _set_summary_aside(path: Path) -> None:
    """A run that goes on has not ended: its old summary must not be taken for the new one."""
    try:
        (path / SUMMARY_FILE).replace(path / PREVIOUS_SUMMARY_FILE)
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(path / PREVIOUS_SUMMARY_FILE, error) from error


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from error


def _is_vacant(path: Path) -> bool:
    """No run has used the directory: at most Hydra's files, a lock and left temporary files."""
    return all(
        entry.name.startswith(".")
        or entry.name in (LOCK_FILE, f"{LOCK_FILE}.guard")
        or (entry.suffix == ".log" and entry.name != EVENTS_FILE)
        for entry in path.iterdir()
    )


def _require_run_or_vacant(path: Path) -> dict[str, Any] | None:
    """The record of the run in a directory, None in one that no run has used."""
    stored = _read_config(path)
    if stored is None and not _is_vacant(path):
        raise RunRefusedError(
            f"{path}: a directory of a run was expected, found files but no {CONFIG_FILE}. "
            "Mend: choose another run.name."
        )
    return stored


def _read_config(path: Path) -> dict[str, Any] | None:
    file = path / CONFIG_FILE
    try:
        stored = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunRefusedError(
            f"{file}: the record of a run was expected, found: {error}. "
            "Mend: choose another run.name, or restore the file."
        ) from error
    if not isinstance(stored, dict) or stored.get("format") != _FORMAT:
        raise RunRefusedError(
            f"{file}: format {_FORMAT} was expected, found "
            f"{stored.get('format') if isinstance(stored, dict) else type(stored).__name__}. "
            "Mend: use the version of Wayfinder that wrote it, or another run.name."
        )
    return stored

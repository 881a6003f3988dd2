"""Files of a checkpoint: adapter in PEFT's form, AdamW's moments, and the state of the run.

step_<n>/adapter_model.safetensors, adapter_config.json
step_<n>/optimizer.safetensors, optimizer.json
step_<n>/state.json
step_<n>/COMMITTED            written last: without it the directory is not a checkpoint
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from wayfinder.errors import CheckpointError

FORMAT = 2
COMMITTED = "COMMITTED"
STATE = "state.json"
POLICY_FILES = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.safetensors",
    "optimizer.json",
)
_REPLACED = ".replaced-step_"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint and the state of the run in it."""

    path: Path
    step: int
    state: dict


def save_policy(
    directory: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping,
    moments: Mapping[str, Tensor],
    counts: Mapping[str, float],
) -> None:
    """What rank 0 writes. Raises CheckpointError when the disk refuses."""
    with _writing(directory):
        save_file(dict(tensors), directory / "adapter_model.safetensors", metadata={"format": "pt"})
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
        save_file(dict(moments), directory / "optimizer.safetensors")
        (directory / "optimizer.json").write_text(json.dumps(counts, indent=1, sort_keys=True))


def load_optimizer(directory: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    return (
        load_file(directory / "optimizer.safetensors"),
        json.loads((directory / "optimizer.json").read_text()),
    )


def begin(root: Path, step: int) -> Path:
    """A temporary directory beside the checkpoint of `step`, to be filled and then committed."""
    temporary = root / f".tmp-step_{step}"
    with _writing(temporary):
        for left in root.glob(".tmp-*"):
            shutil.rmtree(left)
        temporary.mkdir()
    return temporary


def commit(
    temporary: Path, step: int, state: Mapping, keep: int, score: float | None = None
) -> Path:
    """Write the run's state and the digests of all files, fsync, rename; drop old checkpoints.

    The newest `keep` stay and, of all that have a `score`, the newest with the highest.
    """
    root = temporary.parent
    target = root / f"step_{step}"
    with _writing(temporary):
        # Rank 0 wrote them, on another machine perhaps, whose changes may show late here.
        for name in POLICY_FILES:
            (temporary / name).stat()
        (temporary / STATE).write_text(json.dumps(state, indent=1, sort_keys=True))
        files = {p.name: _digest(p) for p in sorted(temporary.iterdir())}
        mark = {"format": FORMAT, "step": step, "score": score, "sha256": files}
        (temporary / COMMITTED).write_text(json.dumps(mark, indent=1))
        for path in [*temporary.iterdir(), temporary]:
            _fsync(path)
        if target.exists():
            target.rename(root / f"{_REPLACED}{step}")
        temporary.rename(target)
        _fsync(root)
        shutil.rmtree(root / f"{_REPLACED}{step}", ignore_errors=True)
        _retire(root, step, keep)
    return target


def _retire(root: Path, step: int, keep: int) -> None:
    """Checkpoints after `step` were passed over when the run resumed: they neither count nor go."""
    own = [path for path in _committed(root) if _step_of(path) <= step]
    scores = {path: score for path in own if (score := _score(path)) is not None}
    best = max(scores, key=lambda path: (scores[path], _step_of(path)), default=None)
    for old in own[:-keep]:
        if old != best:
            doomed = root / f".tmp-retired-{old.name}"
            old.rename(doomed)
            shutil.rmtree(doomed)


def _score(path: Path) -> float | None:
    """The score in a mark; None if it has none or cannot be read."""
    try:
        score = json.loads((path / COMMITTED).read_bytes())["score"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(score) if isinstance(score, int | float) else None


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint below `root`, and what was wrong with newer ones.

    Raises CheckpointError when there are checkpoints and none is sound: a run never starts afresh
    in silence.
    """
    problems: list[str] = []
    for aside in root.glob(f"{_REPLACED}*"):
        # Whoever put it aside died before the new one was in its place.
        if not (root / f"step_{aside.name.removeprefix(_REPLACED)}").exists():
            aside.rename(root / f"step_{aside.name.removeprefix(_REPLACED)}")
    candidates = _committed(root)
    for path in reversed(candidates):
        try:
            return read(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    if candidates:
        raise CheckpointError(
            f"{root}: no checkpoint can be used:\n  "
            + "\n  ".join(problems)
            + "\nRestore one, or start in another directory (run.on_existing=new)."
        )
    return None, problems


def read(path: Path) -> Checkpoint:
    """Verify every file of a committed checkpoint and read its state."""
    try:
        mark = json.loads((path / COMMITTED).read_bytes())
        if mark.get("format") != FORMAT:
            raise CheckpointError(
                f"{path}: format {mark.get('format')!r}; this version reads format {FORMAT}"
            )
        for name, expected in mark["sha256"].items():
            if "/" in name or name.startswith("."):
                raise CheckpointError(f"{path / COMMITTED}: file name {name!r} is not allowed")
            if _digest(path / name) != expected:
                raise CheckpointError(f"{path / name}: its content is not what was committed")
        if path.name != f"step_{mark['step']}":
            raise CheckpointError(f"{path / COMMITTED}: step {mark['step']!r} in this directory")
        return Checkpoint(path, mark["step"], json.loads((path / STATE).read_bytes()))
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: not readable as a checkpoint: {error}") from error


def _committed(root: Path) -> list[Path]:
    found = [
        path
        for path in root.glob("step_*")
        if path.name.removeprefix("step_").isdigit() and (path / COMMITTED).exists()
    ]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: this checkpoint could not be written: {error}. Free space there or make it "
            "writable, then repeat the command: the run goes on from the checkpoint before."
        ) from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

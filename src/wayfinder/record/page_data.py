"""What the page of a run shows, as plain data: read from the files of its directory alone.

Nothing that is missing or broken is an error: it is left out, and `notes` says so. Texts, replies
and frames that are equal are held once. Whole episodes are left out, failures last, where the page
would grow beyond its budget; their outcomes stay.
"""

from __future__ import annotations

import base64
import io
import json
import math
import time
import zipfile
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from wayfinder.record.atomic import strict_json
from wayfinder.record.episodes import (
    StoredEpisode,
    read_frame_files,
    read_stored,
    stored_evaluations,
)
from wayfinder.record.layout import CONFIG_FILE, EPISODES_DIR, METRICS_FILE, SUMMARY_FILE
from wayfinder.record.metrics import RESERVED, read_metrics
from wayfinder.record.pictures import action_symbol, outcome_text
from wayfinder.types import Outcome, Turn

BUDGET_BYTES = 9_000_000
"""Episodes and frames of one page; the rest of it takes less than a megabyte."""

COLORS = {
    Outcome.SOLVED: "#1f9d68",
    Outcome.STOPPED: "#d1443f",
    Outcome.TURN_LIMIT: "#e39a26",
    Outcome.CONTEXT_LIMIT: "#a3732c",
    Outcome.REPLY_CUT: "#b0509f",
    Outcome.PARSE_FAILURE: "#6d5bd0",
    Outcome.ENGINE_LOST: "#7b8494",
    Outcome.ENV_ERROR: "#5a6270",
}
"""Of the page, where kinds of failure are told apart; pictures have one red for all of them."""

_KINDS = ("eval", "greedy", "unseen", "train")
_BIG_FRAME_BYTES = 12_000  # no maze is as large; photographs are reduced to `_REDUCED_PIXELS`
_REDUCED_PIXELS = 256
_LOGPROB_UNIT = 1e-4
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
_BROKEN_ARCHIVE = (*_UNREADABLE, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def collect(run_path: Path, budget_bytes: int = BUDGET_BYTES) -> dict[str, Any]:
    """Everything that the page of the run shows; strict JSON can hold it."""
    notes: list[str] = []
    record = _read_object(run_path / CONFIG_FILE, "settings and code of the run", notes)
    summary = _read_object(run_path / SUMMARY_FILE, "the run goes on or was killed", notes)
    try:
        lines = read_metrics(run_path / METRICS_FILE)
    except OSError as error:
        lines = []
        notes.append(f"{METRICS_FILE}: {error.strerror or error}.")
    if not lines:
        notes.append(f"{METRICS_FILE}: no line of metrics; there are no curves.")
    replays = _Replays(budget_bytes)
    evaluations = _evaluations(run_path, replays, notes)
    stored = {(evaluation["kind"], evaluation["step"]) for evaluation in evaluations}
    for kind in _KINDS[:3]:
        rate = f"{kind}/solve_rate"
        gone = [li["step"] for li in lines if li.get(rate) is not None]
        gone = [step for step in gone if (kind, step) not in stored]
        if gone:
            steps = ", ".join(map(str, gone))
            notes.append(f"{EPISODES_DIR}/: no episodes of {kind} at step {steps}.")
    config = record.get("config")
    return {
        "title": _text(config, "experiment") or run_path.name,
        "subtitle": _subtitle(run_path, config, summary),
        "facts": _facts(record, summary, lines),
        "notes": notes,
        "metrics": _metrics(lines),
        "evaluations": evaluations,
        "outcomes": {
            str(outcome): {"label": outcome_text(outcome), "color": COLORS[outcome]}
            for outcome in Outcome
        },
        "strings": replays.strings.values,
        "replies": replays.replies.values,
        "frames": replays.frames,
        "logprob_unit": _LOGPROB_UNIT,
    }


class _Table:
    """Values in order of their first mention, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.size = 0  # rough JSON bytes
        self._places: dict[Hashable, int] = {}

    def place(self, key: Hashable, value: Any) -> int:
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
            self.size += len(strict_json(value)) + 1
        return self._places[key]


@dataclass
class _Replays:
    """Turns and frames of the episodes that fit into the budget."""

    budget_bytes: int
    strings: _Table = field(default_factory=_Table)
    replies: _Table = field(default_factory=_Table)
    frames: list[str] = field(default_factory=list)  # data URIs
    left_out: int = 0
    _places: dict[str, int] = field(default_factory=dict)
    _size: int = 0

    def add(self, stored: StoredEpisode, files: Mapping[str, bytes]) -> dict[str, Any] | None:
        """The replay of one episode, None once the budget is spent."""
        if self._size + self.strings.size + self.replies.size >= self.budget_bytes:
            self.left_out += 1
            return None
        episode = stored.episode
        replay = {
            "prompt": self._string(stored.prompt),
            "error": self._string(episode.error),
            "final": self._frame(episode.final_frame, files),
            "turns": [self._turn(turn, stored.pieces, files) for turn in episode.turns],
        }
        self._size += len(strict_json(replay))
        return replay

    def _turn(self, turn: Turn, pieces: Mapping[int, str], files: Mapping[str, bytes]) -> list[Any]:
        """[reply, frames, feedback, executed, cut, first turn in sight, log-probs]"""
        tokens = [self._string(pieces.get(token, f"#{token}")) for token in turn.reply_ids]
        reply = [
            self._string(turn.text),
            tokens,
            self._string(action_symbol(turn)),
            self._string(turn.action),
            self._string(turn.parse_error),
        ]
        return [
            self.replies.place(strict_json(reply), reply),
            [self._frame(name, files) for name in turn.frames],
            self._string(turn.feedback or None),
            int(turn.executed),
            int(turn.finish_reason == "length"),
            turn.window_start,
            [round(p / _LOGPROB_UNIT) if math.isfinite(p) else None for p in turn.logprobs],
        ]

    def _string(self, text: str | None) -> int | None:
        return None if text is None else self.strings.place(text, text)

    def _frame(self, name: str, files: Mapping[str, bytes]) -> int | None:
        if name not in self._places and name in files:
            self._places[name] = len(self.frames)
            self.frames.append(_data_uri(files[name]))
            self._size += len(self.frames[-1]) + 3
        return self._places.get(name)


def _evaluations(run_path: Path, replays: _Replays, notes: list[str]) -> list[dict[str, Any]]:
    """Every evaluation by kind and step, the replays of its episodes as far as they fit."""
    found = stored_evaluations(run_path)
    if not found:
        notes.append(f"{EPISODES_DIR}/: no episodes are stored; there is nothing to replay.")
    read: dict[tuple[str, int], dict[str, Any]] = {}
    for kind, step, path in _most_wanted_first(found):
        try:
            episodes = read_stored(path)
            rows = [_row(stored) for stored in episodes]
        except _UNREADABLE as error:
            notes.append(f"{EPISODES_DIR}/{path.name}: left out, it cannot be read: {error!r}")
            continue
        files: dict[str, bytes] = {}
        try:
            files = read_frame_files(path)
        except _BROKEN_ARCHIVE as error:
            notes.append(f"{EPISODES_DIR}/{path.stem}.frames.zip: no frames: {error!r}")
        for index in sorted(range(len(rows)), key=lambda i: episodes[i].episode.success):
            rows[index]["replay"] = replays.add(episodes[index], files)
        read[kind, step] = {"kind": kind, "step": step, "file": path.name, "episodes": rows}
    if replays.left_out:
        notes.append(
            f"{replays.left_out} episodes are coloured but cannot be replayed here, to keep the "
            f"page small; {EPISODES_DIR}/ has them."
        )
    return [read[key] for key in sorted(read, key=lambda key: (_kind_place(key[0]), key))]


def _row(stored: StoredEpisode) -> dict[str, Any]:
    episode = stored.episode
    return {
        "env": episode.task.env_id,
        "seed": episode.task.seed,
        "index": episode.task.index,
        "member": episode.member,
        "version": episode.policy_version,
        "engine": episode.engine,
        "outcome": str(episode.outcome),
        "reward": episode.reward if math.isfinite(episode.reward) else None,
        "num_turns": len(episode.turns),
    }


def _most_wanted_first(found: Sequence[tuple[str, int, Path]]) -> Iterator[tuple[str, int, Path]]:
    """The last of each kind, then the first evaluation, then the others, the newest first."""
    last = {kind: entry for entry in found for kind in [entry[0]]}
    first = next((entry for entry in found if entry[0] == "eval"), None)
    order = sorted(last.values(), key=lambda entry: _kind_place(entry[0]))
    order += [first] if first else []
    order += sorted(found, key=lambda entry: (-entry[1], _kind_place(entry[0])))
    return iter(dict.fromkeys(order))


def _kind_place(kind: str) -> int:
    return _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


def _data_uri(png: bytes) -> str:
    if len(png) <= _BIG_FRAME_BYTES:
        return f"data:image/png;base64,{base64.b64encode(png).decode()}"
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.thumbnail((_REDUCED_PIXELS, _REDUCED_PIXELS))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"


def _metrics(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = sorted({name for line in lines for name in line} - set(RESERVED))
    return {
        "steps": [line["step"] for line in lines],
        "series": {name: [_figure(line.get(name)) for line in lines] for name in names},
    }


def _figure(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _read_object(path: Path, what: str, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        if isinstance(value, dict):
            return value
        notes.append(f"{path.name}: an object was expected ({what}).")
    except FileNotFoundError:
        notes.append(f"{path.name}: missing ({what}).")
    except (OSError, ValueError) as error:
        notes.append(f"{path.name}: cannot be read ({what}): {error}")
    return {}


def _get(value: Any, *keys: str) -> Any:
    """A nested entry, None where an older or broken record does not have it."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(value: Any, *keys: str) -> str:
    found = _get(value, *keys)
    return "" if found is None else str(found)


def _subtitle(run_path: Path, config: Any, summary: Mapping[str, Any]) -> str:
    temperature = _text(config, "rollout", "temperature")
    seed = _text(config, "seed")
    parts = (
        _text(config, "env", "id"),
        _text(config, "model", "name"),
        temperature and f"T = {temperature}",
        seed and f"seed {seed}",
        _text(summary, "status") or "not ended",
        _text(summary, "name") or str(run_path.name),
    )
    return " \u00b7 ".join(part for part in parts if part)


def _facts(
    record: Mapping[str, Any], summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """(label, value) of what is known, the result first."""
    facts: list[tuple[str, str]] = []
    for kind, label in zip(_KINDS, ("solve rate", "greedy", "unseen mazes"), strict=False):
        rated = [line for line in lines if _figure(line.get(f"{kind}/solve_rate")) is not None]
        if rated:
            shown = [rated[-1]] if len(rated) == 1 else [rated[0], rated[-1]]
            facts.append((label, " \u2192 ".join(_share(line, kind) for line in shown)))
    if lines:
        facts.append(("steps", str(lines[-1]["step"])))
    seconds = _figure(_get(summary, "wall_s")) or (lines[-1]["elapsed_s"] if lines else None)
    if seconds is not None:
        facts.append(("time", f"{seconds / 60:.1f} min"))
    if memory := _figure(_get(summary, "peak_memory_bytes")):
        facts.append(("peak memory", f"{memory / 2**30:.1f} GiB"))
    name = "mismatch/abs_logprob_diff_max"
    worst = [value for line in lines if (value := _figure(line.get(name))) is not None]
    if worst:
        facts.append(("worst mismatch", f"{max(worst):.1e}"))
    if commit := _text(record, "commit"):
        facts.append(("commit", commit[:10] + (" + changes" if record.get("dirty") else "")))
    if config_hash := _text(record, "config_hash"):
        facts.append(("config", config_hash[:10]))
    created = record.get("created")
    if isinstance(created, int | float) and 0 < created < 1e11:  # what gmtime can take
        facts.append(("begun", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(created))))
    if isinstance(overrides := record.get("overrides"), list) and overrides:
        facts.append(("overrides", " ".join(map(str, overrides))))
    if error := _text(summary, "error"):
        facts.append(("error", error))
    return facts


def _share(line: Mapping[str, Any], kind: str) -> str:
    rate = f"{line[f'{kind}/solve_rate']:.1%}"
    counts = [_figure(line.get(f"{kind}/{name}")) for name in ("num_solved", "num_episodes")]
    return rate if None in counts else f"{rate} ({counts[0]:.0f}/{counts[1]:.0f})"

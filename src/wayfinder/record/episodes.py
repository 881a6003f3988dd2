"""Episodes on disk: text a person can read, and everything that was sampled, exactly.

    episodes/eval_step_000010.jsonl         one episode a line
    episodes/eval_step_000010.frames.zip    their frames, `<hash>.png`, each distinct frame once

Both files are self-contained and appear whole. Frames of mazes have few colors, so they become
palette PNGs: about 300 bytes and a millisecond each. Token ids hold one id per image pad; runs of
equal ids are stored as `[id, count]`. What the sampled ids read as by themselves is stored once an
episode (`pieces`), because a reader of the files has no tokenizer. A log-probability or reward that
is not finite is null here and NaN when read.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from wayfinder.errors import RunDirError
from wayfinder.record.atomic import atomic_write_bytes, strict_json
from wayfinder.record.layout import EPISODES_DIR
from wayfinder.types import Episode, Outcome, Task, Turn

_FORMAT = 1
_SHORTEST_RUN = 4  # shorter runs of equal ids take more room as a pair

_FILE = re.compile(r"(?P<kind>.+)_step_(?P<step>\d{6,})\.jsonl")

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """An episode and the texts that are stored beside it, where `write_episodes` could decode."""

    episode: Episode
    prompt: str | None
    pieces: dict[int, str]  # sampled id -> what it reads as


def episodes_path(run_path: Path, kind: str, step: int) -> Path:
    """Where the episodes of one evaluation lie; `kind` as in its metrics (`eval`, ...)."""
    return run_path / EPISODES_DIR / f"{kind}_step_{step:06d}.jsonl"


def latest_episodes(run_path: Path, kind: str = "eval") -> Path | None:
    """The episodes file of the last evaluation of that kind, if there is one."""
    return max((run_path / EPISODES_DIR).glob(f"{kind}_step_??????.jsonl"), default=None)


def stored_evaluations(run_path: Path) -> list[tuple[str, int, Path]]:
    """(kind, step, episodes file) of everything that was stored, in order."""
    found = []
    for path in (run_path / EPISODES_DIR).glob("*.jsonl"):
        if match := _FILE.fullmatch(path.name):
            found.append((match["kind"], int(match["step"]), path))
    return sorted(found)


def write_episodes(
    path: Path,
    episodes: Sequence[Episode],
    frames: Mapping[str, np.ndarray],
    decode: Decode | None = None,
) -> None:
    """Write `path` and, beside it, the archive of the frames that the episodes mention.

    `frames`: hash -> uint8 [height, width, 3]; a hash that is missing there is a `KeyError`.
    `decode`: ids -> text, for the prompt as the model saw it and for the sampled ids; without it
    neither is stored.
    """
    hashes = dict.fromkeys(frame for episode in episodes for frame in frame_hashes(episode))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:
        for name in hashes:
            entry = zipfile.ZipInfo(f"{name}.png")  # a fixed date: same episodes, same bytes
            file.writestr(entry, encode_png(frames[name]))
    lines = [strict_json(_to_record(episode, decode)) for episode in episodes]
    atomic_write_bytes(_archive(path), archive.getvalue())
    atomic_write_bytes(path, "".join(f"{line}\n" for line in lines).encode())


def read_episodes(path: Path) -> list[Episode]:
    """The episodes of one file, equal to those that were written."""
    return [stored.episode for stored in read_stored(path)]


def read_stored(path: Path) -> list[StoredEpisode]:
    """The episodes of one file with their texts."""
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [
        StoredEpisode(
            _from_record(record, path),
            record.get("prompt"),
            {int(token): piece for token, piece in record.get("pieces", {}).items()},
        )
        for record in records
    ]


def read_frames(path: Path, hashes: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The frames of an episodes file by hash (all, or those asked for)."""
    return {frame: decode_png(data) for frame, data in read_frame_files(path, hashes).items()}


def read_frame_files(path: Path, hashes: Collection[str] | None = None) -> dict[str, bytes]:
    """The same frames as the PNG files that are stored."""
    with zipfile.ZipFile(_archive(path)) as file:
        stored = {name.removesuffix(".png"): name for name in file.namelist()}
        wanted = stored if hashes is None else hashes
        return {frame: file.read(stored[frame]) for frame in wanted}


def frame_hashes(episode: Episode) -> list[str]:
    """Hashes of all frames that an episode mentions, in order."""
    return [frame for turn in episode.turns for frame in turn.frames] + [episode.final_frame]


def encode_png(frame: np.ndarray) -> bytes:
    """Lossless PNG of a uint8 [height, width, 3] frame, with a palette up to 16 colors."""
    indexed = _index_colors(frame)
    if indexed is None:
        image = Image.fromarray(frame)
    else:
        pixels, colors = indexed
        image = Image.fromarray(pixels)
        image.putpalette(bytes(channel for color in colors for channel in color))
    data = io.BytesIO()
    image.save(data, "PNG", compress_level=6)
    return data.getvalue()


def decode_png(data: bytes) -> np.ndarray:
    """The uint8 [height, width, 3] frame of a PNG."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _index_colors(frame: np.ndarray) -> tuple[np.ndarray, list[tuple[int, ...]]] | None:
    """Palette index of each pixel, and the palette; None for more than 16 colors."""
    # A maze frame has about 25 distinct rows among 225; only rows that differ from the one above
    # are looked at, which makes this ten times cheaper.
    new_row = np.ones(len(frame), bool)
    new_row[1:] = (frame[1:] != frame[:-1]).any(axis=(1, 2))
    rows = frame[new_row].astype(np.uint32)
    packed = rows[..., 0] << 16 | rows[..., 1] << 8 | rows[..., 2]
    pixels = np.zeros(packed.shape, np.uint8)
    open_pixels = np.ones(packed.shape, bool)
    colors: list[tuple[int, ...]] = []
    while open_pixels.any():
        if len(colors) == 16:
            return None
        color = packed.flat[open_pixels.argmax()]
        same = packed == color
        pixels[same] = len(colors)
        open_pixels &= ~same
        colors.append((int(color) >> 16, int(color) >> 8 & 255, int(color) & 255))
    return pixels[np.cumsum(new_row) - 1], colors


def _archive(path: Path) -> Path:
    return path.with_suffix(".frames.zip")


def pack_ids(ids: Sequence[int]) -> list[int | list[int]]:
    """Ids with runs of four and more equal ones as `[id, count]`."""
    packed: list[int | list[int]] = []
    for token, run in groupby(ids):
        count = len(list(run))
        packed.extend([[int(token), count]] if count >= _SHORTEST_RUN else [int(token)] * count)
    return packed


def unpack_ids(packed: Sequence[int | list[int]]) -> tuple[int, ...]:
    """The inverse of `pack_ids`."""
    ids: list[int] = []
    for item in packed:
        ids.extend([item[0]] * item[1] if isinstance(item, list) else [item])
    return tuple(ids)


def _to_record(episode: Episode, decode: Decode | None) -> dict[str, Any]:
    record = {
        "format": _FORMAT,
        "env_id": episode.task.env_id,
        "seed": episode.task.seed,
        "index": episode.task.index,
        "member": episode.member,
        "policy_version": episode.policy_version,
        "engine": episode.engine,
        "outcome": str(episode.outcome),
        "success": episode.success,
        "reward": _number(episode.reward),
        "num_turns": len(episode.turns),
        "error": episode.error,
        "final_frame": episode.final_frame,
        "prefix_ids": pack_ids(episode.prefix_ids),
        "turns": [_turn_to_record(turn) for turn in episode.turns],
    }
    if decode is not None:
        first = episode.turns[0].observation_ids if episode.turns else ()
        ids = [*episode.prefix_ids, *first]
        # One id per image pad would be a page of the same word.
        record["prompt"] = decode([i[0] if isinstance(i, list) else i for i in pack_ids(ids)])
        sampled = sorted({int(token) for turn in episode.turns for token in turn.reply_ids})
        record["pieces"] = {str(token): decode([token]) for token in sampled}
    return record


def _turn_to_record(turn: Turn) -> dict[str, Any]:
    same = turn.opening_ids == turn.observation_ids
    return {
        "text": turn.text,
        "action": turn.action,
        "parse_error": turn.parse_error,
        "feedback": turn.feedback,
        "executed": turn.executed,
        "finish_reason": turn.finish_reason,
        "frames": list(turn.frames),
        "window_start": turn.window_start,
        "cached_tokens": turn.cached_tokens,
        "reply_ids": [int(token) for token in turn.reply_ids],
        "logprobs": [_number(logprob) for logprob in turn.logprobs],
        "closing_ids": [int(token) for token in turn.closing_ids],
        "observation_ids": pack_ids(turn.observation_ids),
        "opening_ids": None if same else pack_ids(turn.opening_ids),
    }


def _from_record(record: dict[str, Any], path: Path) -> Episode:
    if record.get("format") != _FORMAT:
        raise RunDirError(
            f"{path}: episodes of format {_FORMAT} were expected, found {record.get('format')}. "
            "Mend: use the version of Wayfinder that wrote them."
        )
    return Episode(
        task=Task(record["env_id"], record["seed"], record["index"]),
        member=record["member"],
        policy_version=record["policy_version"],
        engine=record["engine"],
        prefix_ids=unpack_ids(record["prefix_ids"]),
        turns=tuple(_turn_from_record(turn) for turn in record["turns"]),
        outcome=Outcome(record["outcome"]),
        reward=_nan_if_null(record["reward"]),
        final_frame=record["final_frame"],
        error=record["error"],
    )


def _turn_from_record(record: dict[str, Any]) -> Turn:
    observation = unpack_ids(record["observation_ids"])
    opening = record["opening_ids"]
    return Turn(
        window_start=record["window_start"],
        observation_ids=observation,
        opening_ids=observation if opening is None else unpack_ids(opening),
        frames=tuple(record["frames"]),
        reply_ids=tuple(record["reply_ids"]),
        logprobs=tuple(map(_nan_if_null, record["logprobs"])),
        closing_ids=tuple(record["closing_ids"]),
        finish_reason=record["finish_reason"],
        text=record["text"],
        action=record["action"],
        parse_error=record["parse_error"],
        feedback=record["feedback"],
        executed=record["executed"],
        cached_tokens=record["cached_tokens"],
    )


def _number(value: float) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def _nan_if_null(value: float | None) -> float:
    return math.nan if value is None else value

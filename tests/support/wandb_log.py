"""Reads the `.wandb` file of the real client, so that tests see what it wrote and not what it was
told. The file is a sequence of protobuf records in LevelDB's log format behind a 7-byte head.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_HEAD = b":W&B\xe1\xbe\x00"
_BLOCK = 32768
_CHUNK = struct.Struct("<IHB")  # CRC-32 of kind and data, length, kind
_WHOLE, _FIRST, _LAST = 1, 2, 4


def read_records(path: Path) -> list[Any]:
    """All whole records, oldest first."""
    data = path.read_bytes()
    assert data.startswith(_HEAD), data[:16]
    place, parts, records = len(_HEAD), b"", []
    while place + _CHUNK.size <= len(data):
        room = _BLOCK - place % _BLOCK
        if room < _CHUNK.size:
            place += room
            continue
        crc, length, kind = _CHUNK.unpack_from(data, place)
        chunk = data[place + _CHUNK.size : place + _CHUNK.size + length]
        if zlib.crc32(bytes([kind]) + chunk) != crc:
            break  # the client was cut off while it wrote
        place += _CHUNK.size + length
        parts = chunk if kind in (_WHOLE, _FIRST) else parts + chunk
        if kind in (_WHOLE, _LAST):
            records.append(wandb_internal_pb2.Record.FromString(parts))
    return records


def history(records: list[Any]) -> list[dict[str, Any]]:
    """The rows that were logged, nested keys joined by dots."""
    return [
        {_key(item): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def only(records: list[Any], kind: str) -> Any:
    """The first record of a kind."""
    return next(getattr(r, kind) for r in records if r.WhichOneof("record_type") == kind)


def all_of(records: list[Any], kind: str) -> list[Any]:
    """Every record of a kind."""
    return [getattr(r, kind) for r in records if r.WhichOneof("record_type") == kind]


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)

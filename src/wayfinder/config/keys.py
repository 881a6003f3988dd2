"""The dotted keys of the schema and what each takes, for messages about keys and types."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from wayfinder.config.schema import Config

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class Key:
    """One dotted key. `owner` is the dataclass that has it as its field `name`."""

    owner: type
    name: str
    type: Any

    @property
    def is_group(self) -> bool:
        return is_dataclass(self.type)

    @property
    def names(self) -> list[str]:
        """The values of an enumeration; empty for any other type."""
        return [item.name for item in self.type] if _is_enum(self.type) else []

    @property
    def expected(self) -> str:
        return _words(self.type)


@cache
def all_keys() -> dict[str, Key]:
    """Every dotted key, groups of keys included."""
    return dict(_keys(Config, ""))


def _keys(owner: type, prefix: str) -> Iterator[tuple[str, Key]]:
    hints = get_type_hints(owner)
    for field in fields(owner):
        key = Key(owner, field.name, hints[field.name])
        yield f"{prefix}{field.name}", key
        if key.is_group:
            yield from _keys(key.type, f"{prefix}{field.name}.")


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _words(kind: Any) -> str:
    if _is_enum(kind):
        return f"one of {', '.join(item.name for item in kind)}"
    if get_origin(kind) in (types.UnionType, Union):
        parts = [_words(part) for part in get_args(kind) if part is not type(None)]
        return " or ".join([*parts, "null"])
    if get_origin(kind) is list:
        return f"a list [...], each item {_words(get_args(kind)[0])}"
    if is_dataclass(kind):
        return "keys of its own"
    return _WORDS.get(kind, "a value")

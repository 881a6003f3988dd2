"""One broken rule of the configuration, and how a list of them reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong with one key. `mend` is an imperative sentence without its full stop."""

    key: str
    expected: str
    given: object
    mend: str

    def __str__(self) -> str:
        shown = "null" if self.given is None else str(self.given)
        stop = "" if self.mend.endswith("?") else "."
        return f"{self.key}={shown}: expected {self.expected}. {self.mend}{stop}"


def report(violations: Iterable[Violation]) -> str:
    """The message that lists every violation."""
    lines = [str(violation) for violation in violations]
    title = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n  - ".join([f"The configuration cannot run, {title}:", *lines])


def closest(name: object, names: Sequence[str], otherwise: str) -> str:
    """A mend for a name that does not exist: the name that was probably meant, or `otherwise`."""
    found = get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f"Did you mean {found[0]}?" if found else otherwise

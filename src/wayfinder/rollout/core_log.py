"""Why vLLM's core process did not come up, or died. vLLM tells only in what that process prints,
which Ray keeps in a file of the worker."""

from __future__ import annotations

import os
import re
from pathlib import Path

from wayfinder.errors import ClusterError, WorkerLostError

_FAILED_TO_START = "EngineCore failed to start"
_FAILED_LATER = "EngineCore encountered a fatal error"
# The processes that asked the dead one tell of it too, by EngineDeadError.
_LAST_LINE = re.compile(r"(?:^|\s)((?:\w+\.)*(?!EngineDeadError)\w*(?:Error|Exception): .*)$")
_STDOUT, _STDERR = 1, 2


class Printed:
    """What this process and its children print from now on, where that goes to files."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        for number in (_STDOUT, _STDERR):
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
            if path.is_file():
                self._files[path] = path.stat().st_size

    @property
    def path(self) -> Path | None:
        return next(iter(self._files), None)

    def text(self) -> str:
        parts = []
        for path, begin in self._files.items():
            with path.open("rb") as file:
                file.seek(begin)
                parts.append(file.read().decode(errors="replace"))
        return "\n".join(parts)


def core_failure(text: str, log: Path | None) -> ClusterError:
    """The error for a core process that printed `text` and did not come up: WorkerLostError when it
    died without a word, as a killed one does, else what it says, which would come again."""
    reason = _reason(text, _FAILED_TO_START)
    if reason is None:
        return WorkerLostError("an engine's core process died while it started")
    return ClusterError(f"an engine cannot start: {reason} (all of it: {log})")


def core_death(text: str, log: Path | None) -> WorkerLostError:
    """The error for a core process that served, printed `text` and died."""
    reason = _reason(text, _FAILED_LATER)
    told = "" if reason is None else f": {reason} (all of it: {log})"
    return WorkerLostError(f"the engine's core process died{told}")


def _reason(text: str, own_words: str) -> str | None:
    """The last error that is told after `own_words`; None where they do not stand."""
    if own_words not in text:
        return None
    told = text[text.find(own_words) :]
    reasons = [match[1] for line in told.splitlines() if (match := _LAST_LINE.search(line))]
    return reasons[-1] if reasons else "it does not say why"

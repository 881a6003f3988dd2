"""A run as one HTML page: curves, every maze of every evaluation, every episode turn by turn.

`page.html` needs no network and no other file, so it can be mailed. What a model wrote is data in
it, never markup: it travels as JSON in which `<` is escaped, and the script puts it into the page
as text. A content security policy lets the browser run this script and no other.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from wayfinder.errors import RunDirError
from wayfinder.record.atomic import atomic_write_bytes, strict_json
from wayfinder.record.page_data import collect

PAGE_FILE = "page.html"

_TEMPLATES = "templates"
_SCRIPTS = ("charts.js", "evaluations.js", "replay.js", "page.js")


def write_page(run_path: Path) -> Path:
    """Write `page.html` into a run directory, from its files alone; return its path.

    Partial, failed and older runs give a page that says what is missing. Raises `RunDirError` when
    there is no such directory or the page cannot be written.
    """
    if not run_path.is_dir():
        raise RunDirError(
            f"{run_path}: a run directory was expected, found none. Mend: give the directory that "
            "holds the run's metrics.jsonl."
        )
    path = run_path / PAGE_FILE
    atomic_write_bytes(path, render_page(collect(run_path)).encode(errors="replace"))
    return path


def render_page(data: dict[str, Any]) -> str:
    """The page for `page_data.collect`'s data."""
    script = "".join(_template(name) for name in _SCRIPTS)
    style = _template("page.css")
    policy = (
        "default-src 'none'",
        "img-src data:",
        f"script-src {_digest(script)}",
        f"style-src {_digest(style)}",
        "base-uri 'none'",
        "form-action 'none'",
    )
    parts = {
        "policy": "; ".join(policy),
        "title": html.escape(data["title"]),
        "style": style,
        "data": _script_json(data),
        "script": script,
    }
    # In one pass, so that no text of a run is taken for a place of the template.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _template("page.html"))


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, in ASCII."""
    return strict_json(value).replace("<", "\\u003c").replace("&", "\\u0026")


def _digest(text: str) -> str:
    """A source expression of the policy: this inline text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _template(name: str) -> str:
    return (files("wayfinder.record") / _TEMPLATES / name).read_text(encoding="utf-8")

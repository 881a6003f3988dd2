"""What several files of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.jobs import run


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Where runs lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def calm(root) -> Path:
    """The directory of a run of SMALL that nothing disturbed."""
    run(root, "calm")
    return root / "calm"

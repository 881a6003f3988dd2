"""`task=report`: what run directories say, as tables, figures, pages and comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from wayfinder.config.places import reported_directory
from wayfinder.config.schema import Config
from wayfinder.errors import RunDirError
from wayfinder.record.atomic import atomic_write_bytes
from wayfinder.record.compare import compare, comparison_text, find_evaluation
from wayfinder.record.page import write_page
from wayfinder.record.results import REPORT_DIR, write_results
from wayfinder.record.runs import RunRecord, read_runs

COMPARISON_FILE = "compare.md"


def report(config: Config, overrides: list[str], began: float) -> float:
    """Report the runs at or below `root`; NaN, because a report has no solve rate.

    Raises `RunDirError` when there are none, or when what `report.compare` names is not there.
    """
    root = reported_directory(config)
    for run in report_runs(root):
        print(f"wrote {write_page(run.path)}")
    if config.report.compare:
        report_comparison(root, config.report.compare)
    return math.nan


def report_runs(root: Path) -> list[RunRecord]:
    """Write tables and figures of all runs at or below `root`, and say what was left out."""
    runs, left_out = read_runs(root)
    for item in left_out:
        print(f"left out {item.name}: {item.reason}")
    if not runs:
        raise RunDirError(
            f"{root}: run directories were expected at or below it, found none"
            f"{' that can be read' if left_out else ''}. Mend: set root=<directory with runs>."
        )
    for run in runs:
        for note in run.notes:
            print(f"note {run.name}: {note}")
    for path in write_results(runs, left_out, _directory(root)):
        print(f"wrote {path}")
    return runs


def report_comparison(root: Path, compared: Sequence[str]) -> None:
    """Compare the two evaluations that `report.compare` names."""
    first, second = (find_evaluation(text, root) for text in compared)
    text = comparison_text(compare(first, second), root)
    atomic_write_bytes(_directory(root) / COMPARISON_FILE, text.encode())
    print(text, end="")
    print(f"wrote {_directory(root) / COMPARISON_FILE}")


def _directory(root: Path) -> Path:
    directory = root / REPORT_DIR
    directory.mkdir(exist_ok=True)
    return directory

"""`task=report`: what run directories say, as tables, figures, pages and comparisons."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from pathlib import Path

from wayfinder.config.places import reported_directory
from wayfinder.config.schema import Config
from wayfinder.errors import RunDirError, WayfinderError
from wayfinder.record.atomic import atomic_write_bytes, write_error
from wayfinder.record.compare import compare, comparison_text, find_evaluation
from wayfinder.record.page import write_page
from wayfinder.record.results import REPORT_DIR, write_results
from wayfinder.record.runs import RunRecord, read_runs
from wayfinder.record.table import remarks, studies

COMPARISON_FILE = "compare.md"


def report(config: Config, overrides: list[str], began: float) -> float:
    """Report the runs at or below `root`; NaN, because a report has no solve rate.

    Raises `RunDirError` when there are none, when what `report.compare` names is not there, or,
    after all else, when the page of a run could not be written.
    """
    root = reported_directory(config)
    problems = []
    for run in report_runs(root):
        try:
            print(f"wrote {write_page(run.path)}")
        except Exception as problem:
            if not isinstance(problem, WayfinderError | OSError):  # a bug, or odd files
                traceback.print_exc()
            problems.append(f"no page of {run.name}: {type(problem).__name__}: {problem}")
            print(problems[-1])
    if config.report.compare:
        report_comparison(root, config.report.compare)
    if problems:
        raise RunDirError("\n".join(problems))
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
    for study in studies(runs):
        for remark in remarks(study):
            print(f"note {study.title}: {remark}")
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
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise write_error(directory, error) from error
    return directory

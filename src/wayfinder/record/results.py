"""`results.parquet`, `results.csv`, `results.md` and the figures they mention.

They hold no time and no path of this machine: the same runs give the same files.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from wayfinder.record import figures
from wayfinder.record.atomic import atomic_write_bytes
from wayfinder.record.runs import LeftOut, RunRecord
from wayfinder.record.table import (
    Study,
    markdown,
    over_seeds,
    remarks,
    results,
    show,
    studies,
)

REPORT_DIR = "report"
"""Below the directory whose runs are reported."""

_READING = """\
Solve rates are those on the fixed evaluation mazes, with the 95% interval over mazes in the files
`results.csv` and `results.parquet`. `to 90%` is the step of the first evaluation at 90% or more.
`tokens` are those that training episodes sampled. `mismatch` is the greatest difference of a
log-probability between engine and trainer. A star marks a commit with changes that were not
committed. Means are over finished runs."""


def write_results(
    runs: Sequence[RunRecord], left_out: Sequence[LeftOut], directory: Path
) -> list[Path]:
    """Write the tables and figures of `runs` into `directory`; returns the files."""
    table = results(runs)
    parquet = io.BytesIO()
    table.to_parquet(parquet, index=False)
    files = {
        "results.parquet": parquet.getvalue(),
        "results.csv": table.to_csv(index=False).encode(),
    }
    sections = []
    for study in studies(runs):
        drawn = _draw(study)
        files |= drawn
        sections.append(_study_section(study, list(drawn)))
    text = "\n".join(
        [
            f"# {len(runs)} run{'s' if len(runs) > 1 else ''}\n",
            *sections,
            "## All runs\n",
            markdown(_runs_for_people(table), _RUN_FORMS),
            f"{_READING}\n",
            *_remarks(runs, left_out),
        ]
    )
    files["results.md"] = text.encode()
    for name, data in files.items():
        atomic_write_bytes(directory / name, data)
    return [directory / name for name in files]


def _draw(study: Study) -> dict[str, bytes]:
    pictures = {
        f"{study.slug}.curves.png": figures.learning_curves(study),
        f"{study.slug}.heat.png": figures.heat_maps(study),
        f"{study.slug}.keys.png": figures.against_keys(study),
        f"{study.slug}.cost.png": figures.cost(study),
    }
    return {name: data for name, data in pictures.items() if data is not None}


def _study_section(study: Study, pictures: list[str]) -> str:
    table = over_seeds(study)
    shown = table[[*study.varied, "runs", "others", "first", "last"]].copy()
    shown["sd"] = table["last_sd"]
    shown["least"], shown["greatest"] = table["last_least"], table["last_greatest"]
    shown["to 90%"] = table["steps_to_90"]
    shown["reached"] = table["reached_90"]
    shown["minutes"] = table["wall_s"] / 60
    shown["tokens"] = table["sampled_tokens"]
    rates = ("first", "last", "sd", "least", "greatest")
    forms = dict.fromkeys(rates, ".3f") | {"to 90%": ".1f", "minutes": ".1f", "tokens": ",.0f"}
    said = "".join(f"- {_line(remark)}\n" for remark in remarks(study))
    images = "".join(f"![{name}]({name})\n\n" for name in pictures)
    parts = (f"## {_line(study.title)}\n", markdown(shown, forms), said, images)
    return "\n".join(filter(None, parts))


def _line(text: str) -> str:
    return " ".join(text.split())


def _runs_for_people(table: pd.DataFrame) -> pd.DataFrame:
    shown = table[["name", "status"]].copy()
    for name in ("first", "best", "last"):
        shown[name] = table[f"solve_rate_{name}"]
    shown["95% of last"] = [
        f"{low:.3f} - {high:.3f}" if low == low else ""
        for low, high in zip(
            table["solve_rate_last_low"], table["solve_rate_last_high"], strict=True
        )
    ]
    shown["greedy"], shown["unseen"] = table["greedy_solve_rate"], table["unseen_solve_rate"]
    shown["steps"], shown["to 90%"] = table["steps_done"], table["steps_to_90"]
    shown["minutes"] = table["wall_s"] / 60
    shown["tokens"] = table["sampled_tokens"]
    shown["GiB"] = table["peak_memory_bytes"] / 2**30
    shown["mismatch"] = table["mismatch_max"]
    shown["commit"] = [
        show(commit)[:8] + "*" * dirty
        for commit, dirty in zip(table["commit"], table["dirty"], strict=True)
    ]
    shown["config"] = [show(digest)[:8] for digest in table["config_hash"]]
    return shown


_RUN_FORMS = {
    **dict.fromkeys(("first", "best", "last", "greedy", "unseen"), ".3f"),
    "minutes": ".1f",
    "tokens": ",.0f",
    "GiB": ".1f",
    "mismatch": ".1e",
}


def _remarks(runs: Sequence[RunRecord], left_out: Sequence[LeftOut]) -> list[str]:
    """What a reader must know about single runs."""
    lines = []
    if left_out:
        lines += ["## Left out\n", *(f"- {item.name}: {item.reason}" for item in left_out), ""]
    notes = [f"- {run.name}: {note}" for run in runs for note in run.notes]
    notes += [
        f"- {run.name}: {run.status}: {' '.join(str(run.summary['error']).split())[:300]}"
        for run in runs
        if run.summary.get("error")
    ]
    if notes:
        lines += ["## Remarks\n", *notes, ""]
    return lines

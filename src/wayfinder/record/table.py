"""Runs as tables: one row a run, and one row a configuration over its seeds."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from wayfinder.config.identity import determining
from wayfinder.record.runs import FINISHED, RunRecord, as_number
from wayfinder.record.summary import SOLVE_RATE
from wayfinder.statistics import wilson_interval

GOAL = 0.9
"""The solve rate of the column `steps_to_90`."""

_MOST_KEYS = 5
_FIRST = ("name", "experiment", "task", "status", "seed")
_TEXT = (*_FIRST[:4], "commit", "config_hash", "overrides", "error")
_WHOLE = (
    "seed",
    "attempts",
    "steps_done",
    "solve_rate_best_step",
    "steps_to_90",
    "sampled_tokens",
    "peak_memory_bytes",
)


@dataclass(frozen=True)
class Study:
    """Runs of one experiment whose commands name the same keys: one sweep, or one run a seed."""

    experiment: str
    keys: tuple[str, ...]  # named by the commands
    varied: tuple[str, ...]  # those of `keys` that take more than one value
    configurations: dict[tuple[Any, ...], list[RunRecord]]  # values of `varied` -> its runs

    @property
    def title(self) -> str:
        return ": ".join(filter(None, (self.experiment, ", ".join(self.keys))))

    @property
    def slug(self) -> str:
        """A file name that no other study has."""
        parts = (self.experiment, *self.keys)
        exact = "+".join(parts) or "runs"
        is_plain = all(re.fullmatch(r"[A-Za-z0-9._-]+", part) for part in parts if part)
        if is_plain and len(exact) <= 80:
            return exact
        text = re.sub(r"[^A-Za-z0-9._+-]+", "-", exact)
        return f"{text[:60]}.{hashlib.sha256(exact.encode()).hexdigest()[:12]}"

    def label(self, values: tuple[Any, ...]) -> str:
        """How one configuration is called in a figure."""
        pairs = zip(short_names(self.varied), values, strict=True)
        return ", ".join(f"{name}={show(value)}" for name, value in pairs) or self.experiment


def studies(runs: Sequence[RunRecord]) -> list[Study]:
    """The runs by experiment and by the keys that their commands name."""
    together: dict[tuple[str, tuple[str, ...]], list[RunRecord]] = {}
    for run in runs:
        together.setdefault((run.experiment, tuple(sorted(run.changed))), []).append(run)
    return [_study(*names, members) for names, members in sorted(together.items())]


def results(runs: Sequence[RunRecord]) -> pd.DataFrame:
    """One row a run; the keys that commands name are columns by their dotted names.

    Rates are shares of the evaluation set, `wall_s` is in seconds over all attempts,
    `sampled_tokens` counts the tokens of training episodes. What a run does not say is missing.
    """
    keys = sorted({key for run in runs for key in run.changed} - set(_FIRST))
    frame = pd.DataFrame([_row(run, keys) for run in runs])
    for name in frame:
        if name in keys:
            frame[name] = _one_type(frame[name])
        elif name in _TEXT:
            frame[name] = frame[name].map(show, na_action="ignore")
        elif name in _WHOLE:
            frame[name] = pd.array([_whole(value) for value in frame[name]], dtype="Int64")
        elif name != "dirty":
            frame[name] = frame[name].astype("float64")
    return frame


def over_seeds(study: Study) -> pd.DataFrame:
    """One row a configuration: means over its finished runs, with the least and the greatest rate.

    `runs` counts the finished runs that have an evaluation, `others` those that were left out.
    """
    rows = []
    for values, members in study.configurations.items():
        counted = finished(members)
        table = results(counted) if counted else pd.DataFrame()
        row: dict[str, Any] = dict(zip(study.varied, values, strict=True))
        row |= {"runs": len(counted), "others": len(members) - len(counted)}
        for name, column, summarise in (
            ("first", "solve_rate_first", "mean"),
            ("last", "solve_rate_last", "mean"),
            ("last_sd", "solve_rate_last", "std"),
            ("last_least", "solve_rate_last", "min"),
            ("last_greatest", "solve_rate_last", "max"),
            ("steps_to_90", "steps_to_90", "mean"),
            ("reached_90", "steps_to_90", "count"),
            ("wall_s", "wall_s", "mean"),
            ("sampled_tokens", "sampled_tokens", "mean"),
            ("peak_memory_bytes", "peak_memory_bytes", "max"),
            ("mismatch_max", "mismatch_max", "max"),
        ):
            known = table[column].dropna() if column in table else pd.Series(dtype=float)
            value = known.agg(summarise) if len(known) else math.nan
            row[name] = len(known) if summarise == "count" else value
        rows.append(row)
    return pd.DataFrame(rows)


def finished(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Those whose last rate is that of their end."""
    return [run for run in runs if run.status == FINISHED and run.series(SOLVE_RATE)]


def remarks(study: Study) -> list[str]:
    """What makes the means of a study less than they seem."""
    found = []
    for values, members in study.configurations.items():
        label, counted = study.label(values), finished(members)
        if blind := sum(run.status == FINISHED for run in members) - len(counted):
            found.append(f"{label}: {blind} finished without an evaluation, and not in the means")
        seeds = Counter(show(run.value("seed")) for run in counted)
        for seed, times in sorted(seeds.items()):
            if times > 1:
                found.append(f"{label}: seed {seed} is {times} times in the means")
        if unequal := _unequal_keys(counted):
            keys = ", ".join(unequal[:_MOST_KEYS]) + ", ..." * (len(unequal) > _MOST_KEYS)
            found.append(f"{label}: the runs in one mean differ in {keys}")
    return found


def _unequal_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Keys, other than the seed, in which runs that count as repetitions are not the same. A key
    that an older run does not have is no difference."""
    values: dict[str, set[str]] = {}
    for run in runs:
        try:
            determines = determining(run.config)
        except (KeyError, ValueError):  # of a task that this version does not know
            continue
        for key, value in determines.items():
            values.setdefault(key, set()).add(json.dumps(value))
    return sorted(key for key, found in values.items() if len(found) > 1 and key != "seed")


def rate_with_interval(line: Mapping[str, Any], kind: str = "eval") -> tuple[float, float, float]:
    """Solve rate of an evaluation and its 95% interval: the bootstrap over tasks where the run
    recorded it, else that of so many independent episodes. NaN where nothing is known."""
    rate = as_number(line.get(f"{kind}/solve_rate"))
    if rate is None:
        return math.nan, math.nan, math.nan
    low, high = (as_number(line.get(f"{kind}/solve_rate_{end}")) for end in ("low", "high"))
    if low is None or high is None:
        episodes = as_number(line.get(f"{kind}/num_episodes"))
        low, high = wilson_interval(rate * episodes, episodes) if episodes else (math.nan, math.nan)
    return rate, low, high


def in_order(settings: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Settings of keys, sorted: numbers by size and before names."""

    def place(values: tuple[Any, ...]) -> list[tuple[bool, float, str]]:
        numbers = [as_number(value) for value in values]
        return [
            (number is None, number or 0.0, "" if number is not None else str(value))
            for number, value in zip(numbers, values, strict=True)
        ]

    return sorted(settings, key=place)


def short_names(keys: Sequence[str]) -> list[str]:
    """The last parts of dotted keys, or the keys themselves where that would be ambiguous."""
    last = [key.rpartition(".")[2] for key in keys]
    return last if len(set(last)) == len(last) else list(keys)


def show(value: Any, form: str = "") -> str:
    """A value for people; a missing one is empty."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if form:
        return format(value, form)
    return f"{value:g}" if isinstance(value, float) else str(value)


def markdown(frame: pd.DataFrame, forms: Mapping[str, str]) -> str:
    """A table in Markdown. `forms`: format specifications of columns."""
    shown = [[show(value, forms.get(name, "")) for value in frame[name]] for name in frame]
    rows = [[*frame.columns], ["---"] * len(frame.columns), *zip(*shown, strict=True)]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows) + "\n"


def _study(experiment: str, keys: tuple[str, ...], runs: list[RunRecord]) -> Study:
    varied = tuple(key for key in keys if len({show(run.value(key)) for run in runs}) > 1)
    together: dict[tuple[Any, ...], list[RunRecord]] = {}
    for run in runs:
        together.setdefault(tuple(run.value(key) for key in varied), []).append(run)
    configurations = {values: together[values] for values in in_order(together)}
    return Study(experiment, keys, varied, configurations)


def _row(run: RunRecord, keys: Sequence[str]) -> dict[str, Any]:
    evaluated = [line for line in run.lines if as_number(line.get(SOLVE_RATE)) is not None]
    rates = {line["step"]: rate_with_interval(line) for line in evaluated}
    best = max(rates, key=lambda step: rates[step][0], default=None)
    unknown = (math.nan, math.nan, math.nan)
    first, last = (rates[evaluated[i]["step"]] if evaluated else unknown for i in (0, -1))
    final = {kind: _last_rate(run, kind) for kind in ("greedy", "unseen")}
    summary = run.summary
    return {
        "name": run.name,
        "experiment": run.experiment,
        "task": run.value("task"),
        "status": run.status,
        "seed": as_number(run.value("seed")),
        **{key: run.value(key) for key in keys},
        "solve_rate_first": first[0],
        "solve_rate_first_low": first[1],
        "solve_rate_first_high": first[2],
        "solve_rate_best": rates[best][0] if best is not None else math.nan,
        "solve_rate_best_low": rates[best][1] if best is not None else math.nan,
        "solve_rate_best_high": rates[best][2] if best is not None else math.nan,
        "solve_rate_best_step": best,
        "solve_rate_last": last[0],
        "solve_rate_last_low": last[1],
        "solve_rate_last_high": last[2],
        "ceiling": as_number(evaluated[-1].get("eval/ceiling")) if evaluated else None,
        "greedy_solve_rate": final["greedy"],
        "unseen_solve_rate": final["unseen"],
        "steps_done": max((line["step"] for line in run.lines), default=None),
        "steps_to_90": next((step for step, rate in rates.items() if rate[0] >= GOAL), None),
        "wall_s": run.wall_s,
        "sampled_tokens": _sampled_tokens(run),
        "peak_memory_bytes": as_number(summary.get("peak_memory_bytes")),
        "mismatch_max": max(
            (value for _, value in run.series("mismatch/abs_logprob_diff_max")), default=None
        ),
        "attempts": run.attempts,
        "created": as_number(run.stored.get("created")),
        "commit": run.stored.get("commit"),
        "dirty": run.stored.get("dirty") is True,
        "config_hash": run.stored.get("config_hash"),
        "overrides": " ".join(run.overrides),
        "error": summary.get("error"),
    }


def _last_rate(run: RunRecord, kind: str) -> float:
    return max(run.series(f"{kind}/solve_rate"), default=(0, math.nan))[1]


def _sampled_tokens(run: RunRecord) -> float | None:
    """Tokens that training episodes sampled: the rate of each step times its seconds."""
    rates = dict(run.series("throughput/sampled_tokens_per_s"))
    seconds = dict(run.series("time/rollout_s"))
    counts = [rates[step] * seconds[step] for step in rates.keys() & seconds.keys()]
    return round(sum(counts)) if counts else None


def _whole(value: Any) -> int | None:
    number = as_number(value)
    return (
        int(number) if number is not None and number.is_integer() and abs(number) < 2**63 else None
    )


def _one_type(column: pd.Series) -> pd.Series:
    """Numbers, or else text: a file format wants one type a column."""
    known = column.dropna()
    if all(as_number(value) is not None for value in known):
        return pd.to_numeric(column)
    return column.map(show, na_action="ignore")


def _cell(text: Any) -> str:
    return " ".join(str(text).replace("|", "\\|").split())

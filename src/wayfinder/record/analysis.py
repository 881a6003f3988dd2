"""One run as tables: what the notebooks show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from wayfinder.record.episodes import read_episodes, stored_evaluations
from wayfinder.record.runs import RunRecord
from wayfinder.record.table import SOLVE_RATE, rate_with_interval
from wayfinder.types import Episode, Outcome, Task

_MODES = {
    "solved": "num_solved",
    "stopped elsewhere": "wrong_stops",
    "turn limit": "timeouts",
    "system failed": "failed_episodes",
}
_PHASES = ("start", "rollout", "update", "sync", "eval", "greedy", "unseen", "save")


def metrics_frame(run: RunRecord, names: Sequence[str]) -> pd.DataFrame:
    """Metrics by step; what the run did not record is missing."""
    columns = {name: pd.Series(dict(run.series(name)), dtype=float) for name in names}
    return pd.DataFrame(columns).rename_axis("step")


def evaluation_rates(run: RunRecord) -> pd.DataFrame:
    """`rate` of each evaluation on the fixed set, and `low` and `high` of its 95% interval."""
    lines = (line for line in run.lines if line.get(SOLVE_RATE) is not None)
    rows = {line["step"]: rate_with_interval(line) for line in lines}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=["rate", "low", "high"])
    return frame.astype(float).rename_axis("step")


def failure_modes(run: RunRecord, kind: str = "eval") -> pd.DataFrame:
    """How the episodes of each evaluation ended: counts, one row an evaluation.

    `other` are the limits of context and reply and, where those end an episode, unreadable replies.
    """
    counts = {name: dict(run.series(f"{kind}/{metric}")) for name, metric in _MODES.items()}
    episodes = dict(run.series(f"{kind}/num_episodes"))
    frame = pd.DataFrame(counts, index=sorted(episodes)).fillna(0).astype(int)
    frame["other"] = pd.Series(episodes).astype(int) - frame.sum(axis=1)
    return frame.rename_axis("step")


def evaluations_by_path_length(
    run: RunRecord, shortest: Callable[[Task], int | None], kind: str = "eval"
) -> pd.DataFrame:
    """`outcomes_by_path_length` of the first and the last evaluation of which episodes are stored,
    by (step, shortest path); no rows where there are none."""
    stored = [(step, path) for name, step, path in stored_evaluations(run.path) if name == kind]
    tables = {
        step: outcomes_by_path_length(read_episodes(path), shortest)
        for step, path in {*stored[:1], *stored[-1:]}
    }
    if not tables:
        return pd.DataFrame(columns=["solve_rate"])
    return pd.concat(tables, names=["step"]).sort_index().fillna(0)


def outcomes_by_path_length(
    episodes: Iterable[Episode], shortest: Callable[[Task], int | None]
) -> pd.DataFrame:
    """How episodes ended by the moves of the shortest path, with the solve rate of each length.

    `shortest`: `envs.tasks.optimal_moves`, or another that knows the tasks.
    """
    pairs = [(shortest(episode.task), str(episode.outcome)) for episode in episodes]
    frame = pd.DataFrame(pairs, columns=["shortest path", "outcome"])
    counts = pd.crosstab(frame["shortest path"], frame["outcome"])
    known = [str(outcome) for outcome in Outcome if str(outcome) in counts]
    solved = counts.get(str(Outcome.SOLVED), 0)
    return counts[known].assign(solve_rate=solved / counts.sum(axis=1))


def time_budget(run: RunRecord) -> pd.DataFrame:
    """Seconds of each phase over the whole run and their share of the wall time; `other` is what no
    phase accounts for (imports, Ray, records)."""
    seconds = {phase: sum(value for _, value in run.series(f"time/{phase}_s")) for phase in _PHASES}
    wall = run.wall_s or 0.0
    seconds["other"] = max(0.0, wall - sum(seconds.values()))
    frame = pd.DataFrame({"seconds": seconds})
    return frame[frame["seconds"] > 0].assign(share=lambda f: f["seconds"] / f["seconds"].sum())

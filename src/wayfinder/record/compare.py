"""Two evaluations maze by maze: what changed, and whether the difference is more than luck."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wayfinder.config.identity import determining_diff
from wayfinder.errors import RunDirError
from wayfinder.record.episodes import episodes_path, latest_episodes, read_episodes
from wayfinder.record.layout import CHECKPOINTS_DIR, EPISODES_DIR
from wayfinder.record.runs import RunRecord, read_run
from wayfinder.statistics import interval_of_mean, paired_difference
from wayfinder.types import Episode

Maze = tuple[str, int]
"""Environment id and seed."""

_KEY = "report.compare"
_AT_STEP = re.compile(r"(.+)@(\d+)")
_CHECKPOINT = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Change:
    """One maze with another share of solved episodes: outcomes of its episodes before and after."""

    maze: Maze
    first: tuple[str, ...]
    second: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`second` against `first` on the mazes that both have. Rates are (rate, low, high) with the
    95% interval over mazes, `difference` is of second - first, paired by maze."""

    first: Path  # episodes files
    second: Path
    mazes: int
    only_first: int
    only_second: int
    rate_first: tuple[float, float, float]
    rate_second: tuple[float, float, float]
    difference: tuple[float, float, float]
    gained: tuple[Change, ...]
    lost: tuple[Change, ...]

    @property
    def is_significant(self) -> bool:
        """Whether the interval of the difference leaves out 0."""
        _, low, high = self.difference
        return low > 0 or high < 0


def find_evaluation(text: str, root: Path) -> Path:
    """The episodes file that an item of `report.compare` names: a run directory (its last
    evaluation), `<run>@<step>`, a checkpoint directory of a run, or the file itself; relative to
    the working directory or to `root`. Raises `RunDirError` when there is none.
    """
    place, step = text, None
    if match := _AT_STEP.fullmatch(text):
        place, step = match[1], int(match[2])
    path = next((p for p in (Path(place).expanduser(), root / place) if p.exists()), None)
    if path is None:
        raise RunDirError(
            f"{_KEY}: {place} was expected to be a run directory, a checkpoint of one or an "
            f"episodes file, found nothing there or in {root}. Mend: give its path."
        )
    if path.is_file():
        return path
    if path.parent.name == CHECKPOINTS_DIR and (match := _CHECKPOINT.fullmatch(path.name)):
        path, step = path.parent.parent, int(match[1])
    found = latest_episodes(path) if step is None else episodes_path(path, "eval", step)
    if found is None or not found.exists():
        there = ", ".join(
            str(int(file.stem.rpartition("_")[2]))
            for file in sorted((path / EPISODES_DIR).glob("eval_step_??????.jsonl"))
        )
        wanted = "an evaluation" if step is None else f"an evaluation at step {step}"
        raise RunDirError(
            f"{_KEY}: {wanted} was expected in {path / EPISODES_DIR}, found "
            f"{f'those of the steps {there}' if there else 'none'}. Mend: name another run"
            f"{' or step' if there else ''}."
        )
    return found


def compare(first: Path, second: Path) -> Comparison:
    """Compare two episodes files. Raises `RunDirError` when one cannot be read, or when they share
    no maze."""
    ours, theirs = _by_maze(first), _by_maze(second)
    mazes = sorted(ours.keys() & theirs.keys())
    if not mazes:
        raise RunDirError(
            f"{_KEY}: evaluations on the same mazes were expected, found none that {first} and "
            f"{second} share. Mend: compare evaluations with the same env.id and eval.first_seed."
        )
    before, after = ([_rate(episodes[maze]) for maze in mazes] for episodes in (ours, theirs))
    changes = [
        (after_rate - before_rate, Change(maze, _outcomes(ours[maze]), _outcomes(theirs[maze])))
        for maze, before_rate, after_rate in zip(mazes, before, after, strict=True)
    ]
    return Comparison(
        first=first,
        second=second,
        mazes=len(mazes),
        only_first=len(ours) - len(mazes),
        only_second=len(theirs) - len(mazes),
        rate_first=(_mean(before), *interval_of_mean(before)),
        rate_second=(_mean(after), *interval_of_mean(after)),
        difference=paired_difference(before, after),
        gained=tuple(change for size, change in changes if size > 0),
        lost=tuple(change for size, change in changes if size < 0),
    )


def comparison_text(comparison: Comparison, root: Path) -> str:
    """What a comparison says, in Markdown that reads well on a terminal too."""
    one, two = (_label(path, root) for path in (comparison.first, comparison.second))
    mean, low, high = comparison.difference
    verdict = "" if comparison.is_significant else "; 0 lies inside, so no difference is shown"
    lines = [
        f"# {two} against {one}",
        "",
        f"Mazes in both: {comparison.mazes}"
        + _left_out(comparison.only_first, one)
        + _left_out(comparison.only_second, two),
        "",
        "| evaluation | solve rate | 95% interval |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {rate:.3f} | {lower:.3f} - {upper:.3f} |"
            for name, (rate, lower, upper) in (
                (one, comparison.rate_first),
                (two, comparison.rate_second),
            )
        ),
        "",
        f"Difference, paired by maze: {mean:+.3f} (95% interval {low:+.3f} to {high:+.3f}"
        f"{verdict}).",
        "",
        *_changes("Better", comparison.gained),
        *_changes("Worse", comparison.lost),
        *_settings(comparison),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _by_maze(path: Path) -> dict[Maze, list[Episode]]:
    try:
        episodes = read_episodes(path)
    except RunDirError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirError(
            f"{path}: the episodes of an evaluation were expected, found: {error!r}. "
            "Mend: name another run, step or file."
        ) from error
    by_maze: dict[Maze, list[Episode]] = {}
    for episode in episodes:
        by_maze.setdefault((episode.task.env_id, episode.task.seed), []).append(episode)
    return by_maze


def _rate(episodes: Sequence[Episode]) -> float:
    return sum(episode.success for episode in episodes) / len(episodes)


def _outcomes(episodes: Sequence[Episode]) -> tuple[str, ...]:
    return tuple(str(episode.outcome) for episode in episodes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _label(path: Path, root: Path) -> str:
    """`<run>@<step>` of an episodes file of a run, with the kind of evaluation if it is another."""
    kind, _, step = path.stem.partition("_step_")
    run = path.parent.parent
    shown = run.relative_to(root).as_posix() if run.is_relative_to(root) else run.name
    if path.parent.name != EPISODES_DIR or not step.isdecimal():
        return path.name
    return f"{shown}@{int(step)}" + ("" if kind == "eval" else f" ({kind})")


def _left_out(count: int, label: str) -> str:
    return f"; {count} more of {label} are left out" if count else ""


def _changes(title: str, changes: Sequence[Change]) -> list[str]:
    if not changes:
        return [f"{title}: none", ""]
    return [
        f"{title} ({len(changes)}):",
        *(
            f"- {change.maze[0]} seed {change.maze[1]}: {', '.join(change.first)} -> "
            f"{', '.join(change.second)}"
            for change in changes
        ),
        "",
    ]


def _settings(comparison: Comparison) -> list[str]:
    """The keys that make the two runs different ones, as far as both have a record."""
    runs = [read_run(path.parent.parent) for path in (comparison.first, comparison.second)]
    if not all(isinstance(run, RunRecord) for run in runs):
        return []
    try:
        differ = determining_diff(*(run.config for run in runs))
    except (KeyError, ValueError):  # a record without a task that this version knows
        return []
    return ["Settings that differ:", *(f"- {line}" for line in differ)] if differ else []

"""What a person sees while a run goes on: stable lines, and on a terminal a live bar below them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

PASS_AT_1 = "/all/pass_at_1"

_STEP_FIELDS = (
    ("solve", "train/solve_rate", "{:.2f}"),
    ("reward", "train/reward_mean", "{:.2f}"),
    ("kl", "train/kl", "{:.4f}"),
    ("entropy", "train/entropy", "{:.3f}"),
    ("clip", "train/clip_frac", "{:.3f}"),
    ("all_solved", "train/groups_all_solved", "{:g}"),
    ("none_solved", "train/groups_none_solved", "{:g}"),
    ("mismatch_max", "mismatch/abs_logprob_diff_max", "{:.1e}"),
    ("rollout", "time/rollout_s", "{:.1f}s"),
    ("update", "time/update_s", "{:.1f}s"),
    ("sync", "time/sync_s", "{:.1f}s"),
)
_EVAL_FIELDS = (
    ("ceiling", "ceiling", "{:.3f}"),
    ("turns", "mean_turns", "{:.1f}"),
    ("illegal_moves", "illegal_moves", "{:g}"),
    ("wrong_stops", "wrong_stops", "{:g}"),
    ("timeouts", "timeouts", "{:g}"),
    ("parse_failures", "parse_failures", "{:g}"),
)


def step_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """`step 12/160 solve 0.53 reward 0.53 ...`: words and order are an interface, see the tests.

    A metric that is not there is left out.
    """
    return f"step {step}/{steps}" + _fields(_STEP_FIELDS, metrics, "")


def eval_line(step: int, steps: int, metrics: Mapping[str, float], kind: str = "eval") -> str:
    """`eval step 10/160 eval/all/pass_at_1 0.844 (54/64) ceiling 1.000 ...`.

    `kind` is what stands before the first slash of the metrics of one evaluation. The counts come
    from `<kind>/num_solved` and `<kind>/num_episodes`.
    """
    line = f"eval step {step}/{steps} {kind}{PASS_AT_1} {metrics[kind + PASS_AT_1]:.3f}"
    solved, episodes = (metrics.get(f"{kind}/{n}") for n in ("num_solved", "num_episodes"))
    if solved is not None and episodes is not None:
        line += f" ({solved:.0f}/{episodes:.0f})"
    return line + _fields(_EVAL_FIELDS, metrics, f"{kind}/")


def evaluations(metrics: Mapping[str, float]) -> list[str]:
    """The kinds of evaluation that the metrics of a step hold, in order."""
    return [key.removesuffix(PASS_AT_1) for key in metrics if key.endswith(PASS_AT_1)]


class ConsoleTracker:
    """Prints the stable lines; with `live` on a terminal also a bar with phase and time left."""

    name = "console"
    required = False

    def __init__(
        self, steps: int, live: bool, first_step: int = 0, out: TextIO | None = None
    ) -> None:
        """`steps`: length of the run, of which `first_step` are done. `live`: `tracking.console`.
        `out`: stdout unless given.
        """
        self._steps = steps
        self._out = out or sys.stdout
        self._progress = self._start_bar(first_step) if live and self._out.isatty() else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if any(key.startswith("train/") for key in metrics):
            self._print(step_line(step, self._steps, metrics))
        for kind in evaluations(metrics):
            self._print(eval_line(step, self._steps, metrics, kind))
        if self._progress is not None:
            shown = {"completed": step}
            if "train/solve_rate" in metrics:
                shown["solve"] = f"solve {metrics['train/solve_rate']:.2f}"
            self._progress.update(self._bar, **shown)

    def pictures(self, step: int, pictures: Mapping[str, Path]) -> None:
        for path in pictures.values():
            self._print(f"picture {path}")

    def phase(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._bar, phase=text)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, line: str) -> None:
        if self._progress is None:
            print(line, file=self._out, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _start_bar(self, first_step: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[solve]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[phase]}", style="dim", markup=False),
            console=Console(file=self._out),
            refresh_per_second=4,
        )
        self._bar = progress.add_task(
            "run", total=self._steps, completed=first_step, phase="", solve=""
        )
        progress.start()
        return progress


def _fields(
    fields: tuple[tuple[str, str, str], ...], metrics: Mapping[str, float], prefix: str
) -> str:
    return "".join(
        f" {label} {form.format(metrics[prefix + key])}"
        for label, key, form in fields
        if prefix + key in metrics
    )

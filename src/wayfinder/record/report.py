"""The pictures of a run, from the files of its directory alone. Partial runs give partial pictures.

Needs matplotlib, which is imported when a picture is made.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from wayfinder.record.atomic import atomic_write_bytes
from wayfinder.record.episodes import frame_hashes, latest_episodes, read_episodes, read_frames
from wayfinder.record.layout import CONFIG_FILE, METRICS_FILE
from wayfinder.record.metrics import read_metrics
from wayfinder.record.pictures import PAPER, contact_sheet, episode_gif, pick_episodes
from wayfinder.statistics import wilson_interval

CURVE_FILE = "learning_curve.png"
SHEET_FILE = "episodes.png"
PICTURE_FILE = "picture.png"

_BLUE, _GREEN, _ORANGE, _INK, _FAINT = "#2f5fd0", "#168a56", "#d9822b", "#262a33", "#9aa0ab"
_PHASES = (("rollout", _BLUE), ("update", _ORANGE), ("sync", _GREEN), ("eval", "#8e5bb5"))


def learning_curve(run_path: Path) -> Path:
    """Draw `learning_curve.png`: solve rates, and below them entropy, mismatch and time per step.

    The band is the 95% interval of each evaluation, taken from `eval/num_episodes`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(run_path / METRICS_FILE)
    # Not pyplot: a figure of its own leaves the caller's back end and open figures alone.
    figure = Figure(figsize=(13, 8), dpi=100, facecolor=hex_color(PAPER), layout="constrained")
    figure.get_layout_engine().set(rect=(0.012, 0.012, 0.976, 0.976), hspace=0.06)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=(2.1, 1))
    _draw_rates(figure.add_subplot(grid[0, :]), lines, _title(run_path))
    _draw_series(figure.add_subplot(grid[1, 0]), lines, "train/entropy", "entropy (nats)", False)
    mismatch = "mismatch/abs_logprob_diff_max"
    label = "largest log-prob mismatch"
    _draw_series(figure.add_subplot(grid[1, 1]), lines, mismatch, label, True)
    _draw_times(figure.add_subplot(grid[1, 2]), lines)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    atomic_write_bytes(run_path / CURVE_FILE, data.getvalue())
    return run_path / CURVE_FILE


def final_picture(run_path: Path, kind: str = "eval") -> Path:
    """Draw `picture.png`: the learning curve above solved and failed episodes of the last
    evaluation of that kind.

    Also leaves `episodes.png` and a replay of one solved and one failed episode (`solved.gif`,
    `failed.gif`), as far as there are such episodes.
    """
    curve = Image.open(learning_curve(run_path)).convert("RGB")
    parts = [curve]
    path = latest_episodes(run_path, kind)
    solved, failed = pick_episodes(read_episodes(path)) if path else ([], [])
    if path and (solved or failed):
        shown = {frame for episode in [*solved, *failed] for frame in frame_hashes(episode)}
        frames = read_frames(path, shown)
        contact_sheet(solved, failed, frames, run_path / SHEET_FILE)
        sheet = Image.open(run_path / SHEET_FILE).convert("RGB")
        height = round(sheet.height * curve.width / sheet.width)
        parts.append(sheet.resize((curve.width, height), Image.Resampling.LANCZOS))
        for episodes, name in ((solved, "solved.gif"), (failed, "failed.gif")):
            if episodes:
                episode_gif(episodes[-1], frames, run_path / name)
    picture = Image.new("RGB", (curve.width, sum(part.height for part in parts)), PAPER)
    top = 0
    for part in parts:
        picture.paste(part, (0, top))
        top += part.height
    data = io.BytesIO()
    picture.save(data, "PNG", optimize=True)
    atomic_write_bytes(run_path / PICTURE_FILE, data.getvalue())
    return run_path / PICTURE_FILE


def _draw_rates(axes: Any, lines: Sequence[dict[str, Any]], title: str) -> None:
    steps, train = _series(lines, "train/solve_rate")
    if steps:
        axes.plot(steps, train, color=_FAINT, lw=1.2, label="training episodes")
    steps, rates = _series(lines, "eval/solve_rate")
    if steps:
        counts = dict(zip(*_series(lines, "eval/num_episodes"), strict=True))
        bands = [
            wilson_interval(rate * counts[step], counts[step]) if step in counts else (rate, rate)
            for step, rate in zip(steps, rates, strict=True)
        ]
        axes.fill_between(steps, *zip(*bands, strict=True), color=_BLUE, alpha=0.14, lw=0)
        axes.plot(steps, rates, "o-", color=_BLUE, lw=2.4, ms=6, label="evaluation, 95% interval")
        for place in sorted({0, len(steps) - 1}):
            text = f"{rates[place]:.1%}"
            if steps[place] in counts:
                episodes = counts[steps[place]]
                text += f" ({rates[place] * episodes:.0f}/{episodes:.0f})"
            axes.annotate(
                text,
                (steps[place], rates[place]),
                xytext=(8 if place == 0 else -8, 10 if rates[place] < 0.15 else -18),
                textcoords="offset points",
                ha="left" if place == 0 else "right",
                color=_BLUE,
                weight="bold",
            )
    steps, ceiling = _series(lines, "eval/ceiling")
    if steps:
        axes.axhline(ceiling[-1], color=_GREEN, ls="--", lw=1.3, label=f"ceiling {ceiling[-1]:.3f}")
    axes.set_ylim(-0.02, 1.05)
    axes.set_ylabel("solve rate")
    axes.set_xlabel("step")
    axes.set_title(title, loc="left", fontsize=13, weight="bold", color=_INK)
    if axes.get_legend_handles_labels()[0]:
        low = rates and rates[-1] < 0.4  # then the curve ends where the legend would be
        axes.legend(loc="upper right" if low else "lower right", frameon=False, borderaxespad=1.6)
    plain_axes(axes)


def _draw_series(
    axes: Any, lines: Sequence[dict[str, Any]], key: str, label: str, logarithmic: bool
) -> None:
    from matplotlib.ticker import NullFormatter

    steps, values = _series(lines, key)
    if logarithmic:
        pairs = [(step, value) for step, value in zip(steps, values, strict=True) if value > 0]
        steps, values = [step for step, _ in pairs], [value for _, value in pairs]
    if steps:
        axes.plot(steps, values, color=_BLUE, lw=1.6, marker="o" if len(steps) < 3 else None, ms=4)
        if logarithmic:  # whole decades: nearly equal values shall look nearly equal
            low, high = (math.log10(pick(values)) for pick in (min, max))
            axes.set_yscale("log")
            axes.set_ylim(10 ** math.floor(low), 10 ** math.floor(high + 1))
            axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(label, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("step")
    plain_axes(axes)


def _draw_times(axes: Any, lines: Sequence[dict[str, Any]]) -> None:
    trained = [line for line in lines if line.get("time/rollout_s") is not None]
    steps = [line["step"] for line in trained]
    base = [0.0] * len(trained)
    for phase, color in _PHASES:
        heights = [line.get(f"time/{phase}_s") or 0.0 for line in trained]
        if any(heights):
            axes.bar(steps, heights, bottom=base, width=0.9, color=color, label=phase)
            base = [low + height for low, height in zip(base, heights, strict=True)]
    if steps:
        axes.set_ylim(0, 1.3 * max(base) or 1)
        axes.legend(frameon=False, fontsize=8, ncols=len(_PHASES), loc="upper left")
    axes.set_title("seconds per step", loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("step")
    plain_axes(axes)


def plain_axes(axes: Any) -> None:
    """The look of every plot: whole steps, faint grid, and a word where there is nothing."""
    from matplotlib.ticker import MaxNLocator

    axes.set_facecolor("white")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#e6e8ec", lw=0.8)
    axes.set_axisbelow(True)
    if not axes.has_data():
        axes.text(0.5, 0.5, "no data yet", transform=axes.transAxes, ha="center", color=_FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _series(lines: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    found = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _title(run_path: Path) -> str:
    try:
        config = json.loads((run_path / CONFIG_FILE).read_text())["config"]
        return (
            f"{config['experiment']}   {config['env']['id']}, {config['model']['name']}, "
            f"T = {config['rollout']['temperature']:g}, seed {config['seed']}"
        )
    except (OSError, ValueError, KeyError, TypeError):  # a partial or older run
        return run_path.name


def hex_color(color: tuple[int, int, int]) -> str:
    """A color of `pictures.py` as matplotlib takes it."""
    return "#{:02x}{:02x}{:02x}".format(*color)

"""Figures of a study: learning curves, heat maps of the varied keys, cost against solve rate.

Each function returns a PNG, or None where the study has nothing to show.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from wayfinder.record.pictures import PAPER
from wayfinder.record.report import hex_color, plain_axes
from wayfinder.record.runs import RunRecord
from wayfinder.record.table import SOLVE_RATE, Study, finished, in_order, over_seeds, results, show

_MOST_PANELS = 6


def learning_curves(study: Study) -> bytes | None:
    """Solve rate by step: one color a configuration, its mean over seeds as a line and from the
    least to the greatest seed as a band.

    The mean is drawn at the steps at which every finished run of the configuration has an
    evaluation; every run is there as a thin line, dashed if it has not finished.
    """
    shown = {values: _evaluated(runs) for values, runs in study.configurations.items()}
    if not any(shown.values()):
        return None
    figure = _figure(11, 5.5)
    axes = figure.add_subplot()
    for color, (values, runs) in zip(_colors(len(shown)), shown.items(), strict=True):
        counted = finished(runs)
        for run in runs:
            style = "-" if run in counted else "--"
            axes.plot(*zip(*run.series(SOLVE_RATE), strict=True), style, color=color, lw=0.7)
        if not counted:
            continue
        steps, rates = _common_steps(counted)
        if not steps:
            continue
        label = f"{study.label(values)} ({len(counted)} run{'s' if len(counted) > 1 else ''})"
        axes.plot(steps, rates.mean(axis=0), "o-", color=color, lw=2.2, ms=4, label=label)
        axes.fill_between(
            steps, rates.min(axis=0), rates.max(axis=0), color=color, alpha=0.15, lw=0
        )
    axes.set_ylim(-0.02, 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("solve rate")
    _title(axes, study)
    _legend(figure, axes)
    plain_axes(axes)
    return _png(figure)


def heat_maps(study: Study) -> bytes | None:
    """Mean last solve rate by the two keys with the most values, one map for each setting of the
    others (six at most); None unless two or more keys vary."""
    table = over_seeds(study)
    if len(study.varied) < 2 or table["last"].isna().all():
        return None
    cells = [
        (dict(zip(study.varied, configuration, strict=True)), count, rate)
        for configuration, count, rate in zip(
            study.configurations, table["runs"], table["last"], strict=True
        )
    ]
    values = {
        key: [value for (value,) in in_order({(cell[key],) for cell, *_ in cells})]
        for key in study.varied
    }
    down, across = sorted(study.varied, key=lambda key: -len(values[key]))[:2]
    others = [key for key in study.varied if key not in (down, across)]
    choices = ([(key, value) for value in values[key]] for key in others)
    settings = list(itertools.product(*choices))[:_MOST_PANELS]
    figure = _figure(1.6 + max(3.0, 1.1 * len(values[across])) * len(settings), 4.2)
    low, high = table["last"].min(), table["last"].max()
    spread = max(high - low, 1e-3)
    panels = figure.subplots(1, len(settings), squeeze=False)[0]
    for axes, setting in zip(panels, settings, strict=True):
        grid = np.full((len(values[down]), len(values[across])), np.nan)
        for configuration, count, rate in cells:
            if count and all(configuration[key] == value for key, value in setting):
                row = values[down].index(configuration[down])
                column = values[across].index(configuration[across])
                grid[row, column] = rate
                color = "white" if (rate - low) / spread < 0.5 else "black"
                text = f"{rate:.3f}\nn={count}"
                axes.text(column, row, text, ha="center", va="center", color=color)
        image = axes.imshow(grid, cmap="viridis", vmin=low, vmax=low + spread, aspect="auto")
        axes.set_xticks(range(len(values[across])), [show(value) for value in values[across]])
        axes.set_yticks(range(len(values[down])), [show(value) for value in values[down]])
        axes.set_xlabel(across)
        axes.set_ylabel(down)
        axes.set_title(", ".join(f"{key}={show(value)}" for key, value in setting), fontsize=9)
    figure.colorbar(image, ax=list(panels), label="last solve rate, mean over runs")
    figure.suptitle(study.experiment, x=0.02, ha="left", fontsize=12, weight="bold")
    return _png(figure)


def cost(study: Study) -> bytes | None:
    """Last solve rate with its 95% interval against wall time and against sampled tokens, one point
    a finished run."""
    counted = {values: finished(runs) for values, runs in study.configurations.items()}
    if not any(counted.values()):
        return None
    figure = _figure(13, 4.6)
    panels = figure.subplots(1, 2, sharey=True)
    for color, (values, runs) in zip(_colors(len(counted)), counted.items(), strict=True):
        if not runs:
            continue
        table = results(runs)
        last = table["solve_rate_last"]
        spans = [last - table["solve_rate_last_low"], table["solve_rate_last_high"] - last]
        bars = np.clip(np.nan_to_num(np.array(spans, dtype=float)), 0, None)
        for axes, places in zip(
            panels,
            (table["wall_s"] / 60, table["sampled_tokens"].astype("Float64") / 1e3),
            strict=True,
        ):
            axes.errorbar(
                places.to_numpy(float, na_value=np.nan),
                last,
                yerr=bars,
                fmt="o",
                ms=5,
                lw=1,
                color=color,
                label=study.label(values),
            )
    panels[0].set_xlabel("wall time (minutes)")
    panels[1].set_xlabel("sampled training tokens (thousands)")
    panels[0].set_ylabel("last solve rate")
    _title(panels[0], study)
    _legend(figure, panels[1])
    for axes in panels:
        plain_axes(axes)
        axes.set_xlim(0, 1.02 * axes.get_xlim()[1])
    return _png(figure)


def _evaluated(runs: Sequence[RunRecord]) -> list[RunRecord]:
    return [run for run in runs if run.series(SOLVE_RATE)]


def _common_steps(runs: Sequence[RunRecord]) -> tuple[list[int], np.ndarray]:
    """Steps at which all runs have an evaluation, and the rates [runs, steps]."""
    series = [dict(run.series(SOLVE_RATE)) for run in runs]
    steps = sorted(set.intersection(*(set(rates) for rates in series)))
    return steps, np.array([[rates[step] for step in steps] for rates in series])


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(width, height), dpi=110, facecolor=hex_color(PAPER), layout="constrained"
    )
    FigureCanvasAgg(figure)
    return figure


def _colors(count: int) -> list[Any]:
    """As many colors as configurations: distinct ones for a few, an ordered scale for many."""
    from matplotlib import colormaps

    if count <= 10:
        return [colormaps["tab10"](place) for place in range(count)]
    return list(colormaps["viridis"](np.linspace(0, 0.92, count)))


def _title(axes: Any, study: Study) -> None:
    axes.set_title(study.title, loc="left", fontsize=12, weight="bold")


def _legend(figure: Any, axes: Any) -> None:
    """Beside the plots, where it covers no point."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right upper")


def _png(figure: Any) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()

"""Figures of a study: learning curves, heat maps of the varied keys (points, where those form no
grid), cost against solve rate.

Each function returns a PNG, or None where the study has nothing to show.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from wayfinder.record.pictures import PAPER
from wayfinder.record.report import hex_color, plain_axes
from wayfinder.record.runs import RunRecord, as_number
from wayfinder.record.table import (
    SOLVE_RATE,
    Study,
    finished,
    in_order,
    over_seeds,
    results,
    short_names,
    show,
)

_MOST_PANELS = 12
_MOST_NAMED = 20  # configurations in a legend
_MOST_TEXTS = 12  # rows or columns of a map whose cells are still large enough for figures


def learning_curves(study: Study) -> bytes | None:
    """Solve rate by step: one color a configuration, its mean over seeds as a line and from the
    least to the greatest seed as a band.

    The mean is drawn at the steps at which every finished run of the configuration has an
    evaluation; every run is there as a thin line, dashed if it has not finished.
    """
    shown = {values: _evaluated(runs) for values, runs in study.configurations.items()}
    if not any(shown.values()):
        return None
    named = _named(study)
    figure = _figure(11, 5.5)
    axes = figure.add_subplot()
    for color, (values, runs) in zip(_colors(len(shown)), shown.items(), strict=True):
        counted = finished(runs)
        of = "" if len(counted) == len(runs) else f" of {len(runs)} finished"
        label = f"{_plain(study.label(values))} ({len(counted)}{of or _runs(counted)})"
        label = label if values in named else None
        for run in runs:
            style = "-" if run in counted else "--"
            axes.plot(*zip(*run.series(SOLVE_RATE), strict=True), style, color=color, lw=0.7)
        steps, rates = _common_steps(counted)
        if not steps:
            axes.plot([], [], "--", color=color, lw=0.7, label=label)
            continue
        axes.plot(steps, rates.mean(axis=0), "o-", color=color, lw=2.2, ms=4, label=label)
        axes.fill_between(
            steps, rates.min(axis=0), rates.max(axis=0), color=color, alpha=0.15, lw=0
        )
    axes.set_ylim(-0.02, 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("solve rate")
    _title(axes, study)
    _legend(figure, axes, study)
    plain_axes(axes)
    return _png(figure)


def heat_maps(study: Study) -> bytes | None:
    """Mean last solve rate by the two keys with the most values, one map for each setting of the
    others (twelve at most). None unless two or more keys vary, on a grid."""
    cells = _cells(study)
    if not _is_grid(study, cells):
        return None
    values = _values(study, cells)
    (down, across), others = _most_varied(study, values)
    settings = in_order({tuple(cell[key] for key in others) for cell, *_ in cells})
    shown = settings[:_MOST_PANELS]
    columns = min(len(shown), max(1, 12 // len(values[across])))
    rows = -(-len(shown) // columns)
    width = min(12.0, max(3.0, 1.1 * len(values[across])))
    height = min(8.0, 1.2 + max(2.0, 0.6 * len(values[down])))
    figure = _figure(1.6 + width * columns, 0.4 + height * rows)
    rates = [rate for *_, rate in cells]
    low, spread = min(rates), max(max(rates) - min(rates), 1e-3)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    has_texts = max(len(values[down]), len(values[across])) <= _MOST_TEXTS
    for axes, setting in zip(panels.flat, shown, strict=False):
        grid = np.full((len(values[down]), len(values[across])), np.nan)
        for cell, count, rate in cells:
            if tuple(cell[key] for key in others) != setting:
                continue
            row, column = values[down].index(cell[down]), values[across].index(cell[across])
            grid[row, column] = rate
            if has_texts:
                color = "white" if (rate - low) / spread < 0.5 else "black"
                text = f"{rate:.3f}\nn={count}"
                axes.text(column, row, text, ha="center", va="center", color=color)
        image = axes.imshow(grid, cmap="viridis", vmin=low, vmax=low + spread, aspect="auto")
        axes.set_xticks(range(len(values[across])), _ticks(values[across]))
        axes.set_yticks(range(len(values[down])), _ticks(values[down]))
        axes.set_xlabel(across)
        axes.set_ylabel(down)
        pairs = zip(short_names(others), setting, strict=True)
        axes.set_title(_plain(", ".join(f"{k}={show(v)}" for k, v in pairs)), fontsize=9)
    figure.colorbar(image, ax=list(panels.flat), label="last solve rate, mean over runs")
    left = len(settings) - len(shown)
    more = f" (the first {len(shown)} of {len(settings)} settings of {', '.join(others)})"
    title = _plain(study.experiment + more * bool(left))
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, weight="bold")
    return _png(figure)


def against_keys(study: Study) -> bytes | None:
    """Mean last solve rate against each varied key, one point a configuration. None unless two or
    more keys vary, and not on a grid: in a search nearly each has values of its own."""
    cells = _cells(study)
    if len(study.varied) < 2 or not cells or _is_grid(study, cells):
        return None
    columns = min(3, len(study.varied))
    rows = -(-len(study.varied) // columns)
    figure = _figure(1.0 + 4.0 * columns, 0.4 + 3.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in panels.flat[len(study.varied) :]:
        axes.set_visible(False)
    values = _values(study, cells)
    for axes, key in zip(panels.flat, study.varied, strict=False):
        numbers = [as_number(value) for value in values[key]]
        if None in numbers or len(numbers) <= 3:
            places = {value: float(place) for place, value in enumerate(values[key])}
            axes.set_xticks(range(len(places)), _ticks(values[key]))
        else:
            places = dict(zip(values[key], numbers, strict=True))
            if min(numbers) > 0 and max(numbers) > 8 * min(numbers):
                axes.set_xscale("log")
        axes.plot([places[cell[key]] for cell, *_ in cells], [rate for *_, rate in cells], "o")
        axes.set_xlabel(_plain(key))
        axes.set_ylim(-0.02, 1.05)
        plain_axes(axes)
    panels[0][0].set_ylabel("last solve rate, mean over runs")
    figure.suptitle(_plain(study.experiment), x=0.02, ha="left", fontsize=12, weight="bold")
    return _png(figure)


def cost(study: Study) -> bytes | None:
    """Last solve rate with its 95% interval against wall time and against sampled tokens, one point
    a finished run."""
    counted = {values: finished(runs) for values, runs in study.configurations.items()}
    if not any(counted.values()):
        return None
    named = _named(study)
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
                label=_plain(study.label(values)) if values in named else None,
            )
    panels[0].set_xlabel("wall time (minutes)")
    panels[1].set_xlabel("sampled training tokens (thousands)")
    panels[0].set_ylabel("last solve rate")
    panels[0].set_ylim(-0.02, 1.05)
    _title(panels[0], study)
    _legend(figure, panels[1], study)
    for axes in panels:
        plain_axes(axes)
        axes.set_xlim(0, 1.02 * axes.get_xlim()[1])
    return _png(figure)


def _cells(study: Study) -> list[tuple[dict[str, Any], int, float]]:
    """Values of the varied keys, number of runs and mean last rate of each configuration that has
    one."""
    table = over_seeds(study)
    return [
        (dict(zip(study.varied, configuration, strict=True)), int(count), float(rate))
        for configuration, count, rate in zip(
            study.configurations, table["runs"], table["last"], strict=True
        )
        if not math.isnan(rate)
    ]


def _values(study: Study, cells: Sequence[tuple[dict[str, Any], int, float]]) -> dict[str, list]:
    """The values that each varied key takes, in order."""
    return {
        key: [value for (value,) in in_order({(cell[key],) for cell, *_ in cells})]
        for key in study.varied
    }


def _most_varied(study: Study, values: dict[str, list]) -> tuple[tuple[str, str], list[str]]:
    """The two keys with the most values, and the others."""
    down, across = sorted(study.varied, key=lambda key: -len(values[key]))[:2]
    return (down, across), [key for key in study.varied if key not in (down, across)]


def _is_grid(study: Study, cells: Sequence[tuple[dict[str, Any], int, float]]) -> bool:
    """Whether two or more keys vary such that maps of them have fewer holes than values."""
    if len(study.varied) < 2 or not cells:
        return False
    values = _values(study, cells)
    keys, others = _most_varied(study, values)
    settings = {tuple(cell[key] for key in others) for cell, *_ in cells}
    room = len(settings) * math.prod(len(values[key]) for key in keys)
    return 2 * len(cells) > room


def _ticks(values: Sequence[Any]) -> list[str]:
    return [_plain(text if len(text) < 14 else f"{text[:12]}…") for text in map(show, values)]


def _plain(text: str) -> str:
    """Text of users, in which a dollar sign begins no formula."""
    return text.replace("$", r"\$")


def _runs(runs: Sequence[RunRecord]) -> str:
    return " run" if len(runs) == 1 else " runs"


def _evaluated(runs: Sequence[RunRecord]) -> list[RunRecord]:
    return [run for run in runs if run.series(SOLVE_RATE)]


def _common_steps(runs: Sequence[RunRecord]) -> tuple[list[int], np.ndarray]:
    """Steps at which all runs have an evaluation, and the rates [runs, steps]."""
    series = [dict(run.series(SOLVE_RATE)) for run in runs]
    steps = sorted(set.intersection(*(set(rates) for rates in series)) if series else ())
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
    title = textwrap.fill(study.title, 70)
    axes.set_title(_plain(title), loc="left", fontsize=12, weight="bold")


def _named(study: Study) -> set[tuple[Any, ...]]:
    """The configurations that a legend names: all, or the best of many."""
    last = dict(zip(study.configurations, over_seeds(study)["last"].fillna(-1), strict=True))
    return set(sorted(last, key=lambda values: -last[values])[:_MOST_NAMED])


def _legend(figure: Any, axes: Any, study: Study) -> None:
    """Beside the plots, where it covers no point."""
    handles, labels = axes.get_legend_handles_labels()
    num = len(study.configurations)
    title = f"the best {_MOST_NAMED} of {num}" if num > _MOST_NAMED else None
    if handles:
        figure.legend(
            handles, labels, title=title, frameon=False, fontsize=8, loc="outside right upper"
        )


def _png(figure: Any) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()

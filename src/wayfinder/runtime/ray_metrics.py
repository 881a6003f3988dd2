"""A run's figures as Ray metrics, which Ray hands to Prometheus beside its own.

`train/solve_rate` becomes the gauge `wayfinder_train_solve_rate`, which Prometheus sees as
`ray_wayfinder_train_solve_rate`, with the run's name as the tag `run`. Needs a running Ray, so it
joins the trackers of a run once its cluster is up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.util.metrics import Gauge

_PREFIX = "wayfinder_"
_STEP = "step"


def gauge_name(metric: str) -> str:
    """The name of a metric as Ray takes it; Prometheus sees it after `ray_`."""
    return _PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", metric)


class RayMetrics:
    """Sets a gauge for each metric. Prometheus asks for the last value whenever it likes."""

    name = "ray metrics"
    required = False

    def __init__(self, run: str) -> None:
        self._tags = {"run": run}
        self._gauges: dict[str, Gauge] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {_STEP: step, **metrics}.items():
            if math.isfinite(value):
                self._gauge(name).set(float(value), self._tags)

    def pictures(self, step: int, pictures: Mapping[str, Path]) -> None:
        """Not a number."""

    def phase(self, text: str) -> None:
        """Not a number."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """The gauges go with the driver's connection to Ray."""

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(
                gauge_name(name), description=f"Wayfinder: {name}", tag_keys=("run",)
            )
        return self._gauges[name]

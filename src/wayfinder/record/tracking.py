"""Where metrics go besides the screen of the person who waits: several trackers behind one call.

The metrics file comes first and must work. Any other tracker that raises (W&B without network, a
closed terminal) is switched off with one warning; training goes on and the count of trackers that
were lost is in the metrics from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from wayfinder.record.console import ConsoleTracker
from wayfinder.record.metrics import MetricsLog
from wayfinder.record.wandb_tracker import WandbTracker, wandb_run_id

if TYPE_CHECKING:
    from wayfinder.config.schema import Config
    from wayfinder.record.run_dir import RunDir

DISABLED = "record/trackers_disabled"

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """A place that a run's numbers are sent to. Only the driver process owns trackers."""

    name: str
    required: bool
    """Whether its failure ends the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one step; `step` never goes back but after a resume."""
        ...

    def pictures(self, step: int, pictures: Mapping[str, Path]) -> None:
        """Take image files (PNG or GIF) by name."""
        ...

    def phase(self, text: str) -> None:
        """Hear what the run does now."""
        ...

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """The run is over, well (0) or not (1)."""
        ...


class Trackers:
    """All trackers of a run. Failures of those that are not required stay in here."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._active = list(trackers)
        self.disabled: dict[str, str] = {}  # name -> why

    def add(self, make: Callable[[], Tracker], name: str) -> None:
        """Add `make()`; a failure in it counts as the failure of a tracker that is not required."""
        try:
            self._active.append(make())
        except Exception as error:  # any failure of a remote service
            self._disable(name, error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step to every tracker."""
        if self.disabled:
            metrics = {**metrics, DISABLED: len(self.disabled)}
        self._each(lambda tracker: tracker.log(step, metrics))

    def pictures(self, step: int, pictures: Mapping[str, Path]) -> None:
        """Send image files to every tracker."""
        self._each(lambda tracker: tracker.pictures(step, pictures))

    def phase(self, text: str) -> None:
        """Tell every tracker what the run does now."""
        self._each(lambda tracker: tracker.phase(text))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """End every tracker. A second call does nothing."""
        self._each(lambda tracker: tracker.finish(summary, exit_code))
        self._active.clear()

    def _each(self, send: Callable[[Tracker], None]) -> None:
        for tracker in list(self._active):
            try:
                send(tracker)
            except Exception as error:
                if tracker.required:
                    raise
                self._active.remove(tracker)
                self._disable(tracker.name, error)

    def _disable(self, name: str, error: Exception) -> None:
        self.disabled[name] = f"{type(error).__name__}: {error}"
        logger.warning("tracker %s is off from here on: %s", name, self.disabled[name])


def start_trackers(
    run: RunDir, config: Config, resolved: dict[str, Any], overrides: list[str], log: MetricsLog
) -> Trackers:
    """The trackers that `config.tracking` asks for, the metrics file first.

    `resolved` is `config` as plain data. The W&B run is named by its overrides and grouped by the
    sweep it belongs to, else by the experiment, unless `tracking.wandb.group` says otherwise.
    """
    console = ConsoleTracker(config.steps, config.tracking.console, log.last_step or 0)
    trackers = Trackers([log, console])
    wandb = config.tracking.wandb
    if wandb.mode != "disabled":
        trackers.add(
            lambda: WandbTracker(
                run.path,
                mode=str(wandb.mode),
                run_id=wandb_run_id(run.name, run.config_hash, run.created),
                project=wandb.project,
                entity=wandb.entity,
                group=wandb.group or _group(config.experiment, overrides),
                job_type=str(config.task),
                name=" ".join(overrides) or run.name,
                tags=wandb.tags,
                config=resolved,
                adapters=_adapters(run, config) if wandb.adapter else None,
            ),
            "wandb",
        )
    return trackers


def _group(experiment: str, overrides: Iterable[str]) -> str:
    """`<experiment>/<sweep>` for a job of a named sweep, else the experiment."""
    sweeps = [text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("sweep=")]
    return "/".join([experiment, *sweeps])


def _adapters(run: RunDir, config: Config) -> Path:
    """Where the run publishes its adapters."""
    return run.adapters if config.sync.dir is None else Path(config.sync.dir) / run.name

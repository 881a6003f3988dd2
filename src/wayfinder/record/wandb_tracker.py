"""Weights & Biases as a tracker. The client is imported only when a run asks for it.

Steps are our own axis (`trainer/global_step`), because the client drops what comes with a step of
its own counter that it has seen, and after a resume every step has been seen.

The run id is a function of what the run directory records, so all attempts of a run are one W&B
run. Offline, each attempt leaves its own `wandb/offline-run-*` with that id; `wandb sync` sends
them one after another. Their internal counters do not overlap, so no segment can replace another.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wayfinder.record.layout import WANDB_DIR

STEP_AXIS = "trainer/global_step"
_ATTEMPT_STRIDE = 1_000_000  # internal steps of one offline attempt, far more than any has
_FLUSH_INTERVAL_S = 1.0  # a killed driver loses this much of the offline file
_FINISH_TIMEOUT_S = 300.0  # an unreachable server may not keep the machine
_LONGEST_NAME = 128  # what the server accepts

logger = logging.getLogger(__name__)


def wandb_run_id(name: str, config_hash: str, created: float) -> str:
    """The id of a run. `created` keeps a deleted and repeated run apart from the first one."""
    text = f"{name}\n{config_hash}\n{created!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class WandbTracker:
    """One W&B run, online or offline, owned by this process."""

    name = "wandb"
    required = False

    def __init__(
        self,
        run_path: Path,
        *,
        mode: str,
        run_id: str,
        project: str,
        entity: str | None,
        group: str | None,
        job_type: str,
        name: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
    ) -> None:
        """Start or resume the run `run_id`; its files go to `run_path/wandb`.

        `mode` is `online` or `offline`. Raises whatever the client raises.
        """
        import wandb

        self._wandb = wandb
        attempts = len(list((run_path / WANDB_DIR).glob("offline-run-*")))
        self._next: int | None = attempts * _ATTEMPT_STRIDE if mode == "offline" else None
        self._run = wandb.init(
            dir=run_path,
            mode=mode,
            id=run_id,
            resume="allow",
            project=project,
            entity=entity,
            group=group,
            job_type=job_type,
            name=name[:_LONGEST_NAME],
            tags=list(tags),
            config=dict(config),
            reinit="finish_previous",
            save_code=False,
            settings=wandb.Settings(
                console="off",
                silent=True,
                finish_timeout=_FINISH_TIMEOUT_S,
                x_transaction_log_flush_interval=_FLUSH_INTERVAL_S,
                x_sync_dir_suffix=f"{attempts + 1}",
            ),
        )
        if mode == "online":
            logger.info("W&B run: %s", self._run.url)
        self._run.define_metric(STEP_AXIS)
        self._run.define_metric("*", step_metric=STEP_AXIS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._send({STEP_AXIS: step, **metrics})

    def pictures(self, step: int, pictures: Mapping[str, Path]) -> None:
        media = {
            key: self._wandb.Video(str(path), format="gif")
            if path.suffix == ".gif"
            else self._wandb.Image(str(path))
            for key, path in pictures.items()
        }
        self._send({STEP_AXIS: step, **media})

    def phase(self, text: str) -> None:
        """Not worth a request."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Send the summary and end the run; a nonzero code marks it as failed."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=exit_code)
        # `finish` returns before the client's service has closed the file of an offline run.
        self._wandb.teardown()

    def _send(self, values: dict[str, Any]) -> None:
        # Without `commit` the client holds a row back until the next step, and loses it in a crash.
        self._run.log(values, step=self._next, commit=True)
        if self._next is not None:
            self._next += 1

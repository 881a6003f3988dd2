"""Weights & Biases as a tracker. The client is imported only when a run asks for it.

Steps are our own axis (`trainer/global_step`), because the client drops what comes with a step of
its own counter that it has seen, and after a resume every step has been seen.

The run id is a function of what the run directory records, so all attempts of a run are one W&B
run. Offline, each attempt leaves its own `wandb/offline-run-*` with that id; `wandb sync` sends
them one after another. Their internal counters do not overlap, so no segment can replace another.

With the metrics of an evaluation go a table of its episodes and the replays of one solved and one
failed of them, from the files of the run directory. The files that the client makes for tables and
artifacts stay in the run directory too, so that an offline run can be sent from another machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wayfinder.record.console import evaluations
from wayfinder.record.episodes import episodes_path, frame_hashes, read_episodes, read_frames
from wayfinder.record.layout import WANDB_DIR
from wayfinder.record.pictures import action_symbol, episode_gif, pick_episodes
from wayfinder.types import Episode

STEP_AXIS = "trainer/global_step"
_ATTEMPT_STRIDE = 1_000_000  # internal steps of one offline attempt, far more than any has
_FLUSH_INTERVAL_S = 1.0  # a killed driver loses this much of the offline file
_FINISH_TIMEOUT_S = 300.0  # an unreachable server may not keep the machine
_LONGEST_NAME = 128  # what the server accepts
_DATA_DIR = "WANDB_DATA_DIR"  # of the client; it has no setting
_COLUMNS = (
    "seed",
    "sample",
    "outcome",
    "solved",
    "reward",
    "turns",
    "illegal_moves",
    "parse_failures",
    "policy_version",
    "actions",
    "last_reply",
)

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
        adapters: Path | None = None,
    ) -> None:
        """Start or resume the run `run_id`; its files go to `run_path/wandb`.

        `mode` is `online` or `offline`. `adapters`: where the run publishes its adapters; the last
        one becomes an artifact when the run ends. Raises whatever the client raises.
        """
        import wandb

        self._wandb = wandb
        self._run_path = run_path
        self._adapters = adapters
        self._data_dir = os.environ.get(_DATA_DIR)
        os.environ[_DATA_DIR] = self._data_dir or str((run_path / WANDB_DIR).absolute())
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
        for kind in evaluations(metrics):
            path = episodes_path(self._run_path, kind, step)
            if path.exists():
                self._send_episodes(step, kind, path)

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
        try:
            self._run.summary.update(dict(summary))
            if self._adapters is not None:
                self._send_adapter(self._adapters)
        finally:
            self._run.finish(exit_code=exit_code)
            # `finish` returns before the client's service has closed the file of an offline run.
            self._wandb.teardown()
            if self._data_dir is None:
                os.environ.pop(_DATA_DIR, None)

    def _send_episodes(self, step: int, kind: str, path: Path) -> None:
        episodes = read_episodes(path)
        table = self._wandb.Table(list(_COLUMNS), [_row(episode) for episode in episodes])
        values: dict[str, Any] = {f"{kind}/episodes": table}
        # The client copies the files while it takes them.
        with tempfile.TemporaryDirectory() as directory:
            for name, picked in zip(("solved", "failed"), pick_episodes(episodes, 1), strict=True):
                for episode in picked:
                    replay = Path(directory) / f"{name}.gif"
                    episode_gif(episode, read_frames(path, set(frame_hashes(episode))), replay)
                    values[f"{kind}/{name}"] = self._wandb.Video(str(replay), format="gif")
            self._send({STEP_AXIS: step, **values})

    def _send_adapter(self, adapters: Path) -> None:
        """The adapter that LATEST.json names, by reference to its files: versions do not change."""
        latest = adapters / "LATEST.json"
        if not latest.exists():
            return
        directory = adapters / str(int(json.loads(latest.read_bytes())["path"]))
        manifest = json.loads((directory / "manifest.json").read_bytes())
        artifact = self._wandb.Artifact(
            f"adapter-{self._run.id}",
            type="model",
            metadata={name: manifest[name] for name in ("version", "step", "base_model", "rank")},
        )
        for file in sorted(directory.iterdir()):
            artifact.add_file(str(file), policy="immutable", skip_cache=True)
        self._run.log_artifact(artifact)

    def _send(self, values: dict[str, Any]) -> None:
        # Without `commit` the client holds a row back until the next step, and loses it in a crash.
        self._run.log(values, step=self._next, commit=True)
        if self._next is not None:
            self._next += 1


def _row(episode: Episode) -> list[Any]:
    """One row of the table of an evaluation, in the order of `_COLUMNS`."""
    turns = episode.turns
    return [
        episode.task.seed,
        episode.member,
        str(episode.outcome),
        episode.success,
        episode.reward,
        len(turns),
        sum(turn.action is not None and not turn.executed for turn in turns),
        sum(turn.action is None for turn in turns),
        episode.policy_version,
        " ".join(action_symbol(turn) for turn in turns),
        turns[-1].text if turns else "",
    ]

"""`task=play`: one maze solved by the real engine, shown turn by turn in the terminal.

The episode is sampled with the seeds that an evaluation uses at that maze: it is the one that the
evaluation of this adapter played, unless the engine's arithmetic depends on what else is in its
batch. Nothing is recorded: the adapter is published into a directory that goes away again.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from wayfinder import specs
from wayfinder.config.schema import Config
from wayfinder.record.terminal import show_episode
from wayfinder.rollout.episode import Place
from wayfinder.runtime.cluster import Cluster
from wayfinder.runtime.recovery import Restarts
from wayfinder.starting import start_workers
from wayfinder.types import Task


def play(config: Config, overrides: Sequence[str], began: float) -> float:
    """Play the maze of `play.seed` with the policy that training would start from; its reward.

    One slot is used, whatever `cluster.slots` says: one episode has no use for more.
    """
    config = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, slots=1))
    console = Console()
    # Below the root, because on a cluster the engine may be on another machine.
    root = Path(config.sync.dir or config.paths.root).expanduser().absolute()
    root.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".play-", dir=root) as adapters,
        Cluster(specs.cluster_spec(config)) as cluster,
    ):
        with console.status("starting the engine"):
            restarts = Restarts(config.cluster.max_restarts, console.print)
            workers, _ = start_workers(config, cluster, Path(adapters), restarts)
            workers.publish(0, 0)
        with console.status("playing"):
            # Named as the evaluation set names it, because the sampling seeds follow the names.
            task = Task(config.env.id, config.play.seed, config.play.seed - config.eval.first_seed)
            spec = specs.episode_spec(config, "eval", 0, 0, config.eval.temperature)
            played = workers.play([Place(task, 0)], spec, lockstep=True)
        (episode,) = played.episodes
        frames = workers.fetch_frames(played)
    show_episode(console, episode, frames, config.play.delay_s)
    return episode.reward

"""What the loop asks of engines and ranks together: play, update, publish, save, load."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from wayfinder.algo.loss import LossSpec, averaged
from wayfinder.batch.plan import UpdatePlan
from wayfinder.errors import SyncError
from wayfinder.rollout.episode import EpisodeSpec, Place
from wayfinder.rollout.generator import EngineSpec
from wayfinder.runtime.adapter_sync import Publication, forget_after, retire
from wayfinder.runtime.cluster import Cluster
from wayfinder.runtime.engine_worker import EnvSpec
from wayfinder.train.mismatch import MismatchSums
from wayfinder.train.model import PolicySpec
from wayfinder.train.step import OptimizerSpec
from wayfinder.types import Episode, MicroBatch, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A fixed sequence with images: engine and trainer must agree on it after a publication."""

    ids: tuple[int, ...]
    frames: tuple[str, ...]
    pixels: dict[str, np.ndarray]

    def micro_batch(self) -> MicroBatch:
        """Loss on every id but the first: all are read."""
        length = len(self.ids)
        mask = np.ones(length, dtype=bool)
        mask[0] = False
        return MicroBatch(
            (
                Sample(
                    ids=np.asarray(self.ids, dtype=np.int64),
                    loss_mask=mask,
                    behavior_logprobs=np.zeros(length, dtype=np.float32),
                    after_image=np.zeros(length, dtype=bool),
                    turn_index=np.zeros(length, dtype=np.int32),
                    frames=self.frames,
                    episode=0,
                ),
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Episodes in the order asked for, and where their frames lie (one reference an engine)."""

    episodes: list[Episode]
    frames: list[Any]

    def fetch_frames(self) -> dict[str, np.ndarray]:
        """Copy all frames to this process: for records, not for training."""
        return {name: frame for part in ray.get(self.frames) for name, frame in part.items()}


class Workers:
    """Engines and ranks of a cluster, serving and training one policy."""

    def __init__(
        self,
        cluster: Cluster,
        adapters: Path,
        keep: int,
        probe: Probe,
        probe_tolerance: float,
        sleep_engines: bool,
    ) -> None:
        self._cluster = cluster
        self._adapters = adapters
        self._keep = keep
        self._probe = probe
        self._tolerance = probe_tolerance
        self._sleep = sleep_engines
        self.publication: Publication | None = None

    def start(
        self,
        engines: list[EngineSpec],
        env: EnvSpec,
        policy: PolicySpec,
        loss: LossSpec,
        optimizer: OptimizerSpec,
        mismatch_stop: float,
        timeout_s: float,
    ) -> None:
        """Build the policy and the engines, both at once. Ranks first on a GPU: an engine measures
        what is free there."""
        ranks = self._cluster.ranks
        address = self._cluster.wait([ranks[0].bind.remote()], timeout_s, "policy rank 0")[0]
        built = [
            rank.start.remote(address, policy, loss, optimizer, mismatch_stop) for rank in ranks
        ]
        if self._sleep:
            self._cluster.wait(built, timeout_s, "a policy rank, at its start,")
        started = [
            engine.start.remote(spec, env)
            for engine, spec in zip(self._cluster.engines, engines, strict=True)
        ]
        self._cluster.wait([*built, *started], timeout_s, "a worker, at its start,")

    def play(self, places: list[Place], spec: EpisodeSpec, lockstep: bool) -> Played:
        """Run episodes. The members of a group go to one engine, which shares their prefixes."""
        engines = self._cluster.engines
        order: dict[int, int] = {}
        shares: list[list[int]] = [[] for _ in engines]
        for index, place in enumerate(places):
            group = order.setdefault(place.task.index, len(order))
            shares[group % len(engines)].append(index)
        calls = [
            engine.play.options(num_returns=2).remote([places[i] for i in share], spec, lockstep)
            for engine, share in zip(engines, shares, strict=True)
            if share
        ]
        parts = self._cluster.wait([call[0] for call in calls], what="a rollout engine")
        episodes: list[Episode | None] = [None] * len(places)
        for share, part in zip([s for s in shares if s], parts, strict=True):
            for index, episode in zip(share, part, strict=True):
                episodes[index] = episode
        return Played([e for e in episodes if e is not None], [call[1] for call in calls])

    def score(self, plan: list[list[MicroBatch]], played: Played, num_episodes: int) -> np.ndarray:
        """Sums of log(policy / reference) over the tokens of each episode, [num_episodes]."""
        parts = self._on_ranks("score", plan, played.frames, num_episodes)
        return np.sum(parts, axis=0)

    def update(self, plan: UpdatePlan, played: Played, lr: float) -> dict[str, float]:
        """One step's optimizer updates on all ranks; metrics over all of their tokens."""
        if self._sleep:
            self._on_engines("sleep")
        calls = [
            rank.update.remote(list(minis), played.frames, lr)
            for rank, minis in zip(self._cluster.ranks, plan.ranks, strict=True)
        ]
        results = self._cluster.wait(calls, what="a policy rank, in its update,")
        mismatch = MismatchSums()
        sums: dict[str, float] = {}
        for result in results:
            mismatch.merge(result.mismatch)
            for part in result.sums:
                for name, value in part.items():
                    sums[name] = sums.get(name, 0.0) + value
        metrics = {f"train/{name}": value for name, value in averaged(sums).items()}
        metrics["train/grad_norm"] = float(np.mean(results[0].grad_norms))
        metrics["train/lr"] = lr
        return metrics | mismatch.metrics()

    def publish(self, version: int, step: int) -> dict[str, float]:
        """Write the adapter, have every engine load it, and have each prove that it serves it."""
        written = self._on_ranks("publish", str(self._adapters), version, step)
        publication = next(part for part in written if part is not None)
        if self._sleep:
            self._on_engines("wake")
        served = self._on_engines("load_latest", str(self._adapters))
        for index, (found, digest) in enumerate(served):
            if (found, digest) != (publication.version, publication.digest):
                raise SyncError(
                    f"engine {index} serves adapter version {found} ({digest[:12]}) after version "
                    f"{publication.version} ({publication.digest[:12]}) was published"
                )
        difference = self._prove(publication)
        self.publication = publication
        retire(self._adapters, self._keep, {publication.version})
        return {"sync/probe_abs_logprob_diff_max": difference}

    def save(self, directory: Path) -> None:
        """Adapter and optimizer into `directory`, which every rank must see."""
        self._on_ranks("save", str(directory))

    def load(self, directory: Path) -> None:
        self._on_ranks("load", str(directory))

    def forget_publications_after(self, version: int) -> None:
        """Before a resumed run goes on: versions of the part that is repeated are made again."""
        forget_after(self._adapters, version)

    def _prove(self, publication: Publication) -> float:
        probe = self._probe
        expected = self._on_ranks("probe", probe.micro_batch(), probe.pixels)[0]
        answers = self._on_engines("probe", probe.ids, probe.frames, probe.pixels)
        worst = 0.0
        for index, answer in enumerate(answers):
            difference = float(np.max(np.abs(np.subtract(answer, expected))))
            if not difference <= self._tolerance:
                raise SyncError(
                    f"engine {index} does not serve adapter version {publication.version}: a probe "
                    f"log-prob differs from the trainer's by {difference:.3g}, more than "
                    f"sync.probe_tolerance={self._tolerance}. Usual causes: the adapter touched no "
                    "module of the engine, another base model, or a precision that needs a larger "
                    "tolerance."
                )
            worst = max(worst, difference)
        return worst

    def _on_ranks(self, method: str, first: Any, *rest: Any) -> list:
        """Call a collective on all ranks; `score` gets each rank its own first argument."""
        calls = []
        for index, rank in enumerate(self._cluster.ranks):
            own = first[index] if method == "score" else first
            calls.append(getattr(rank, method).remote(own, *rest))
        return self._cluster.wait(calls, what=f"a policy rank, in {method},")

    def _on_engines(self, method: str, *arguments: Any) -> list:
        calls = [getattr(engine, method).remote(*arguments) for engine in self._cluster.engines]
        return self._cluster.wait(calls, what=f"a rollout engine, in {method},")

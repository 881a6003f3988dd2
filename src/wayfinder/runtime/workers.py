"""What the loop asks of engines and ranks together: play, update, publish, save, load."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wayfinder.algo.loss import LossSpec, averaged
from wayfinder.batch.plan import UpdatePlan
from wayfinder.errors import AdapterFileError, SyncError, WorkerLostError
from wayfinder.rollout.episode import EpisodeSpec, Place
from wayfinder.rollout.generator import EngineSpec
from wayfinder.runtime.adapter_sync import Publication, forget_after, retire
from wayfinder.runtime.cluster import Cluster, Deadline
from wayfinder.runtime.engine_worker import EnvSpec
from wayfinder.runtime.recovery import Restarts
from wayfinder.train.mismatch import MismatchSums
from wayfinder.train.model import PolicySpec
from wayfinder.train.step import OptimizerSpec
from wayfinder.types import Episode, MicroBatch, Sample

logger = logging.getLogger(__name__)

# Between two attempts at writing and loading an adapter.
_PAUSE_S = 1.0
# An idle worker answers at once, unless its machine is very busy.
_ANSWER_S = 30.0


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


class Workers:
    """Engines and ranks of a cluster, serving and training one policy."""

    def __init__(
        self,
        cluster: Cluster,
        adapters: Path,
        keep: int,
        retry_s: float,
        probe: Probe,
        probe_tolerance: float,
        sleep_engines: bool,
        restarts: Restarts,
    ) -> None:
        self._cluster = cluster
        self._adapters = adapters
        self._keep = keep
        self._retry_s = retry_s
        self._probe = probe
        self._tolerance = probe_tolerance
        self._sleep = sleep_engines
        self._restarts = restarts
        self.publication: Publication | None = None
        self._expected: list[float] = []  # the trainer's answer to the probe at `publication`

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
        self._started_with = engines, env
        self._start_timeout_s = timeout_s
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
        self._cluster.remember_workers()

    def play(self, places: list[Place], spec: EpisodeSpec, lockstep: bool) -> Played:
        """Run episodes. The members of a group go to one engine, which shares their prefixes; if it
        is lost, the engine in its place runs its share again and the others' episodes are kept."""
        engines = len(self._cluster.engines)
        order: dict[int, int] = {}
        shares: dict[int, list[int]] = {}
        for index, place in enumerate(places):
            group = order.setdefault(place.task.index, len(order))
            shares.setdefault(group % engines, []).append(index)
        parts = self._ask(
            "play",
            {
                engine: ([places[i] for i in share], spec, lockstep)
                for engine, share in shares.items()
            },
            num_returns=2,
        )
        episodes: list[Episode | None] = [None] * len(places)
        for engine, share in shares.items():
            for index, episode in zip(share, parts[engine][0], strict=True):
                episodes[index] = episode
        return Played([e for e in episodes if e is not None], [part[1] for part in parts.values()])

    def fetch_frames(self, played: Played) -> dict[str, np.ndarray]:
        """Copy all frames to this process: for records, not for training."""
        parts = self._cluster.wait(played.frames, what="what an engine keeps of its frames")
        return {name: frame for part in parts for name, frame in part.items()}

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
        """Write the adapter, have every engine load it, and have each prove that it serves it.

        All of it again, for at most `retry_s`, while files cannot be written or read: a shared
        directory comes back, and a file that was damaged on the way is written anew.
        """
        deadline = Deadline(self._retry_s)
        while True:
            try:
                return self._publish(version, step)
            except AdapterFileError as error:
                if not deadline.left_s:
                    raise
                self._restarts.publication(version, error)
                time.sleep(_PAUSE_S)

    def _publish(self, version: int, step: int) -> dict[str, float]:
        written = self._on_ranks("publish", str(self._adapters), version, step)
        self.publication = next(part for part in written if part is not None)
        self._expected = self._on_ranks("probe", self._probe.micro_batch(), self._probe.pixels)[0]
        if self._sleep:
            self._on_engines("wake")
        for index, served in enumerate(self._on_engines("load_latest", str(self._adapters))):
            self._check_served(index, served)
        answers = self._on_engines("probe", *self._question())
        difference = max(self._check_probe(i, answer) for i, answer in enumerate(answers))
        retire(self._adapters, self._keep, {version})
        return {"sync/probe_abs_logprob_diff_max": difference}

    def save(self, directory: Path, timeout_s: float | None = None) -> None:
        """Adapter and optimizer into `directory`, which every rank must see."""
        self._on_ranks("save", str(directory), timeout_s=timeout_s)

    def load(self, directory: Path) -> None:
        self._on_ranks("load", str(directory))

    def forget_publications_after(self, version: int) -> None:
        """Before a resumed run goes on: versions of the part that is repeated are made again."""
        forget_after(self._adapters, version)

    def _question(self) -> tuple:
        return self._probe.ids, self._probe.frames, self._probe.pixels

    def _check_served(self, index: int, served: tuple[int, str]) -> None:
        publication, (version, digest) = self.publication, served
        if version < publication.version:  # a shared directory may show changes late
            raise AdapterFileError(
                f"engine {index} still finds adapter version {version} in {self._adapters}, where "
                f"version {publication.version} was published"
            )
        if (version, digest) != (publication.version, publication.digest):
            raise SyncError(
                f"engine {index} serves adapter version {version} ({digest[:12]}) after version "
                f"{publication.version} ({publication.digest[:12]}) was published"
            )

    def _check_probe(self, index: int, answer: list[float]) -> float:
        """Largest difference of the engine's answer to the trainer's."""
        difference = float(np.max(np.abs(np.subtract(answer, self._expected))))
        if not difference <= self._tolerance:
            raise SyncError(
                f"engine {index} does not serve adapter version {self.publication.version}: a "
                f"probe log-prob differs from the trainer's by {difference:.3g}, more than "
                f"sync.probe_tolerance={self._tolerance}. Usual causes: the adapter touched no "
                "module of the engine, another base model, or a precision that needs a larger "
                "tolerance."
            )
        return difference

    def _on_ranks(
        self, method: str, first: Any, *rest: Any, timeout_s: float | None = None
    ) -> list:
        """Call a collective on all ranks; `score` gets each rank its own first argument."""
        calls = []
        for index, rank in enumerate(self._cluster.ranks):
            own = first[index] if method == "score" else first
            calls.append(getattr(rank, method).remote(own, *rest))
        return self._cluster.wait(calls, timeout_s, f"a policy rank, in {method},")

    def _on_engines(self, method: str, *arguments: Any) -> list:
        parts = self._ask(method, dict.fromkeys(range(len(self._cluster.engines)), arguments))
        return [part[0] for part in parts.values()]

    def _ask(
        self, method: str, arguments: dict[int, tuple], num_returns: int = 1
    ) -> dict[int, list]:
        """Call `method` on engines, each with its own arguments. By engine, in the order given: the
        first value, and references to the others.

        An engine that is lost meanwhile is replaced and asked again.
        """
        waiting: dict[Any, int] = {}
        sent: dict[int, list] = {}

        def send(index: int) -> None:
            call = getattr(self._cluster.engines[index], method)
            made = call.options(num_returns=num_returns).remote(*arguments[index])
            sent[index] = made if isinstance(made, list) else [made]
            waiting[sent[index][0]] = index

        for index in arguments:
            send(index)
        deadline = self._cluster.deadline()
        answers: dict[int, Any] = {}
        while waiting:
            what = f"a rollout engine, in {method},"
            lost = dict(waiting)
            try:
                done = self._cluster.first(list(waiting), deadline, what)
                lost = {done: waiting[done]}
                answers[waiting[done]] = self._cluster.result(done, what)
                del waiting[done]
            except WorkerLostError as error:
                for reference, index in lost.items():
                    del waiting[reference]
                    self._replace_engine(index, error)
                    send(index)
                deadline = self._cluster.deadline()
        return {index: [answers[index], *sent[index][1:]] for index in arguments}

    def _replace_engine(self, index: int, error: WorkerLostError) -> None:
        """Make a lost engine anew; it loads and proves the adapter that is current, if any is.

        Raises WorkerLostError when a rank is lost as well: where a whole node is gone, there may be
        no place for the engine, and no use for what it would play.
        """
        logger.warning("engine %d is lost: %s", index, error)
        specs, env = self._started_with
        while True:
            self._check_ranks()
            self._restarts.engine(index, error)
            self._cluster.replace_engine(index)
            engine = self._cluster.engines[index]

            def ask(reference: Any) -> Any:
                what = f"engine {index}, made anew,"
                wait = self._cluster.wait
                return wait([reference], self._start_timeout_s, what, self._check_ranks)[0]

            try:
                ask(engine.start.remote(specs[index], env))
                self._cluster.remember_workers()
                if self.publication is not None:
                    self._load_into(index, engine, ask)
                    self._check_probe(index, ask(engine.probe.remote(*self._question())))
                return
            except WorkerLostError as again:
                error = again

    def _load_into(self, index: int, engine: Any, ask: Callable[[Any], Any]) -> None:
        """Have a new engine load what is published, for at most `retry_s`."""
        deadline = Deadline(self._retry_s)
        while True:
            try:
                return self._check_served(
                    index, ask(engine.load_latest.remote(str(self._adapters)))
                )
            except AdapterFileError as error:
                if not deadline.left_s:
                    raise
                self._restarts.publication(self.publication.version, error)
                time.sleep(_PAUSE_S)

    def _check_ranks(self) -> None:
        """Raises WorkerLostError unless every rank answers. They are idle while engines work."""
        calls = [rank.__ray_ready__.remote() for rank in self._cluster.ranks]
        self._cluster.wait(calls, _ANSWER_S, "a policy rank, beside a lost engine,")

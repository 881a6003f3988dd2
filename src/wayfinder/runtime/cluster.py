"""Ray: start or join it, reserve the slots, put one policy rank and one engine on each.

One placement group with one bundle a slot, reserved before any actor is made: either the whole run
fits or it stops with what is needed and what is free. The group belongs to the driver, so it goes
when the driver goes.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from wayfinder.errors import ClusterError, WayfinderError, WorkerLostError
from wayfinder.runtime.engine_worker import EngineWorker
from wayfinder.runtime.policy_worker import PolicyWorker
from wayfinder.runtime.ray_session import RaySession

logger = logging.getLogger(__name__)

# Both actors of a slot reserve a share of its bundle; they work in turns, not at once.
_SHARE = 0.5
# Between two looks at whether Ray is alive.
_LOOK_S = 1.0
# Slots that are free are reserved within this time.
_QUIET_S = 5.0
# A rank that dies breaks the collectives of the others, who may say so before Ray notices.
_DEATH_NOTICE_S = 15.0
# Engines have this long for an orderly end.
_ORDERLY_S = 10.0


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    device: str
    slots: int
    threads_per_slot: int  # already resolved: at least 1
    cpus_per_slot: float
    address: str | None
    start_timeout_s: float
    step_timeout_s: float
    object_store_mib: int


def _nothing() -> None:
    pass


class Deadline:
    """A bounded wait that begins now."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())


class Cluster:
    """The workers of a run. Use as a context manager: leaving it ends all that was started."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._session: RaySession | None = None
        self._group = None
        self.engines: list[Any] = []
        self.ranks: list[Any] = []

    def __enter__(self) -> Cluster:
        spec = self._spec
        options: dict[str, Any] = {}
        if spec.address is None:
            options = {
                # On a CPU the slots share the cores by taking turns; Ray only counts shares.
                "num_cpus": max(1, round(spec.slots * spec.cpus_per_slot)),
                "include_dashboard": False,
                "object_store_memory": spec.object_store_mib * 2**20,
            }
        try:
            self._session = RaySession(spec.address, options, spec.start_timeout_s)
            self._reserve()
            for slot in range(spec.slots):
                rank = ray.remote(PolicyWorker).options(**self._options(slot))
                # Ranks wait for each other longer than the driver waits for them: it is the driver
                # that notices, and ends them.
                self.ranks.append(
                    rank.remote(
                        slot,
                        spec.slots,
                        spec.device,
                        spec.threads_per_slot,
                        2 * spec.step_timeout_s,
                    )
                )
                self.engines.append(self._engine(slot))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(
        self,
        references: Sequence[Any],
        timeout_s: float | None = None,
        what: str = "",
        meanwhile: Callable[[], None] = _nothing,
    ) -> list:
        """Results of `references`. Raises the first failure; see `first` and `result`."""
        pending = list(references)
        deadline = self.deadline(timeout_s)
        results: dict[Any, Any] = {}
        while pending:
            done = self.first(pending, deadline, what, meanwhile)
            pending.remove(done)
            try:
                results[done] = self.result(done, what)
            except WayfinderError:
                raise
            except RayTaskError:
                self._raise_if_one_died(pending, what)
                raise
        return [results[reference] for reference in references]

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        """After it, an answer that is asked for now counts as lost. None: the time of a step."""
        return Deadline(timeout_s or self._spec.step_timeout_s)

    def first(
        self,
        references: Sequence[Any],
        deadline: Deadline,
        what: str,
        meanwhile: Callable[[], None] = _nothing,
    ) -> Any:
        """The first of `references` to be done, well or not. `meanwhile` is called at each look.

        Raises WorkerLostError when there is none before `deadline`, ClusterError when Ray is lost.
        """
        while True:
            left = deadline.left_s
            done, _ = ray.wait(list(references), num_returns=1, timeout=min(left, _LOOK_S))
            if done:
                return done[0]
            self._check_session()
            meanwhile()
            if not left:
                raise WorkerLostError(
                    f"{what} gave no answer within {deadline.limit_s:.0f} s "
                    "(cluster.step_timeout_s; cluster.start_timeout_s for a start)"
                )

    def result(self, reference: Any, what: str) -> Any:
        """The value of a reference that is done.

        Raises WorkerLostError when its worker died or the node that kept the value is gone,
        ClusterError when Ray is lost, and what the worker raised if that is a message for the user.
        """
        try:
            return ray.get(reference)
        except RayTaskError as error:
            # The worker's own message for the user, without Ray's frame around it.
            cause = error.cause
            if isinstance(cause, WayfinderError):
                raise cause from error
            if isinstance(cause, RayError):  # what it was given lay on a node that is gone
                raise WorkerLostError(f"{what} lost its input: {_brief(cause)}") from error
            raise
        except RayActorError as error:
            self._check_session()
            raise WorkerLostError(f"{what} died: {_brief(error)}") from error
        except RayError as error:
            self._check_session()
            raise WorkerLostError(f"{what} is lost: {_brief(error)}") from error

    def replace_engine(self, slot: int) -> None:
        """Put a new engine, not yet started, in the place of one that is lost."""
        ray.kill(self.engines[slot])
        self.engines[slot] = self._engine(slot)

    def remember_workers(self) -> None:
        """Note the processes of the workers, so that `close` leaves none even if Ray is dead."""
        if self._session is not None:
            self._session.remember_workers()

    def close(self) -> None:
        """Stop the workers, give the slots back, and stop Ray if it was started here. Bounded, and
        harmless when Ray is dead."""
        session, self._session = self._session, None
        if session is not None:
            session.close(self._end_workers)
        self.engines, self.ranks, self._group = [], [], None

    def _end_workers(self) -> None:
        ends = [engine.close.remote() for engine in self.engines]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=_ORDERLY_S)
        for actor in [*self.engines, *self.ranks]:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)

    def _check_session(self) -> None:
        if self._session is not None and (problem := self._session.problem()):
            raise ClusterError(
                f"{problem}. Repeat the command: the run goes on from its last checkpoint."
            )

    def _raise_if_one_died(self, references: list[Any], what: str) -> None:
        deadline = Deadline(_DEATH_NOTICE_S)
        pending = list(references)
        while pending and deadline.left_s:
            done, pending = ray.wait(pending, num_returns=1, timeout=_LOOK_S)
            for reference in done:
                try:
                    self.result(reference, what)
                except RayTaskError:
                    continue

    def _bundle(self) -> dict[str, float]:
        bundle = {"CPU": self._spec.cpus_per_slot}
        if self._spec.device == "cuda":
            bundle["GPU"] = 1
        return bundle

    def _reserve(self) -> None:
        """Wait for the slots, behind other jobs of the same Ray perhaps."""
        slots, bundle = self._spec.slots, self._bundle()
        needs = f"cluster.slots={slots} needs {slots} x {bundle}, and there is room for"
        self._group = placement_group([bundle] * slots, strategy="PACK")
        deadline = Deadline(self._spec.start_timeout_s)
        quiet, told = Deadline(_QUIET_S), False
        # In short looks, because Ray's wait hears of no signal before its end.
        while not self._group.wait(_LOOK_S):
            self._check_session()
            if self._session.is_silent:
                continue
            if not deadline.left_s:
                raise ClusterError(
                    f"{needs} {_room(bundle)}. No more came free within cluster.start_timeout_s="
                    f"{deadline.limit_s:.0f}; lower cluster.slots, add nodes, or raise "
                    "cluster.start_timeout_s to wait longer for other jobs."
                )
            if not (told or quiet.left_s):
                wait = f"for at most cluster.start_timeout_s={deadline.limit_s:.0f}"
                logger.info("waiting for slots: %s %s; %s", needs, _room(bundle), wait)
                told = True

    def _engine(self, slot: int) -> Any:
        return ray.remote(EngineWorker).options(**self._options(slot)).remote(slot)

    def _options(self, slot: int) -> dict[str, Any]:
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=slot
            ),
            "num_cpus": self._spec.cpus_per_slot * _SHARE,
            "num_gpus": _SHARE if self._spec.device == "cuda" else 0,
            "runtime_env": {"env_vars": _environment(self._spec)},
            "max_restarts": 0,
        }


def _environment(spec: ClusterSpec) -> dict[str, str]:
    environment = {
        # Ray would set it to the reserved CPUs, which says nothing about a slot's threads.
        "OMP_NUM_THREADS": str(spec.threads_per_slot),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if spec.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _brief(error: RayError) -> str:
    """Ray's account of an error on one line, without its guesses at the cause and its advice."""
    account = re.split(r" Some common causes| To see information", str(error))[0]
    return " ".join(account.split()).removesuffix(".")


def _room(bundle: dict[str, float]) -> str:
    """How many of `bundle` fit into what is free now, and what that is, by node."""
    # Ray has no public function that tells it by node.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    total, told = 0, []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        has = free.get(node["NodeID"], {})
        room = min(int((has.get(name, 0.0) + 1e-6) // need) for name, need in bundle.items())
        total += room
        of = ", ".join(
            f"{name} {has.get(name, 0.0):g} of {node['Resources'].get(name, 0.0):g}"
            for name in bundle
        )
        told.append(f"{room} on {node['NodeManagerHostname']} ({of} free)")
    return f"{total}: {'; '.join(sorted(told, reverse=True))}"

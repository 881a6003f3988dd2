"""Ray: start or join it, reserve the slots, put one policy rank and one engine on each.

One placement group with one bundle a slot, reserved before any actor is made: either the whole run
fits or it stops with what is needed and what is free. The group belongs to the driver, so it goes
when the driver goes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from wayfinder.errors import ClusterError, WayfinderError
from wayfinder.runtime.engine_worker import EngineWorker
from wayfinder.runtime.policy_worker import PolicyWorker

# Both actors of a slot reserve a share of its bundle; they work in turns, not at once.
_SHARE = 0.5


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


class Cluster:
    """The workers of a run. Use as a context manager: leaving it ends all that was started."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._group = None
        self._owns_ray = False
        self.engines: list[Any] = []
        self.ranks: list[Any] = []

    def __enter__(self) -> Cluster:
        try:
            self._connect()
            self._reserve()
            self._make_actors()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(
        self, references: Sequence[Any], timeout_s: float | None = None, what: str = ""
    ) -> list:
        """Results of `references`. A dead or silent worker becomes a ClusterError that names it."""
        try:
            return ray.get(list(references), timeout=timeout_s or self._spec.step_timeout_s)
        except GetTimeoutError as error:
            raise ClusterError(
                f"{what} gave no answer within "
                f"{timeout_s or self._spec.step_timeout_s:.0f} s (cluster.step_timeout_s)"
            ) from error
        except RayTaskError as error:
            # The worker's own message for the user, without Ray's frame around it.
            cause = error.cause
            if isinstance(cause, WayfinderError):
                raise cause from error
            raise
        except (ActorDiedError, RayActorError) as error:
            raise ClusterError(f"{what} died: {error}") from error

    def close(self) -> None:
        """Stop the workers, give the slots back, and stop Ray if it was started here."""
        for engine in self.engines:
            _quietly(engine.close.remote())
        for actor in [*self.engines, *self.ranks]:
            ray.kill(actor)
        self.engines, self.ranks = [], []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._spec.address is None:
            options |= {
                # On a CPU the slots share the cores by taking turns; Ray only counts shares.
                "num_cpus": max(1, round(self._spec.slots * self._spec.cpus_per_slot)),
                "include_dashboard": False,
                "object_store_memory": self._spec.object_store_mib * 2**20,
            }
        else:
            options["address"] = self._spec.address
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's default puts workers behind everything else on the machine; they are the job.
        os.environ.setdefault("RAY_worker_niceness", "0")
        deadline = time.monotonic() + self._spec.start_timeout_s
        # Ray installs a handler of its own, which would hide from the run that it was interrupted.
        on_terminate = signal.getsignal(signal.SIGTERM)
        while True:
            try:
                ray.init(**options)
                signal.signal(signal.SIGTERM, on_terminate)
                break
            # Ray raises a bare Exception when its own processes come up too slowly, as they do on
            # a machine that is busy; another attempt then finds their files in the page cache.
            except Exception as error:
                ray.shutdown()
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"cluster.address={self._spec.address}: cannot start or reach Ray: {error}"
                    ) from error
        self._owns_ray = True

    def _bundle(self) -> dict[str, float]:
        bundle = {"CPU": self._spec.cpus_per_slot}
        if self._spec.device == "cuda":
            bundle["GPU"] = 1
        return bundle

    def _reserve(self) -> None:
        self._group = placement_group([self._bundle()] * self._spec.slots, strategy="PACK")
        if not self._group.wait(self._spec.start_timeout_s):
            raise ClusterError(
                f"cluster.slots={self._spec.slots} needs {self._spec.slots} x {self._bundle()}; "
                f"free now: {_counted(ray.available_resources())}, "
                f"in all: {_counted(ray.cluster_resources())}. Nothing came free within "
                f"cluster.start_timeout_s={self._spec.start_timeout_s:.0f}; lower cluster.slots or "
                "add nodes."
            )

    def _make_actors(self) -> None:
        spec = self._spec
        for slot in range(spec.slots):
            options: dict[str, Any] = {
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=slot
                ),
                "num_cpus": spec.cpus_per_slot * _SHARE,
                "num_gpus": _SHARE if spec.device == "cuda" else 0,
                "runtime_env": {"env_vars": _environment(spec)},
                "max_restarts": 0,
            }
            self.ranks.append(
                ray.remote(PolicyWorker)
                .options(**options)
                .remote(slot, spec.slots, spec.device, spec.threads_per_slot, spec.step_timeout_s)
            )
            engine = ray.remote(EngineWorker).options(**options).remote(slot)
            self.engines.append(engine)


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


def _quietly(reference: Any) -> None:
    """Wait a little for an orderly end; what follows ends the worker in any case."""
    try:
        ray.get(reference, timeout=10)
    except (RayActorError, GetTimeoutError, RayTaskError):
        return


def _counted(resources: dict[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}

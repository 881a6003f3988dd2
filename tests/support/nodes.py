"""Several Ray nodes on one machine: a head without slots, as on the cluster, and nodes with slots.

Each node is a raylet with workers, an object store and a node id of its own. What is not tested so:
networks, and machines that fall silent.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from types import TracebackType
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster as RayCluster

from support.supervised import find_support

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_process_group_cleanup_enabled": "true",
    # An earlier Ray of this process may have left its own choice.
    "RAY_AUTH_MODE": "disabled",
}
_OBJECT_STORE = 200 * 2**20


class Nodes:
    """A head and `count` nodes with `slots` CPUs each. Leaving it ends all of their processes."""

    def __init__(self, count: int, slots: int) -> None:
        self._count = count
        self._slots = slots
        self._patch = pytest.MonkeyPatch()
        self._seen: set[psutil.Process] = set()
        self._nodes: list[Any] = []

    def __enter__(self) -> Nodes:
        # Of its own, for Ray notes there which cluster is to be joined by default.
        self._directory = tempfile.TemporaryDirectory(prefix="nodes-")
        self._patch.setenv("RAY_TMPDIR", self._directory.name)
        for name, value in _ENVIRONMENT.items():
            self._patch.setenv(name, value)
        find_support(self._patch)
        # Ray would end a test that is told to end in a way of its own.
        self._patch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)
        try:
            self._cluster = RayCluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": 0,
                    "object_store_memory": _OBJECT_STORE,
                    "include_dashboard": False,
                },
            )
            for _ in range(self._count):
                self.add()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remember()
        self._cluster.shutdown()
        for process in self._seen:
            _kill(process)
        psutil.wait_procs(list(self._seen), timeout=10)
        self._patch.undo()
        self._directory.cleanup()

    @property
    def ids(self) -> list[str]:
        """Of the nodes with slots."""
        return [node.node_id for node in self._nodes]

    @property
    def _state(self) -> Any:
        """What the head knows, for a process that has not joined the cluster."""
        return self._cluster.global_state

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self) -> str:
        """A new node; its id."""
        node = self._cluster.add_node(num_cpus=self._slots, object_store_memory=_OBJECT_STORE)
        self._nodes.append(node)
        return node.node_id

    def remove(self, node_id: str) -> None:
        """As an operator takes a node away: its raylet is told to end."""
        node = self._of(node_id)
        workers = self._processes(node)
        self._cluster.remove_node(node)
        self._forget(node, workers)

    def kill(self, node_id: str) -> None:
        """As a node fails: its raylet is gone at once, and nobody told the head."""
        node = self._of(node_id)
        workers = self._processes(node)
        node.kill_raylet(check_alive=False)
        self._forget(node, workers)

    def kill_head(self) -> None:
        self._remember()
        self._cluster.head_node.kill_gcs_server()

    def free_slots(self) -> float:
        by_node = self._state.available_resources_per_node()
        return sum(free.get("CPU", 0.0) for free in by_node.values())

    def held(self) -> list[str]:
        """What jobs hold: actors that are not dead and placement groups that are not removed."""
        groups = self._state.placement_group_table().values()
        actors = self._state.actor_table(None).values()
        return [
            *(actor["ActorClassName"] for actor in actors if actor["State"] != "DEAD"),
            *("placement group" for group in groups if group["state"] != "REMOVED"),
        ]

    def processes(self) -> list[psutil.Process]:
        """Of all nodes, workers and their children included."""
        return [p for node in self._cluster.list_all_nodes() for p in self._processes(node)]

    def is_playing(self) -> bool:
        """Whether a real engine plays episodes, by what `ps` shows."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if "ray::EngineWorker.play" in " ".join(process.cmdline()):
                    return True
        return False

    def _of(self, node_id: str) -> Any:
        return next(node for node in self._nodes if node.node_id == node_id)

    def _processes(self, node: Any) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for infos in node.all_processes.values():
            for info in infos:
                try:
                    process = psutil.Process(info.process.pid)
                    found += [process, *process.children(recursive=True)]
                except psutil.NoSuchProcess:
                    continue
        return found

    def _remember(self) -> None:
        self._seen |= set(self.processes())

    def _forget(self, node: Any, workers: list[psutil.Process]) -> None:
        """A machine that is lost takes everything along that runs on it."""
        self._nodes.remove(node)
        for process in workers:
            _kill(process)
        psutil.wait_procs(workers, timeout=10)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()

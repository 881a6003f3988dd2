"""A driver that joins a cluster by its address, with stand-ins on the slots, as a command:

    python tests/support/joined.py <address> <slots> <start_timeout_s> <directory>

It prints a JSON line for each thing it did, plays once and ends; the loop's own supervision makes
the workers anew. Its exit codes are those of run.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import ray

from support.supervised import places, standins, started
from wayfinder import loop
from wayfinder.errors import WayfinderError

TASKS = 12


def say(what: str, told: object) -> None:
    print(json.dumps({what: told}), flush=True)


def _place(actor: object) -> dict[str, object]:
    """Where this process runs; the bundle is told by the resources that it holds a share of."""
    held = ray._private.worker.global_worker.core_worker.resource_ids()
    return {
        "node": ray.get_runtime_context().get_node_id(),
        "pid": os.getpid(),
        "held": sorted(held),
    }


def placed(actors: list) -> list[dict[str, object]]:
    return ray.get([actor.__ray_call__.remote(_place) for actor in actors], timeout=60)


def work(stage: SimpleNamespace) -> None:
    cluster, workers = stage.cluster, stage.workers
    say("ranks", placed(cluster.ranks))
    say("engines", placed(cluster.engines))
    played = workers.play(places(TASKS), None, True)
    say("played", played.episodes)
    while (stage.root / "hold").exists():
        time.sleep(0.1)
    if (stage.root / "score").exists():
        say("scored", int(workers.score([None] * len(cluster.ranks), played, 0)))
    frames = workers.fetch_frames(played)
    say("frames", {name: int(pid) for name, pid in frames.items()})


def main(address: str, slots: int, start_timeout_s: float, root: Path) -> int:
    config = SimpleNamespace(
        cluster=SimpleNamespace(
            device="cpu",
            slots=slots,
            threads_per_slot=1,
            cpus_per_slot=1.0,
            address=address,
            start_timeout_s=start_timeout_s,
            step_timeout_s=120.0,
            object_store_mib=100,
            max_restarts=3,
        )
    )
    directory = SimpleNamespace(name="joined", event=lambda text: say("event", text))
    trackers = SimpleNamespace(phase=lambda text: None, add=lambda make, name: None)

    loop._start = lambda config, directory, log, trackers, cluster, restarts, began: (
        SimpleNamespace(root=root, cluster=cluster, workers=started(cluster, root, restarts))
    )
    try:
        with standins():
            loop._with_workers(config, directory, None, trackers, work)
    except WayfinderError as error:
        say("error", f"{type(error).__name__}: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])))

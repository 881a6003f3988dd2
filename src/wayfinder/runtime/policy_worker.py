"""The Ray actor of one policy rank: process group, `PolicyRank`, and nothing that computes."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import numpy as np
import ray
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from wayfinder.algo.loss import LossSpec
from wayfinder.batch.plan import MiniBatch
from wayfinder.runtime.adapter_sync import WEIGHTS, Publication, publish
from wayfinder.train.checkpoint import load_optimizer, save_policy
from wayfinder.train.model import PolicySpec
from wayfinder.train.step import OptimizerSpec, PolicyRank, UpdateResult
from wayfinder.types import MicroBatch


class PolicyWorker:
    """Rank `rank` of `world` on one slot. The methods after `start` are collectives."""

    def __init__(self, rank: int, world: int, device: str, threads: int, timeout_s: float) -> None:
        logging.basicConfig(level=logging.WARNING)
        self._rank = rank
        self._world = world
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._store: dist.TCPStore | None = None
        self._policy: PolicyRank | None = None
        if device == "cpu":
            torch.set_num_threads(threads)

    def bind(self) -> tuple[str, int]:
        """Rank 0 binds the rendezvous store first and then says where it is: no port is guessed."""
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(
            host, 0, self._world, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        return host, self._store.port

    def start(
        self,
        address: tuple[str, int],
        policy: PolicySpec,
        loss: LossSpec,
        optimizer: OptimizerSpec,
        mismatch_stop: float,
    ) -> None:
        if self._store is None:
            self._store = dist.TCPStore(*address, self._world, timeout=self._timeout)
        if self._device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each actor its own device only
        dist.init_process_group(
            "nccl" if self._device == "cuda" else "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._world,
            timeout=self._timeout,
        )
        self._policy = PolicyRank(policy, loss, optimizer, self._device, mismatch_stop)

    def score(self, micro_batches: list[MicroBatch], frames: list, episodes: int) -> np.ndarray:
        return self._policy.score(micro_batches, _merged(frames), episodes)

    def update(self, mini_batches: list[MiniBatch], frames: list, lr: float) -> UpdateResult:
        result = self._policy.update(mini_batches, _merged(frames), lr)
        self._policy.forget_frames()
        return result

    def probe(self, batch: MicroBatch, frames: dict[str, np.ndarray]) -> list[float]:
        return self._policy.probe(batch, frames)

    def publish(self, root: str, version: int, step: int) -> Publication | None:
        """Gather the adapter on all ranks; rank 0 writes it."""
        tensors, config = self._policy.adapter_state()
        if self._rank != 0:
            return None
        return publish(
            Path(root),
            version,
            tensors,
            config,
            base_model=config["base_model_name_or_path"],
            step=step,
        )

    def save(self, directory: str) -> None:
        """Gather adapter and optimizer on all ranks; rank 0 writes them into `directory`."""
        tensors, config = self._policy.adapter_state()
        moments, counts = self._policy.optimizer_state()
        if self._rank == 0:
            save_policy(Path(directory), tensors, config, moments, counts)

    def load(self, directory: str) -> None:
        path = Path(directory)
        self._policy.load_adapter_state(load_file(path / WEIGHTS))
        self._policy.load_optimizer_state(*load_optimizer(path))

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _merged(references: list) -> dict[str, np.ndarray]:
    """Frames of all engines, by hash. They come as references: the driver never copies them."""
    merged: dict[str, np.ndarray] = {}
    for frames in ray.get(references):
        merged.update(frames)
    return merged

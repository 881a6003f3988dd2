"""Writers in processes of their own that are killed with SIGKILL while they write."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wayfinder.runtime.adapter_sync import publish
from wayfinder.train.checkpoint import begin, commit, save_policy

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
# A fork server that has imported torch starts a writer in milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["wayfinder.runtime.adapter_sync", "wayfinder.train.checkpoint"])


def adapter(version: int) -> dict[str, torch.Tensor]:
    """Tensors whose values say which version they are; large enough that writing takes time."""
    return {f"layer.{i}.lora_A.weight": torch.full((64, 256), version + i / 8) for i in range(4)}


def publish_forever(root: str, first: int) -> None:
    version = first
    while True:
        publish(Path(root), version, adapter(version), CONFIG, base_model="base", step=version)
        version += 1


def commit_forever(root: str, first: int) -> None:
    step = first
    while True:
        temporary = begin(Path(root), step)
        save_policy(
            temporary, adapter(step), CONFIG, {"p/exp_avg": torch.ones(9)}, {"p/step": step}
        )
        commit(temporary, step, {"step": step}, keep=2)
        step += 1


def kill_while_writing(
    writer: Callable[[str, int], None],
    root: Path,
    first: int,
    ready: Callable[[], bool],
    seconds: float,
    meanwhile: Callable[[], Any],
) -> None:
    """Let `writer` write from `first` on, call `meanwhile` beside it, and kill it `seconds` after
    `ready` became true."""
    process = _CONTEXT.Process(target=writer, args=(str(root), first))
    process.start()
    deadline = time.monotonic() + 120
    while not ready():
        assert process.is_alive(), "the writer died by itself"
        assert time.monotonic() < deadline, "the writer wrote nothing"
        time.sleep(0.001)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        meanwhile()
    assert process.is_alive(), "the writer died by itself"
    process.kill()
    process.join(60)
    assert process.exitcode == -9

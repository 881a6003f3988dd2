"""One resumable stage of the preparation: a training loop that survives an interruption.

A stage is a function of its configuration and of example indices, so its checkpoint is only the
weights, the optimizer and the number of examples done. A finished stage is never run again.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from wayfinder.config.sft import StageConfig
from wayfinder.errors import CheckpointError
from wayfinder.train.muon import Muon, hidden_matrices

# (indices of the batch) -> loss to differentiate, metrics to average
BatchLoss = Callable[[range], tuple[torch.Tensor, dict[str, float]]]


@dataclass(slots=True)
class StageRecord:
    """What a stage did. `curve` holds one row a report: `examples`, `seconds` and metrics."""

    name: str
    examples: int = 0
    seconds: float = 0.0  # of training, over all attempts
    finished: bool = False
    curve: list[dict[str, float]] = field(default_factory=list)


class StageConsole:
    """A live bar for people and one stable line a report for files."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)

    @contextmanager
    def bar(self, name: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
        """Gives a function that sets how many examples are done."""
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        with progress:
            task = progress.add_task(f"sft {name}", total=total, completed=done)
            yield lambda count: progress.update(task, completed=count)


def run_stage(
    path: Path,
    record: StageRecord,
    config: StageConfig,
    modules: dict[str, nn.Module],
    batch_loss: BatchLoss,
    console: StageConsole,
    checkpoint_seconds: float,
) -> StageRecord:
    """Trains every parameter of `modules` that requires a gradient; the checkpoint is `path`.

    With a checkpoint the stage goes on from it, or only loads the weights when it was finished.
    The schedule is linear warm-up, then a cosine to a fiftieth of the learning rate.
    """
    optimizers = _make_optimizers(modules, config)
    if path.exists():
        record = _load(path, record.name, modules, optimizers)
    if record.finished:
        return record
    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    started = saved = time.monotonic()
    before = record.seconds
    window: list[dict[str, float]] = []
    reported = record.examples
    with console.bar(record.name, config.examples, record.examples) as show:
        while record.examples < config.examples:
            stop = min(record.examples + config.batch_size, config.examples)
            _set_learning_rate(optimizers, config, record.examples)
            loss, metrics = batch_loss(range(record.examples, stop))
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, config.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
            record.examples = stop
            window.append(metrics)
            show(stop)
            record.seconds = before + time.monotonic() - started
            if _crossed(stop, config.batch_size, config.report_every) or stop == config.examples:
                row = {k: sum(m[k] for m in window) / len(window) for k in window[0]}
                record.curve.append({"examples": stop, "seconds": record.seconds, **row})
                console.line(_format(record, config.examples, row, stop - reported))
                window, reported = [], stop
            if time.monotonic() - saved > checkpoint_seconds:
                _save(path, record, modules, optimizers)
                saved = time.monotonic()
    record.finished = True
    _save(path, record, modules, optimizers)
    return record


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """`write` fills a temporary sibling, which then replaces `path`: whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _make_optimizers(
    modules: dict[str, nn.Module], config: StageConfig
) -> list[torch.optim.Optimizer]:
    trained = [
        (f"{name}.{key}", p)
        for name, module in modules.items()
        for key, p in module.named_parameters()
        if p.requires_grad
    ]
    matrices = hidden_matrices(trained) if config.muon_learning_rate > 0 else []
    chosen = {id(p) for p in matrices}
    rest = [p for _, p in trained if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
    ]
    if matrices:
        optimizers.append(Muon(matrices, lr=config.muon_learning_rate))
    return optimizers


def _set_learning_rate(
    optimizers: list[torch.optim.Optimizer], config: StageConfig, examples: int
) -> None:
    warm = min(1.0, (examples + config.batch_size) / max(config.warmup_examples, 1))
    cosine = 0.5 * (1 + math.cos(math.pi * examples / config.examples))
    factor = warm * (0.98 * cosine + 0.02)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("peak", group["lr"])
            group["lr"] = group["peak"] * factor


def _crossed(examples: int, batch: int, every: int) -> bool:
    """Whether the last batch reached or passed a multiple of `every` (0: never)."""
    return every > 0 and examples // every > (examples - batch) // every


def _format(record: StageRecord, total: int, row: dict[str, float], recent: int) -> str:
    numbers = " ".join(f"{key} {value:.3f}" for key, value in row.items())
    last = record.curve[-2]["seconds"] if len(record.curve) > 1 else 0.0
    rate = recent / max(record.curve[-1]["seconds"] - last, 1e-9)
    return f"sft {record.name} {record.examples}/{total} {numbers} {rate:.0f} examples/s"


def _save(
    path: Path,
    record: StageRecord,
    modules: dict[str, nn.Module],
    optimizers: list[torch.optim.Optimizer],
) -> None:
    state: dict[str, Any] = {
        "record": {key: getattr(record, key) for key in record.__slots__},
        "modules": {name: module.state_dict() for name, module in modules.items()},
        # What nobody will go on with is not kept.
        "optimizers": [] if record.finished else [o.state_dict() for o in optimizers],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda temporary: torch.save(state, temporary))


def _load(
    path: Path,
    name: str,
    modules: dict[str, nn.Module],
    optimizers: list[torch.optim.Optimizer],
) -> StageRecord:
    try:
        state = torch.load(path, weights_only=True)
        record = StageRecord(**state["record"])
        for key, module in modules.items():
            module.load_state_dict(state["modules"][key])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=not record.finished):
            optimizer.load_state_dict(saved)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected the checkpoint of stage {name!r}; it cannot be read ({error}). "
            "Delete this file to train the stage again"
        ) from error
    return record

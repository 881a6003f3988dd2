"""What vLLM 0.32 does badly on a CPU, done otherwise. Imported only inside engine processes.

vLLM's LoRA for CPUs copies the adapter's matrices once for every token of a batch before it
multiplies. With one adapter, as here, two plain matrix products do the same.

A prompt goes in by parts when a step has no room for all of it or for all its images. vLLM samples
after each part, drops that sample, and winds the request's random generator back, which a
generator of the CPU cannot do: the engine dies of it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class CpuExecutor(UniProcExecutor):
    """Runs the model in the engine's core process, with `DenseLora` and `SeededParts`.

    A worker process of its own, vLLM's choice on a CPU, waits for work by spinning, on the very
    cores that compute.
    """

    def _init_executor(self) -> None:
        type(current_platform).get_punica_wrapper = classmethod(
            lambda _: f"{DenseLora.__module__}.{DenseLora.__qualname__}"
        )
        cpu_worker.CPUModelRunner = SeededParts
        super()._init_executor()


class SeededParts(CPUModelRunner):
    """Samples of a prompt that is not all in yet take nothing from the request's generator."""

    def sample_tokens(self, grammar_output):
        generators = self.input_batch.generators
        unfinished = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        held = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(held)


class DenseLora(PunicaWrapperCPU):
    """LoRA of linear layers as two matrix products for each adapter in the batch."""

    def update_metadata(self, *args, **kwargs) -> None:
        super().update_metadata(*args, **kwargs)
        slots = self.token_lora_indices
        found = torch.unique(slots).tolist()
        # None stands for all rows. Slot -1 means no adapter.
        self._rows: dict[int, Tensor | None] = {
            slot: None if len(found) == 1 else torch.nonzero(slots == slot)[:, 0]
            for slot in found
            if slot >= 0
        }

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[Tensor, ...] | None = None,
        **kwargs,
    ) -> None:
        """y[:, slice i] += scale * x A_i^T B_i^T, with y [N, sum of slices] and x [N, in].

        A_i is [slots, 1, rank, in] and B_i [slots, 1, slice i, rank].
        """
        for slot, rows in self._rows.items():
            chosen = x if rows is None else x[rows]
            start = 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                low = scale * linear(chosen.float(), a[slot, 0].float())
                _add(y[:, start : start + size], rows, low, b[slot, 0])
                start += size

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **kwargs
    ) -> None:
        """y += x B^T, with y [N, hidden] and x [N, rank]."""
        if not add_inputs:
            return super().add_lora_embedding(y, x, lora_b_stacked, add_inputs, **kwargs)
        for slot, rows in self._rows.items():
            _add(y, rows, x if rows is None else x[rows], lora_b_stacked[slot, 0])


def _add(y: Tensor, rows: Tensor | None, low: Tensor, b: Tensor) -> None:
    change = linear(low.to(y.dtype), b.to(y.dtype))
    if rows is None:
        y += change
    else:
        y[rows] += change

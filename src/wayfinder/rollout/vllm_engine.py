"""vLLM's async engine behind the `Generator` protocol: token ids in, token ids out.

With `vllm_cpu`, the only module that imports vllm.

Exactness: processed log-probs (the sampled distribution itself), vision tokens banned by a bias
that the trainer applies too, ids that the engine expanded compared with ours on every reply.
Repeatability: `replies` adds its requests while the scheduler is paused, so the engine's batches do
not depend on when each request arrives.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wayfinder.chat.vision import BANNED_BIAS, collapse_pads
from wayfinder.errors import ClusterError, InvariantError, SyncError, WorkerLostError
from wayfinder.rollout.core_log import Printed, core_death, core_failure
from wayfinder.rollout.generator import EngineSpec, Reply, ReplyRequest

# vLLM accepts these ranks only; an adapter of rank r is served in the next slot size.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# Tokens of a cache block. vLLM's own choice for CPUs, 128, is longer than a whole prompt of one
# small frame, of which it would keep nothing.
_CPU_BLOCK = 32
# What vLLM raises when its core process does not come up, whatever the reason.
_CORE_FAILED = "Engine core initialization failed"
# Between two looks at whether the engine's core process is alive.
_LOOK_S = 1.0


def next_lora_rank(rank: int) -> int:
    """Smallest engine rank that holds an adapter of this rank."""
    for allowed in _LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise ValueError(f"model.lora.rank={rank}: vLLM serves ranks up to {_LORA_RANKS[-1]}")


class VllmEngine:
    """One engine on one slot, with at most one adapter loaded: the current policy version."""

    def __init__(self, spec: EngineSpec) -> None:
        _set_environment(spec)
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.exceptions import EngineDeadError

        self._dead = EngineDeadError
        self._spec = spec
        self._sampling = SamplingParams
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._lora = None
        self._counter = 0
        arguments = AsyncEngineArgs(
            model=spec.model,
            dtype=spec.dtype,
            seed=spec.seed,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            enforce_eager=spec.enforce_eager,
            enable_prefix_caching=spec.enable_prefix_caching,
            logprobs_mode="processed_logprobs",
            limit_mm_per_prompt={"image": spec.max_images, "video": 0},
            enable_lora=True,
            max_loras=1,
            max_lora_rank=next_lora_rank(spec.lora_rank),
            disable_log_stats=True,
            enable_log_requests=False,
            **_device_arguments(spec),
        )
        self._printed = printed = Printed()
        try:
            self._engine = AsyncLLM.from_engine_args(arguments)
        except RuntimeError as error:
            if _CORE_FAILED not in str(error):
                raise
            raise core_failure(printed.text(), printed.path) from error

    async def reply(self, request: ReplyRequest, frames: Mapping[str, np.ndarray]) -> Reply:
        collector = await self._add(request, frames)
        return self._reply(request, await self._answer(collector.get()))

    async def replies(
        self, requests: Sequence[ReplyRequest], frames: Mapping[str, np.ndarray]
    ) -> list[Reply]:
        core = self._engine.engine_core
        await self._answer(core.pause_scheduler_async(mode="keep", clear_cache=False))
        try:
            collectors = [await self._add(request, frames) for request in requests]
        finally:
            await self._answer(core.resume_scheduler_async())
        outputs = [await self._answer(collector.get()) for collector in collectors]
        return [
            self._reply(request, output) for request, output in zip(requests, outputs, strict=True)
        ]

    async def load_adapter(self, version: int, path: Path) -> None:
        """Serve the adapter at `path` from now on, under a name, id and path that are all new.

        A name, id or path used again could serve stale weights or stale cache blocks: the engine
        keys its prefix cache by name and path, and keeps weights by id.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(f"policy-{version}", version + 1, str(path))
        if not await self._answer(self._engine.add_lora(request)):
            raise SyncError(f"adapter version {version} at {path}: the engine refused to load it")
        previous, self._lora = self._lora, request
        if previous is not None and previous.lora_int_id != request.lora_int_id:
            await self._answer(self._engine.remove_lora(previous.lora_int_id))
        await self.forget()

    async def forget(self) -> None:
        """Drop what is cached of prompts and images: what is sampled next then depends on nothing
        that was served before, as on an engine that was just started."""
        if not await self._answer(self._engine.reset_prefix_cache()):
            raise SyncError(
                "the engine could not drop its prefix cache: requests still hold blocks"
            )
        await self._answer(self._engine.reset_encoder_cache())

    async def loaded(self) -> list[int]:
        """Policy versions that the engine holds."""
        loras = await self._answer(self._engine.list_loras())
        return sorted(lora_id - 1 for lora_id in loras)

    async def probe(
        self, ids: tuple[int, ...], frames: tuple[str, ...], pixels: Mapping[str, np.ndarray]
    ) -> list[float]:
        """Log-probabilities of `ids[1:]` given what stands before each, at temperature 1."""
        request = ReplyRequest("probe", ids, frames, seed=0, max_tokens=1, temperature=0.0)
        collector = await self._add(request, pixels, prompt_logprobs=0)
        output = await self._answer(collector.get())
        self._check_expansion(request, output)
        rows = output.prompt_logprobs[1:]
        return [row[token].logprob for row, token in zip(rows, ids[1:], strict=True)]

    async def sleep(self) -> None:
        """Free the device's memory; weights wait in host memory (level 1), which adapters need."""
        if self._spec.sleep:
            await self._answer(self._engine.sleep(level=1))

    async def wake(self) -> None:
        if self._spec.sleep:
            await self._answer(self._engine.wake_up())

    async def shutdown(self) -> None:
        """End the engine. In its own event loop: from outside of it, vLLM only asks the loop to
        close its sockets, and a process with open sockets never ends."""
        self._engine.shutdown()

    async def _add(
        self,
        request: ReplyRequest,
        frames: Mapping[str, np.ndarray],
        prompt_logprobs: int | None = None,
    ):
        from PIL import Image
        from vllm.inputs import TokensPrompt

        # The engine's processor expands each placeholder itself.
        collapsed = collapse_pads(request.prompt_ids, image_pad=self._spec.banned_ids[0])
        prompt = TokensPrompt(prompt_token_ids=collapsed)
        if request.frames:
            prompt["multi_modal_data"] = {
                "image": [Image.fromarray(frames[name]) for name in request.frames]
            }
            prompt["multi_modal_uuids"] = {"image": list(request.frames)}
        params = self._sampling(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            logprobs=0,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=list(self._spec.stop_ids),
            logit_bias=dict.fromkeys(self._spec.banned_ids, BANNED_BIAS),
            detokenize=False,
            output_kind=self._final_only,
        )
        # The engine's own request ids must be unique for its lifetime.
        self._counter += 1
        name = f"{request.request_id}-{self._counter}"
        return await self._answer(
            self._engine.add_request(name, prompt, params, lora_request=self._lora)
        )

    async def _answer(self, awaitable: Awaitable) -> Any:
        """What the engine's core process gives. Raises WorkerLostError when it is dead or silent:
        vLLM itself may wait for a dead one for ever."""
        task = asyncio.ensure_future(awaitable)
        deadline = time.monotonic() + self._spec.request_timeout_s
        try:
            while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
                if self._engine.errored:
                    raise self._death()
                if time.monotonic() > deadline:
                    raise WorkerLostError(
                        f"the engine gave no answer within rollout.request_timeout_s="
                        f"{self._spec.request_timeout_s}"
                    )
            return task.result()
        except self._dead as error:
            raise self._death() from error
        finally:
            task.cancel()

    def _death(self) -> WorkerLostError:
        return core_death(self._printed.text(), self._printed.path)

    def _check_expansion(self, request: ReplyRequest, output) -> None:
        found = tuple(output.prompt_token_ids)
        if found == request.prompt_ids:
            return
        same = 0
        while same < min(len(found), len(request.prompt_ids)) and (
            found[same] == request.prompt_ids[same]
        ):
            same += 1
        raise InvariantError(
            f"{request.request_id}: the engine read another prompt than the trainer will. Lengths "
            f"{len(found)} (engine) and {len(request.prompt_ids)} (ours), first difference at "
            f"position {same}: {found[same : same + 8]} and {request.prompt_ids[same : same + 8]}"
        )

    def _reply(self, request: ReplyRequest, output) -> Reply:
        self._check_expansion(request, output)
        out = output.outputs[0]
        ids = tuple(out.token_ids)
        banned = set(self._spec.banned_ids).intersection(ids)
        if banned:
            raise InvariantError(f"{request.request_id}: vision tokens were sampled: {banned}")
        if out.finish_reason not in ("stop", "length"):
            raise ClusterError(f"{request.request_id}: the engine ended with {out.finish_reason}")
        logprobs = tuple(row[token].logprob for row, token in zip(out.logprobs, ids, strict=True))
        return Reply(ids, logprobs, out.finish_reason, output.num_cached_tokens or 0)


def _device_arguments(spec: EngineSpec) -> dict:
    """Engine arguments that differ between GPU and CPU."""
    if spec.sleep:
        return {
            "enable_sleep_mode": True,
            "gpu_memory_utilization": spec.gpu_memory_utilization,
        }
    from wayfinder.rollout.vllm_cpu import CpuExecutor

    return {
        "distributed_executor_backend": CpuExecutor,
        "block_size": _CPU_BLOCK,
    }


def _set_environment(spec: EngineSpec) -> None:
    """Set what vLLM reads from the environment; must run before its first import."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if not spec.sleep:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(spec.kv_cache_gib)))
        # The engine forks its core process; thread pools must not exist before that.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

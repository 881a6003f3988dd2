"""The seam between episodes and whatever samples their replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class ReplyRequest:
    """One reply to sample. `prompt_ids` are expanded; `frames` name the images in their order."""

    request_id: str
    prompt_ids: tuple[int, ...]
    frames: tuple[str, ...]
    seed: int
    max_tokens: int
    temperature: float  # 0: greedy


@dataclass(frozen=True, slots=True)
class Reply:
    """Sampled ids with the log-probabilities of the distribution they were sampled from."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # [len(ids)]
    finish_reason: str  # "stop" or "length"
    cached_tokens: int


class Generator(Protocol):
    """Samples replies. `frames` maps every hash that the requests name to its pixels."""

    async def reply(self, request: ReplyRequest, frames: Mapping[str, np.ndarray]) -> Reply:
        """Sample one reply as soon as possible."""
        ...

    async def replies(
        self, requests: Sequence[ReplyRequest], frames: Mapping[str, np.ndarray]
    ) -> list[Reply]:
        """Sample all of them as one batch whose composition does not depend on timing."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What one engine is made from; plain values, because it crosses process boundaries."""

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enforce_eager: bool
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    kv_cache_gib: float
    threads: int
    max_images: int
    lora_rank: int
    banned_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    seed: int
    request_timeout_s: float
    sleep: bool  # free the device between rollouts (GPU only)

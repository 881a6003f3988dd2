"""The Ray actor of one rollout engine: it plays whole episodes, so a turn costs no network hop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wayfinder.chat.render import ChatRenderer
from wayfinder.chat.vision import VisionProcessor, load_processor
from wayfinder.envs.protocol import make_env
from wayfinder.rollout.episode import EpisodeRun, EpisodeSpec, Place
from wayfinder.rollout.generator import EngineSpec
from wayfinder.rollout.groups import run_free, run_lockstep
from wayfinder.rollout.vllm_engine import VllmEngine
from wayfinder.runtime.adapter_sync import read_latest, verify
from wayfinder.types import Episode


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Which environment the episodes run in, and how its task is put to the model."""

    env_id: str
    kind: str
    action_format: str
    prompt_role: str


class EngineWorker:
    """Engine `index`, on one slot. Episodes stay where they start, for its prefix cache."""

    def __init__(self, index: int) -> None:
        logging.basicConfig(level=logging.WARNING)
        self._index = index
        self._engine: VllmEngine | None = None
        self._version: int | None = None

    async def start(self, engine: EngineSpec, env: EnvSpec) -> None:
        processor = load_processor(engine.model)
        self._tokenizer = processor.tokenizer
        self._vision = VisionProcessor(processor)
        self._env = env
        self._renderers: dict[str, ChatRenderer] = {}
        self._engine = VllmEngine(engine)

    async def load_latest(self, root: str) -> tuple[int, str]:
        """Verify and load what LATEST.json names; the version and digest that are served now."""
        publication = read_latest(Path(root))
        if publication.version != self._version:
            try:
                await self._engine.load_adapter(publication.version, Path(publication.path))
            except Exception:
                verify(Path(publication.path))  # the reason, if its files went bad meanwhile
                raise
            self._version = publication.version
        return publication.version, publication.digest

    async def probe(
        self, ids: tuple[int, ...], frames: tuple[str, ...], pixels: Mapping[str, np.ndarray]
    ) -> list[float]:
        return await self._engine.probe(ids, frames, pixels)

    async def play(
        self, places: list[Place], spec: EpisodeSpec, lockstep: bool
    ) -> tuple[list[Episode], dict[str, np.ndarray]]:
        """Run the episodes of `places`; records in that order, and every frame they showed."""
        if spec.policy_version != self._version:
            raise RuntimeError(
                f"engine {self._index} serves policy version {self._version}, "
                f"not {spec.policy_version}"
            )
        # The share of a lost engine is played by one that has served nothing yet.
        await self._engine.forget()
        frames: dict[str, np.ndarray] = {}
        runs = []
        for place in places:
            env = make_env(self._env.env_id, self._env.kind)
            runs.append(
                EpisodeRun(
                    place,
                    env,
                    spec,
                    self._renderer,
                    self._vision,
                    self._decode,
                    frames,
                    self._index,
                )
            )
        schedule = run_lockstep if lockstep else run_free
        try:
            await schedule(runs, self._engine, frames)
        finally:
            for run in runs:
                run.close()
        return [run.finish() for run in runs], frames

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.shutdown()

    def _renderer(self, prompt: str) -> ChatRenderer:
        if prompt not in self._renderers:
            self._renderers[prompt] = ChatRenderer(
                self._tokenizer, self._vision.tokens, prompt, self._env.prompt_role
            )
        return self._renderers[prompt]

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

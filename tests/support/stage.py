"""Scripted episodes with the tiny model's tokenizer, images and chat template; no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from support.scripted import Said, Script, ScriptedGenerator
from wayfinder.chat.render import ChatRenderer
from wayfinder.chat.vision import VisionProcessor
from wayfinder.envs.protocol import Env, make_env
from wayfinder.rollout.episode import EpisodeRun, EpisodeSpec, Place
from wayfinder.rollout.generator import ReplyRequest
from wayfinder.rollout.groups import run_lockstep
from wayfinder.types import Episode, Task

ENV_ID = "maze_2d/easy"
SEED = 4
TASK = Task(ENV_ID, SEED, 0)
SPEC = EpisodeSpec(
    max_turns=30,
    history=None,
    max_tokens=16,
    max_model_len=10_000,
    temperature=0.7,
    action_format="tuple",
    strict_actions=True,
    end_on_parse_failure=False,
    end_on_reply_cut=False,
    task_reward=2.0,
    format_reward=0.25,
    env_timeout_s=None,
    run_seed=1,
    stream="train",
    step=3,
    policy_version=8,
)


def turn_of(request: ReplyRequest) -> int:
    return int(request.request_id.rsplit("-", 1)[1])


def saying(*replies: str | Said) -> Script:
    """Reply k in turn k; the last one from then on."""
    return lambda request: replies[min(turn_of(request), len(replies) - 1)]


@dataclass
class Stage:
    """Runs episodes with the tiny model's tokenizer; keeps what the generator was asked."""

    processor: object
    frames: dict[str, np.ndarray] = field(default_factory=dict)
    requests: list[ReplyRequest] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def play(
        self,
        script: Script,
        spec: EpisodeSpec = SPEC,
        envs: Sequence[Env] | None = None,
        places: Sequence[Place] = (Place(TASK, 0),),
        schedule=run_lockstep,
        at_end: Callable[[], None] = lambda: None,
    ) -> list[Episode]:
        tokenizer = self.processor.tokenizer
        vision = VisionProcessor(self.processor)
        if envs is None:
            envs = [make_env(ENV_ID, "maze2d") for _ in places]
        runs = [
            EpisodeRun(
                place,
                env,
                spec,
                lambda prompt: ChatRenderer(tokenizer, vision.tokens, prompt),
                vision,
                lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
                self.frames,
                engine=2,
            )
            for place, env in zip(places, envs, strict=True)
        ]
        generator = ScriptedGenerator(tokenizer, script)

        async def all_of_it() -> None:
            try:
                await schedule(runs, generator, self.frames)
            finally:
                at_end()

        asyncio.run(all_of_it())
        self.requests, self.batches = generator.requests, generator.batches
        return [run.finish() for run in runs]

"""A generator and an environment that follow a script, for tests of what happens around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wayfinder.rollout.generator import Reply, ReplyRequest
from wayfinder.types import StepResult


@dataclass(frozen=True, slots=True)
class Said:
    """One scripted reply. `text` is made into ids by the tokenizer, nothing is added to it;
    `ids` take its place where the ids themselves matter."""

    text: str = ""
    ids: tuple[int, ...] | None = None
    finish_reason: str = "stop"


Script = Callable[[ReplyRequest], str | Said]


class ScriptedGenerator:
    """A `rollout.generator.Generator` whose replies are a function of the request alone.

    A plain text from the script is a finished reply: the end of turn is put behind it. Log-probs
    are a function of seed and place, so that a mixed-up reply shows. `reply` yields to other
    episodes a number of times that depends on the seed, so that free episodes overtake each other.
    """

    def __init__(self, tokenizer, script: Script) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self.requests: list[ReplyRequest] = []
        self.batches: list[int] = []  # sizes of the calls of `replies`

    async def reply(self, request: ReplyRequest, frames: Mapping[str, np.ndarray]) -> Reply:
        for _ in range(request.seed % 5):
            await asyncio.sleep(0)
        return self._answer(request, frames)

    async def replies(
        self, requests: Sequence[ReplyRequest], frames: Mapping[str, np.ndarray]
    ) -> list[Reply]:
        self.batches.append(len(requests))
        return [self._answer(request, frames) for request in requests]

    def _answer(self, request: ReplyRequest, frames: Mapping[str, np.ndarray]) -> Reply:
        assert all(name in frames for name in request.frames), "a frame that nobody stored"
        self.requests.append(request)
        said = self._script(request)
        if isinstance(said, str):
            said = Said(said + self._tokenizer.eos_token)
        ids = said.ids
        if ids is None:
            ids = tuple(self._tokenizer.encode(said.text, add_special_tokens=False))
        logprobs = tuple(-(request.seed % 97 + 1) / (place + 2) for place in range(len(ids)))
        return Reply(ids, logprobs, said.finish_reason, cached_tokens=len(request.prompt_ids) // 2)


class ScriptedEnv:
    """An environment (`envs.protocol.Env`) that shows `first` and answers step k with `answers[k]`.

    An answer is a result, an exception to raise, or a function that gives the result.
    """

    def __init__(
        self,
        first: np.ndarray | Exception,
        answers: Sequence[StepResult | Exception | Callable[[], StepResult]] = (),
        prompt: str = "Do it.",
    ) -> None:
        self._first = first
        self._answers = list(answers)
        self._prompt = prompt
        self.seeds: list[int] = []
        self.actions: list[str | None] = []
        self.closed = 0

    def reset(self, seed: int) -> np.ndarray:
        self.seeds.append(seed)
        if isinstance(self._first, Exception):
            raise self._first
        return self._first

    def step(self, action: str | None, parse_error: str | None = None) -> StepResult:
        answer = self._answers[len(self.actions)]
        self.actions.append(action)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, StepResult) else answer()

    def prompt(self, action_format: str) -> str:
        return self._prompt

    def close(self) -> None:
        self.closed += 1


def answer(
    frame: np.ndarray,
    feedback: str = "Moved.",
    *,
    terminated: bool = False,
    truncated: bool = False,
    success: bool = False,
    executed: bool = True,
) -> StepResult:
    """A step result with the usual things left out."""
    return StepResult(frame, float(success), terminated, truncated, success, executed, feedback)


def picture(height: int, width: int, shade: int = 0) -> np.ndarray:
    """A frame of this size; another shade, another frame."""
    frame = np.full((height, width, 3), shade, dtype=np.uint8)
    frame[: height // 2, : width // 2] = 255 - shade
    return frame

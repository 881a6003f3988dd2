"""One episode as a state machine: ask for a reply, take the reply, step the environment, repeat.

It knows neither engine nor schedule, so every schedule drives the same machine, and it alone
decides how an episode ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wayfinder.chat.parse import parse_action
from wayfinder.chat.render import ChatRenderer, Observation, context_ids, window_start
from wayfinder.chat.vision import VisionProcessor
from wayfinder.envs.protocol import Env
from wayfinder.rollout.generator import Reply, ReplyRequest
from wayfinder.seeding import derive_seed
from wayfinder.types import Episode, Outcome, StepResult, Task, Turn, frame_hash


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """How episodes are run; the same for all episodes of a rollout."""

    max_turns: int
    history: int | None
    max_tokens: int
    max_model_len: int
    temperature: float
    action_format: str
    strict_actions: bool  # only the maze's own actions count as well-formed
    end_on_parse_failure: bool
    end_on_reply_cut: bool
    task_reward: float
    format_reward: float
    env_timeout_s: float | None  # None: the environment is trusted to return at once
    run_seed: int
    stream: str  # "train" or "eval": separates the random streams
    step: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class Place:
    """Which episode: a task and a member of its group."""

    task: Task
    member: int


class EpisodeRun:
    """A running episode. Call `start`, then `request` and `take` in turn until `outcome` is set."""

    def __init__(
        self,
        place: Place,
        env: Env,
        spec: EpisodeSpec,
        renderer: Callable[[str], ChatRenderer],
        vision: VisionProcessor,
        decode: Callable[[tuple[int, ...]], str],
        frames: dict[str, np.ndarray],
        engine: int,
    ) -> None:
        self.place = place
        self.outcome: Outcome | None = None
        self._env = env
        self._spec = spec
        self._make_renderer = renderer
        self._renderer: ChatRenderer | None = None
        self._vision = vision
        self._decode = decode
        self._frames = frames
        self._engine = engine
        self._turns: list[Turn] = []
        self._frame = ""
        self._feedback = ""
        self._error: str | None = None

    async def start(self) -> None:
        frame = await self._guard(self._env.reset, self.place.task.seed)
        if frame is not None:
            # Some tasks put another prompt for every seed, so the prompt follows the reset.
            self._renderer = self._make_renderer(self._env.prompt(self._spec.action_format))
            self._show(frame)

    def close(self) -> None:
        self._env.close()

    def request(self) -> ReplyRequest | None:
        """The next reply to sample, or None: the episode is over (`outcome` says how)."""
        if self.outcome is not None:
            return None
        turn = len(self._turns)
        if turn >= self._spec.max_turns:
            self.outcome = Outcome.TURN_LIMIT
            return None
        start = window_start(turn, self._spec.history)
        ids = context_ids(self._renderer.prefix_ids, self._turns, start, self._observation())
        room = self._spec.max_model_len - len(ids)
        # A reply that could not be finished would be a cut one through no fault of the agent.
        if room < self._spec.max_tokens:
            self.outcome = Outcome.CONTEXT_LIMIT
            return None
        task, spec = self.place.task, self._spec
        return ReplyRequest(
            request_id=f"{spec.stream}-{spec.step}-{task.index}-{self.place.member}-{turn}",
            prompt_ids=ids,
            frames=(*(f for t in self._turns[start:] for f in t.frames), self._frame),
            seed=derive_seed(
                spec.run_seed, spec.stream, spec.step, task.index, self.place.member, turn, bits=31
            ),
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
        )

    async def take(self, reply: Reply) -> None:
        """Act on a sampled reply."""
        text = self._decode(reply.ids)
        parsed = parse_action(text, self._spec.action_format, strict=self._spec.strict_actions)
        cut = reply.finish_reason == "length"
        result = await self._guard(self._env.step, parsed.action, parsed.error)
        observation = self._observation()
        self._turns.append(
            Turn(
                window_start=window_start(len(self._turns), self._spec.history),
                observation_ids=observation.following if self._turns else observation.opening,
                opening_ids=observation.opening,
                frames=(self._frame,),
                reply_ids=reply.ids,
                logprobs=reply.logprobs,
                closing_ids=self._renderer.closing_ids(reply.ids),
                finish_reason=reply.finish_reason,
                text=text,
                action=parsed.action,
                parse_error=parsed.error,
                feedback=result.feedback if result else "",
                executed=result.executed if result else False,
                cached_tokens=reply.cached_tokens,
            )
        )
        if result is None:
            return
        self._show(result.frame)
        self._feedback = result.feedback
        if result.success and result.terminated:
            self.outcome = Outcome.SOLVED
        elif result.terminated:
            self.outcome = Outcome.STOPPED
        elif result.truncated:
            self.outcome = Outcome.TURN_LIMIT
        elif cut and self._spec.end_on_reply_cut:
            self.outcome = Outcome.REPLY_CUT
        elif parsed.action is None and self._spec.end_on_parse_failure:
            self.outcome = Outcome.PARSE_FAILURE

    def finish(self) -> Episode:
        """The record of the episode; reward from success and form alone."""
        assert self.outcome is not None
        reward = 0.0
        if not self.outcome.is_failure:
            well_formed = bool(self._turns) and all(t.action is not None for t in self._turns)
            reward += self._spec.task_reward * (self.outcome is Outcome.SOLVED)
            reward += self._spec.format_reward * well_formed
        return Episode(
            task=self.place.task,
            member=self.place.member,
            policy_version=self._spec.policy_version,
            engine=self._engine,
            prefix_ids=self._renderer.prefix_ids if self._renderer else (),
            turns=tuple(self._turns),
            outcome=self.outcome,
            reward=reward,
            final_frame=self._frame,
            error=self._error,
        )

    def _observation(self) -> Observation:
        height, width = self._frames[self._frame].shape[:2]
        return self._renderer.observation(self._feedback, (self._vision.num_tokens(height, width),))

    def _show(self, frame: np.ndarray) -> None:
        self._frame = frame_hash(frame)
        self._frames.setdefault(self._frame, frame)

    async def _guard(self, call: Callable, *args) -> StepResult | np.ndarray | None:
        """Run a call of the environment; when it raises or hangs, the episode ends, not the run."""
        try:
            if self._spec.env_timeout_s is None:
                return call(*args)
            return await _bounded(call, args, self._spec.env_timeout_s)
        except _Hung:
            self._error = f"no answer within env.step_timeout_s={self._spec.env_timeout_s}"
        except Exception as error:  # an environment may raise anything; it is recorded and counted
            self._error = f"{type(error).__name__}: {error}"
        self.outcome = Outcome.ENV_ERROR
        return None


class _Hung(Exception):
    """A call did not return in time. Not TimeoutError, which an environment may raise itself."""


async def _bounded(call: Callable, args: tuple, timeout_s: float):
    """The result of a call in a thread of its own. In a pool, calls that hang would take all of the
    threads from the environments that do not, and keep the process from ending."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name="environment").start()
    waiting = asyncio.wrap_future(future)
    done, _ = await asyncio.wait([waiting], timeout=timeout_s)
    if not done:
        raise _Hung
    return waiting.result()

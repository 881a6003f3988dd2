"""What the stages hand each other: tasks, groups of episodes, samples, micro-batches, reports.

A worked example, two turns with one image each, `history=full`. `S` system ids, `O0 O1` observation
ids as the chat template writes them (each holds its image pads, already expanded), `A0 A1` sampled
reply ids. Reply `A0` ended with the template's end-of-turn token; `A1` was cut by the token limit,
so the template's `<|im_end|>` is not part of it and would be its `closing_ids`:

    context of turn 0   S O0
    context of turn 1   S O0 A0 O1
    sample              S  O0  A0  O1  A1
    loss mask           0  0   1   0   1
    logprobs (engine)   -  -   l0  -   l1
    advantage           -  -   a   -   a      (one scalar an episode)

With `history=1` the same episode gives two samples, `S O0 A0` and `S O1 A1`, each sampled token
trained exactly once and both with the episode's advantage.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np


def frame_hash(frame: np.ndarray) -> str:
    """Content hash of one frame (uint8, height x width x 3): equal frames, equal hash."""
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        raise ValueError(f"a frame is uint8 [height, width, 3], not {frame.dtype} {frame.shape}")
    digest = hashlib.sha256(repr(frame.shape).encode())
    digest.update(np.ascontiguousarray(frame))
    return digest.hexdigest()[:32]


class Outcome(StrEnum):
    """Every way in which an episode can end."""

    SOLVED = "solved"  # the environment says success
    STOPPED = "stopped"  # the agent stopped elsewhere than at the goal
    TURN_LIMIT = "turn_limit"  # `env.max_turns` replies were given
    CONTEXT_LIMIT = "context_limit"  # no room for another observation and reply
    REPLY_CUT = "reply_cut"  # a reply hit `rollout.max_tokens` and `env.on_cut=end`
    PARSE_FAILURE = "parse_failure"  # no action in the reply and `env.on_parse_failure=end`
    ENGINE_LOST = "engine_lost"  # the engine died or stopped answering
    ENV_ERROR = "env_error"  # the environment raised or hung

    @property
    def is_failure(self) -> bool:
        """The system failed, not the agent: no reward, no loss, no part in group statistics."""
        return self in (Outcome.ENGINE_LOST, Outcome.ENV_ERROR)

    @property
    def is_terminated(self) -> bool:
        """The environment itself ended the episode."""
        return self in (Outcome.SOLVED, Outcome.STOPPED)


@dataclass(frozen=True, slots=True)
class Task:
    """One maze: an environment id and a seed. `index` is its place in the stream or set."""

    env_id: str
    seed: int
    index: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers to one action."""

    frame: np.ndarray
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    executed: bool
    feedback: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One model reply and the environment step it caused.

    `observation_ids` follow the previous reply; `opening_ids` are the same observation as the first
    message of a history window (they differ only where the template treats a first message
    differently). Both are expanded: one id per image pad.
    """

    window_start: int  # first turn that the model saw when it sampled this reply
    observation_ids: tuple[int, ...]
    opening_ids: tuple[int, ...]
    frames: tuple[str, ...]  # hashes of the images inside the observation, in order
    reply_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # [len(reply_ids)], of the processed distribution
    closing_ids: tuple[int, ...]  # what the template adds to a reply that did not end itself
    finish_reason: str  # "stop" or "length"
    text: str
    action: str | None  # None: the reply could not be parsed
    parse_error: str | None
    feedback: str
    executed: bool
    cached_tokens: int = 0  # prompt tokens that the engine took from its prefix cache


@dataclass(frozen=True, slots=True)
class Episode:
    """All turns of one run at one task."""

    task: Task
    member: int  # place in its group
    policy_version: int
    engine: int
    prefix_ids: tuple[int, ...]  # what stands before the first observation
    turns: tuple[Turn, ...]
    outcome: Outcome
    reward: float
    final_frame: str  # hash of the frame after the last turn
    error: str | None = None

    @property
    def success(self) -> bool:
        return self.outcome is Outcome.SOLVED

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.reply_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task, all sampled by one policy version."""

    task: Task
    episodes: tuple[Episode, ...]

    @property
    def valid(self) -> tuple[Episode, ...]:
        """The episodes that count: those that the system did not fail."""
        return tuple(e for e in self.episodes if not e.outcome.is_failure)


@dataclass(frozen=True, slots=True)
class Sample:
    """Training form of an episode, or of a history window of it.

    Shapes: `ids`, `loss_mask`, `behavior_logprobs` are [length]; a position that has loss is the
    position of the sampled token itself (its log-prob is read one position earlier). `frames` has
    one hash per image in the order of the pads in `ids`.
    """

    ids: np.ndarray  # int64
    loss_mask: np.ndarray  # bool
    behavior_logprobs: np.ndarray  # float32, 0 where loss_mask is False
    after_image: np.ndarray  # bool: first sampled token of a turn whose observation held an image
    turn_index: np.ndarray  # int32, -1 where loss_mask is False
    frames: tuple[str, ...]
    episode: int  # index into the step's list of episodes, which its advantage is looked up by

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass of one rank takes. Empty: the rank only joins the collectives."""

    samples: tuple[Sample, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did, in the names that the metrics files use."""

    step: int
    metrics: dict[str, float]
    policy_version: int
    warnings: tuple[str, ...] = field(default=())

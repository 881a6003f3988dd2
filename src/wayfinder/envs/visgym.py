"""VisGym's tasks, when VisGym is installed.

VisGym is a fork of Gymnasium that replaces the `gymnasium` package; its environments add
`get_prompt()` and put a sentence about each action into `info["env_feedback"]`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from wayfinder.envs.maze2d import invalid_feedback
from wayfinder.envs.protocol import check_env_id
from wayfinder.errors import EnvError
from wayfinder.types import StepResult

EXECUTED = "Action executed successfully."  # VisGym's feedback for an action that took effect
_MAX_FEEDBACK = 300  # characters; VisGym repeats the whole action in some messages


def make_visgym(env_id: str) -> VisGymEnv:
    """The VisGym task `env_id`, such as `jigsaw/easy`. `EnvError` without VisGym."""
    if not hasattr(gymnasium, "VLMEnvMixin"):
        raise EnvError(
            f"env=visgym: {env_id!r} needs VisGym, but the installed gymnasium "
            f"{gymnasium.__version__} is the plain one; install VisGym from "
            "https://github.com/visgym/VisGym (it replaces gymnasium), or use env.kind=maze2d "
            "for maze_2d/easy and maze_2d/hard"
        )
    check_env_id(env_id, gymnasium.registry)
    return VisGymEnv(gymnasium.make(env_id))


class VisGymEnv:
    """A VisGym environment as the rollout sees it (`protocol.Env`).

    Wrappers are taken off, so that no registered step limit ends an episode. Frames come from
    `render()`: the observation that VisGym's `reset` returns can still show the last episode.

    VisGym tells no success apart from the reward. Success here means what VisGym's own tools check:
    the task terminated with the full reward of 1.
    """

    def __init__(self, env: Any) -> None:
        self._env = env.unwrapped

    def reset(self, seed: int) -> np.ndarray:
        self._env.reset(seed=seed)
        return self._frame()

    def step(self, action: str | None, parse_error: str | None = None) -> StepResult:
        if action is None:
            feedback = invalid_feedback(parse_error)
            return StepResult(self._frame(), 0.0, False, False, False, False, feedback)
        _, reward, terminated, truncated, info = self._env.step(action)
        feedback = str(info.get("env_feedback") or "")
        return StepResult(
            frame=self._frame(),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=bool(terminated) and float(reward) >= 1.0,
            executed=feedback == EXECUTED,
            feedback=_harmless(feedback),
        )

    def prompt(self, action_format: str) -> str:
        if action_format != "tuple":
            raise EnvError(
                "env.action_format: VisGym's instructions ask for tuples, so it must be 'tuple' "
                f"with env=visgym, not {action_format!r}"
            )
        return self._env.get_prompt()

    def close(self) -> None:
        self._env.close()

    def _frame(self) -> np.ndarray:
        frame = np.array(self._env.render())  # a copy: the environment may draw on its own
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise EnvError(
                f"env.id: render() of {type(self._env).__name__} gave {frame.dtype} {frame.shape}, "
                "expected an RGB frame, uint8 [height, width, 3]"
            )
        return frame


def _harmless(feedback: str) -> str:
    """Some messages repeat the payload of an action, which must not become special tokens."""
    return feedback[:_MAX_FEEDBACK].replace("<|", "< |")

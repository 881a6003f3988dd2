"""What the rollout asks of an environment, and the factory that makes one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Protocol

import numpy as np

from wayfinder.envs.maze2d import SIZES, Maze2DAdapter
from wayfinder.errors import EnvError
from wayfinder.types import StepResult

KINDS = ("maze2d", "visgym")


class Env(Protocol):
    """One environment; an object serves any number of episodes, one after the other.

    An environment never ends an episode for its length: the turn limit belongs to the rollout.
    Every frame (uint8 [height, width, 3]) is an array of its own that the caller may keep. What an
    environment raises is an outcome of the episode (`Outcome.ENV_ERROR`), never a reward.
    """

    def reset(self, seed: int) -> np.ndarray:
        """Starts the episode that `seed` names and gives its first frame."""
        ...

    def step(self, action: str | None, parse_error: str | None = None) -> StepResult:
        """Executes the text `action`.

        None: the reply could not be parsed, for the reason `parse_error`; nothing changes.
        """
        ...

    def prompt(self, action_format: str) -> str:
        """The instruction for the model, after `reset`: some tasks differ from seed to seed."""
        ...

    def close(self) -> None:
        """Frees what the environment holds. Calling it twice is allowed."""
        ...


def make_env(env_id: str, kind: str) -> Env:
    """A new environment. `EnvError` if there is none of that name, or VisGym is not installed."""
    if kind == "maze2d":
        check_env_id(env_id, SIZES)
        return Maze2DAdapter(env_id)
    if kind == "visgym":
        from wayfinder.envs.visgym import make_visgym

        return make_visgym(env_id)
    raise EnvError(f"env.kind: expected one of {list(KINDS)}, got {kind!r}")


def check_env_id(env_id: str, known: Iterable[str]) -> None:
    """Raises an `EnvError` that proposes the nearest of the `known` ids."""
    names = list(known)
    if env_id not in names:
        close = get_close_matches(env_id, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(names))}"
        raise EnvError(f"env.id: there is no environment {env_id!r}; {hint}")

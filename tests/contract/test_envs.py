"""One suite over every environment that the rollout can be given."""

import warnings
from itertools import pairwise

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from wayfinder.envs import visgym
from wayfinder.envs.maze2d import SIZES, Maze2DEnv, generate_maze, shortest_path
from wayfinder.envs.protocol import make_env
from wayfinder.envs.visgym import EXECUTED, VisGymEnv
from wayfinder.errors import EnvError
from wayfinder.types import StepResult, frame_hash

STOP = "('stop', 'stop')"


class VisGymMaze:
    """A maze behind the interface of VisGym's environments, with their peculiarities.

    `reset` answers with the last episode's picture, `render` draws on one canvas for ever, and
    messages repeat the action's text.
    """

    def __init__(self, env_id):
        self._maze = Maze2DEnv(env_id)
        self._canvas = None
        self.unwrapped = self

    def reset(self, *, seed=None, options=None):
        stale = self._canvas
        frame, _ = self._maze.reset(seed=seed)
        self._canvas = frame
        return stale, {"env_feedback": None}

    def step(self, action):
        frame, reward, terminated, truncated, info = self._maze.step(action)
        self._canvas[:] = frame
        feedback = EXECUTED if info["executed"] else f"Cannot do {action!r}."
        return self._canvas, reward, terminated, truncated, {"env_feedback": feedback}

    def render(self):
        return self._canvas

    def get_prompt(self):
        return f"A {self._maze.size}x{self._maze.size} maze. Reply with ('move', d)."

    def close(self):
        self._maze.close()


class WithTurnLimit:
    """A wrapper with a registered step limit of one, as Gymnasium's `TimeLimit` would put on."""

    def __init__(self, env):
        self.unwrapped = env

    def step(self, action):
        frame, reward, terminated, _, info = self.unwrapped.step(action)
        return frame, reward, terminated, True, info


MAKERS = {
    **{env_id: (env_id, lambda env_id=env_id: make_env(env_id, "maze2d")) for env_id in SIZES},
    "visgym": (
        "maze_2d/easy",
        lambda: VisGymEnv(WithTurnLimit(VisGymMaze("maze_2d/easy"))),
    ),
}


@pytest.fixture(params=list(MAKERS))
def made(request):
    env_id, make = MAKERS[request.param]
    env = make()
    yield env_id, make, env
    env.close()


def solution(env_id, seed):
    path = shortest_path(generate_maze(seed, SIZES[env_id]))
    moves = {(0, 1): 0, (-1, 0): 1, (0, -1): 2, (1, 0): 3}
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(path)]
    return [f"('move', {moves[step]})" for step in steps] + [STOP]


def run(env, seed, actions):
    """Hash of every frame and every other thing that the steps answer."""
    seen = [frame_hash(env.reset(seed))]
    for action in actions:
        r = env.step(action, None if action else "no action found")
        assert isinstance(r, StepResult)
        flags = (r.reward, r.terminated, r.truncated, r.success, r.executed, r.feedback)
        assert [type(flag) for flag in flags] == [float, bool, bool, bool, bool, str]
        seen.append((frame_hash(r.frame), *flags))
    return seen


def test_episodes_depend_on_the_seed_alone(made):
    """Not on the object that serves them nor on the length of the episodes before."""
    env_id, make, env = made
    actions = [*solution(env_id, 3)[:4], None, "nonsense", "('move', 9)", "('move', 1)", STOP]
    first = run(env, 3, actions)
    run(env, 4, ["('move', 0)"] * 7)
    assert run(env, 3, actions) == first
    assert run(make(), 3, actions) == first
    assert len({run(env, seed, [])[0] for seed in range(16)}) == 16


def test_the_goal_terminates_and_succeeds(made):
    env_id, _, env = made
    results = run(env, 0, solution(env_id, 0))
    for _, reward, terminated, truncated, success, executed, _ in results[1:-1]:
        assert (reward, terminated, truncated, success, executed) == (
            0.0,
            False,
            False,
            False,
            True,
        )
    assert results[-1][1:6] == (1.0, True, False, True, True)


def test_stopping_elsewhere_terminates_without_success(made):
    *_, env = made
    assert run(env, 0, [STOP])[-1][1:6] == (0.0, True, False, False, True)


def test_no_environment_limits_the_turns(made):
    *_, env = made
    results = run(env, 0, ["('move', 0)", "('move', 2)", None, "?"] * 50)
    assert not any(result[2] or result[3] for result in results[1:])


@pytest.mark.parametrize("action", [None, "", "?", "('move', 9)", "('stop', '')", "(" * 600])
def test_what_is_not_an_action_changes_nothing_and_is_told(made, action):
    *_, env = made
    first, result = run(env, 0, [action])
    assert result[:6] == (first, 0.0, False, False, False, False)
    assert result[6]  # the feedback


def test_feedback_brings_no_special_tokens(made):
    *_, env = made
    for action, error in (("('move', '<|image_pad|>')", None), (None, "unknown action 'x'")):
        env.reset(0)
        assert "<|" not in env.step(action, error).feedback


def test_frames_belong_to_the_caller(made):
    env_id, _, env = made
    frames, hashes = [], []
    for action in [None, *solution(env_id, 0)]:
        frame = env.step(action).frame if action else env.reset(0)
        assert frame.dtype == np.uint8
        assert frame.flags.writeable
        frames.append(frame)
        hashes.append(frame_hash(frame))
    env.reset(1)
    assert [frame_hash(frame) for frame in frames] == hashes


def test_the_prompt_is_text(made):
    *_, env = made
    env.reset(0)
    assert "('move', d)" in env.prompt("tuple")
    env.close()
    env.close()  # twice is allowed


@pytest.mark.parametrize("env_id", list(SIZES))
def test_the_maze_follows_gymnasium(env_id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*not having a spec.*")
        check_env(Maze2DEnv(env_id, render_mode="rgb_array"))


def test_a_gymnasium_reset_without_seed_goes_on_in_the_stream():
    env = Maze2DEnv()
    env.reset(seed=5)
    second, _ = env.reset()
    third, _ = env.reset()
    assert (second != third).any()
    env.reset(seed=5)
    np.testing.assert_array_equal(env.reset()[0], second)


@pytest.mark.parametrize(
    ("env_id", "kind", "message"),
    [
        ("maze_2d/eazy", "maze2d", "did you mean 'maze_2d/easy'"),
        ("chess", "maze2d", r"known: maze_2d/easy, maze_2d/hard"),
        ("maze_2d/easy", "maze3d", r"env\.kind: expected one of \['maze2d', 'visgym'\]"),
    ],
)
def test_unknown_environments_are_refused_with_a_hint(env_id, kind, message):
    with pytest.raises(EnvError, match=message):
        make_env(env_id, kind)


@pytest.mark.skipif(hasattr(gymnasium, "VLMEnvMixin"), reason="VisGym is installed")
def test_without_visgym_the_mend_is_told():
    with pytest.raises(EnvError, match=r"needs VisGym.*install VisGym from.*env\.kind=maze2d"):
        make_env("jigsaw/easy", "visgym")


def test_visgym_speaks_tuples_only():
    env = VisGymEnv(VisGymMaze("maze_2d/easy"))
    with pytest.raises(EnvError, match=r"env\.action_format"):
        env.prompt("keyword")


def test_visgym_success_is_the_full_reward_and_partial_credit_is_not():
    maze = VisGymMaze("maze_2d/easy")
    env = VisGymEnv(maze)
    env.reset(0)
    maze.step = lambda action: (None, 0.5, True, False, {"env_feedback": EXECUTED})
    result = env.step(STOP)
    assert (result.reward, result.terminated, result.success) == (0.5, True, False)


def test_a_picture_that_is_no_frame_is_an_environment_error():
    maze = VisGymMaze("maze_2d/easy")
    maze.render = lambda: np.zeros((4, 4), np.float32)
    with pytest.raises(EnvError, match=r"expected an RGB frame"):
        VisGymEnv(maze).reset(0)


def test_long_messages_are_cut():
    env = VisGymEnv(VisGymMaze("maze_2d/easy"))
    env.reset(0)
    assert len(env.step("x" * 5000).feedback) == visgym._MAX_FEEDBACK

"""Our maze against what VisGym itself did (`visgym/README.md` says how that was recorded)."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from wayfinder.envs.maze2d import (
    CELL_PIXELS,
    SIZES,
    Maze2DEnv,
    distance_map,
    generate_maze,
    render,
    shortest_path,
)

FOLDER = Path(__file__).parent / "visgym"
LEVELS = json.loads((FOLDER / "maze_2d.json").read_text())["levels"]
TRACES = [(level, n) for level, data in LEVELS.items() for n in range(len(data["traces"]))]


def sha256(frame):
    return hashlib.sha256(np.ascontiguousarray(frame)).hexdigest()


@pytest.fixture(scope="module")
def recorded_frames():
    frames = {}
    for level in LEVELS:
        with np.load(FOLDER / f"frames_{level}.npz") as archive:
            frames |= {name: archive[name] for name in archive.files}
    return frames


@pytest.mark.parametrize("level", LEVELS)
def test_every_recorded_maze_is_reproduced(level):
    data = LEVELS[level]
    assert SIZES[f"maze_2d/{level}"] == data["height"] == data["width"]
    assert data["cell_pixels"] == CELL_PIXELS
    assert len(data["mazes"]) == 32
    for recorded in data["mazes"]:
        maze = generate_maze(recorded["seed"], data["height"])
        rows = ["".join("#" if wall else "." for wall in row) for row in maze.walls]
        assert rows == recorded["map"]
        assert maze.agent == tuple(recorded["agent"])
        assert maze.target == tuple(recorded["target"])
        assert distance_map(maze)[maze.agent] == recorded["optimal_moves"]
        assert len(shortest_path(maze)) == recorded["optimal_moves"] + 1
        assert sha256(render(maze)) == recorded["frame_sha256"]


@pytest.mark.parametrize(("level", "number"), TRACES)
def test_every_recorded_step_is_reproduced(level, number, recorded_frames):
    trace = LEVELS[level]["traces"][number]
    label = "solved" if trace.get("solved") else trace["seed"]
    env = Maze2DEnv(f"maze_2d/{level}")
    env.reset(seed=trace["seed"])
    for place, step in enumerate(trace["steps"], start=1):
        frame, reward, terminated, truncated, info = env.step(step["action"])
        assert sha256(frame) == step["frame_sha256"], (place, step["action"])
        assert list(env.agent) == step["agent"], (place, step["action"])
        for name, found in (
            ("reward", reward),
            ("terminated", terminated),
            ("truncated", truncated),
            ("executed", info["executed"]),
        ):
            assert found == step[name], (place, step["action"], name)
        expected = recorded_frames.get(f"{level}_{label}_{place}")
        if expected is not None:
            np.testing.assert_array_equal(frame, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_the_recorded_first_frames_are_what_a_reset_of_visgym_answers(level, recorded_frames):
    """VisGym's `reset` answers with the canvas of the episode before, the new agent painted in.

    Only its `render()` shows the new maze; that is what we give, and what the hashes in the JSON
    file are of.
    """
    env = Maze2DEnv(f"maze_2d/{level}")
    canvas = None
    for trace in LEVELS[level]["traces"][:-1]:
        frame, _ = env.reset(seed=trace["seed"])
        stale = frame.copy()
        if canvas is not None:
            agent = (frame == (0, 0, 255)).all(axis=-1)
            stale = np.where(agent[:, :, None], frame, canvas)
        np.testing.assert_array_equal(stale, recorded_frames[f"{level}_{trace['seed']}_0"])
        for step in trace["steps"]:
            canvas = env.step(step["action"])[0]


def test_the_recorded_target_keeps_the_hole_that_a_visit_leaves(recorded_frames):
    maze = generate_maze(0, SIZES["maze_2d/easy"])
    left_again = recorded_frames["easy_solved_13"]
    beside = shortest_path(maze)[-2]
    np.testing.assert_array_equal(render(maze, beside, target_left=True), left_again)
    assert (render(maze, beside) != left_again).any()

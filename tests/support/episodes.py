"""Hand-made episodes in real mazes, for tests of what happens to episodes afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from wayfinder.envs.maze2d import MOVES, generate_maze, render, shortest_path
from wayfinder.types import Episode, Outcome, Task, Turn, frame_hash

ENV_ID = "maze_2d/easy"
SIZE = 9
IMAGE_PAD = 9
NUM_PADS = 81


def expert_moves(seed: int) -> list[int]:
    """Directions of the shortest path through the maze of `seed`."""
    path = shortest_path(generate_maze(seed, SIZE))
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(path)]
    return [MOVES.index(step) for step in steps]


def walk(
    seed: int,
    moves: Sequence[int | str | None],
    outcome: Outcome,
    frames: dict[str, np.ndarray],
    member: int = 0,
) -> Episode:
    """The episode of a scripted agent; its frames are added to `frames`.

    A move is a direction 0..3, "stop", or None for a reply without an action.
    """
    maze = generate_maze(seed, SIZE)
    cell = maze.agent
    shown = _store(render(maze, cell), frames)
    turns = []
    for number, move in enumerate(moves):
        executed = move == "stop"
        before = shown
        if isinstance(move, int):
            there = (cell[0] + MOVES[move][0], cell[1] + MOVES[move][1])
            executed = not maze.walls[there]
            cell = there if executed else cell
            shown = _store(render(maze, cell), frames)
        turns.append(_turn(number, move, executed, before))
    return Episode(
        task=Task(ENV_ID, seed, seed),
        member=member,
        policy_version=7,
        engine=0,
        prefix_ids=(1, 2, 3),
        turns=tuple(turns),
        outcome=outcome,
        reward=float(outcome is Outcome.SOLVED),
        final_frame=shown,
    )


def _turn(number: int, move: int | str | None, executed: bool, frame: str) -> Turn:
    observation = (4, *([IMAGE_PAD] * NUM_PADS), 5)
    action = {None: None, "stop": "('stop', 'stop')"}.get(move, f"('move', {move})")
    return Turn(
        window_start=0,
        observation_ids=observation,
        opening_ids=observation if number else (3, *observation),
        frames=(frame,),
        reply_ids=(20 + number, 21, 22),
        logprobs=(-0.1 * number, -1.25e-7, float(np.float32(-0.3))),
        closing_ids=(6,) if move is None else (),
        finish_reason="length" if move is None else "stop",
        text=action or "I see a wall \u2588 and",
        action=action,
        parse_error=None if action else "no action",
        feedback="Moved." if executed else "Wall.",
        executed=executed,
        cached_tokens=32 * number,
    )


def _store(frame: np.ndarray, frames: dict[str, np.ndarray]) -> str:
    name = frame_hash(frame)
    frames[name] = frame
    return name

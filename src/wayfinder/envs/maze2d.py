"""The 2-D maze of VisGym, reproduced: the same seed gives the same maze, the same actions the same
states, and every frame is equal pixel for pixel. Needs neither VisGym nor pygame.

Cells are (row, column). Directions are those of the actions: 0 right, 1 up, 2 left, 3 down.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_letters, digits, printable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding

from wayfinder.chat.parse import STOP_TEXT, action_text, error_reason, find_format, literal_tuple
from wayfinder.types import StepResult

SIZES = {"maze_2d/easy": 9, "maze_2d/hard": 11}  # cells a side, outer walls included
CELL_PIXELS = 25
MOVES = ((0, 1), (-1, 0), (0, -1), (1, 0))  # (rows, columns) of the directions 0..3

Cell = tuple[int, int]

FLOOR_COLOR = (255, 255, 255)
WALL_COLOR = (169, 169, 169)
TARGET_COLOR = (255, 0, 0)
AGENT_COLOR = (0, 0, 255)

# The disc is what pygame draws at the centre of a cell with a radius of a quarter of it:
# 12 x 12 pixels, six pixels off the cell's upper left corner.
_DISC_WIDTHS = (4, 6, 8, 10, 12, 12, 12, 12, 10, 8, 6, 4)
_DISC_OFFSET = 6
_DISC_SIZE = len(_DISC_WIDTHS)
_DISC = np.array(
    [[abs(2 * x + 1 - _DISC_SIZE) < width for x in range(_DISC_SIZE)] for width in _DISC_WIDTHS]
)[:, :, None]


def _disc_tile(color: tuple[int, int, int], ground: tuple[int, int, int]) -> np.ndarray:
    return np.where(_DISC, np.uint8(color), np.uint8(ground))


_AGENT_ON_FLOOR = _disc_tile(AGENT_COLOR, FLOOR_COLOR)
_AGENT_ON_TARGET = _disc_tile(AGENT_COLOR, TARGET_COLOR)
_HOLE_IN_TARGET = _disc_tile(FLOOR_COLOR, TARGET_COLOR)


# One row of pixels of a floor, a wall and a target cell: uint8 [3, 25 * 3].
_CELL_ROWS = np.array([FLOOR_COLOR, WALL_COLOR, TARGET_COLOR], np.uint8).repeat(CELL_PIXELS, axis=0)
_CELL_ROWS = _CELL_ROWS.reshape(3, -1)


@dataclass(frozen=True, eq=False, slots=True)
class Maze:
    """A maze and the two corners. Compare mazes by `layout_key`."""

    walls: np.ndarray  # bool [height, width], read-only
    agent: Cell  # where the agent starts
    target: Cell


@lru_cache(maxsize=1024)
def generate_maze(seed: int, size: int) -> Maze:
    """The maze that VisGym makes for `seed`, `size` x `size` cells."""
    generator, _ = seeding.np_random(seed)
    return _draw_maze(generator, size)


def _draw_maze(generator: np.random.Generator, size: int) -> Maze:
    """Takes two draws from `generator`: the seed of the layout, then the corner pair."""
    walls = _spanning_tree(int(generator.integers(2**32)), size)
    walls.flags.writeable = False
    near, far = 1, size - 2
    agent, target = (
        ((near, near), (far, far)),
        ((far, far), (near, near)),
        ((far, near), (near, far)),
        ((near, far), (far, near)),
    )[int(generator.integers(0, 4))]
    return Maze(walls, agent, target)


def _spanning_tree(seed: int, size: int) -> np.ndarray:
    """Walls (bool [size, size]) of a uniform spanning tree on the rooms at odd cells.

    Wilson's algorithm (1996): loop-erased random walks until every room is in the tree. Rooms are
    numbered in row-major order.
    """
    if size < 3 or size % 2 == 0:
        raise ValueError(f"a maze has an odd number of cells a side, at least 3, not {size}")
    side = size // 2
    draw = _draw_below(random.Random(seed))
    # Directions inside the generator, unlike those of actions: right, down, left, up.
    neighbors = [
        (
            room + 1 if room % side < side - 1 else None,
            room + side if room + side < side * side else None,
            room - 1 if room % side else None,
            room - side if room >= side else None,
        )
        for room in range(side * side)
    ]
    walls = np.ones((size, size), dtype=bool)
    walls[1::2, 1::2] = False
    outside = list(range(side * side))  # rooms that are not in the tree yet
    inside = {outside.pop(draw(len(outside)))}
    while outside:
        start = room = outside[draw(len(outside))]
        way_out: dict[int, int] = {}  # the last way out of a room is what erases the loops
        while room not in inside:
            following = neighbors[room][draw(4)]
            while following is None:
                following = neighbors[room][draw(4)]
            way_out[room] = following
            room = following
        room = start
        while room not in inside:
            inside.add(room)
            outside.remove(room)
            following = way_out[room]
            # The wall between two rooms lies halfway: the sum of room coordinates, plus one.
            row = room // side + following // side + 1
            walls[row, room % side + following % side + 1] = False
            room = following
    return walls


def _draw_below(source: random.Random) -> Callable[[int], int]:
    """`draw(n)` gives what `source.randint(0, n - 1)` would, at a third of its cost."""
    getrandbits = source.getrandbits

    def draw(n: int) -> int:
        bits = n.bit_length()
        value = getrandbits(bits)
        while value >= n:
            value = getrandbits(bits)
        return value

    return draw


def layout_key(maze: Maze) -> str:
    """A hash of size, walls and corners: equal mazes, equal key, whatever their seeds."""
    digest = hashlib.sha256(repr((maze.walls.shape, maze.agent, maze.target)).encode())
    digest.update(np.packbits(maze.walls).tobytes())
    return digest.hexdigest()[:32]


def distance_map(maze: Maze) -> np.ndarray:
    """Moves from each cell to the target, int32 [height, width]; -1 for walls."""
    height, width = maze.walls.shape
    # One flat list: the outer walls make every neighbour of a floor cell a valid place.
    distances = np.where(maze.walls, -1, -2).ravel().tolist()  # -2: floor, not reached yet
    steps = (1, -width, -1, width)
    row, column = maze.target
    frontier = [row * width + column]
    distances[frontier[0]] = distance = 0
    while frontier:
        distance += 1
        reached = []
        for place in frontier:
            for step in steps:
                if distances[place + step] == -2:
                    distances[place + step] = distance
                    reached.append(place + step)
        frontier = reached
    return np.array(distances, dtype=np.int32).reshape(height, width)


def shortest_path(maze: Maze, start: Cell | None = None) -> list[Cell]:
    """The cells from `start` (the agent's corner if None) to the target, both included.

    In a spanning tree it is the only path without detours.
    """
    distances = distance_map(maze)
    row, column = maze.agent if start is None else start
    left = int(distances[row, column])
    if left < 0:
        raise ValueError(f"cell {(row, column)} is a wall")
    path = [(row, column)]
    while left:
        left -= 1
        row, column = next(
            (row + down, column + right)
            for down, right in MOVES
            if distances[row + down, column + right] == left
        )
        path.append((row, column))
    return path


def render(maze: Maze, agent: Cell | None = None, target_left: bool = False) -> np.ndarray:
    """One frame, uint8 [height * 25, width * 25, 3], with the agent on `agent` (its start if None).

    `target_left`: the agent has stood on the target and left it. The canvas of an episode is
    painted over, never cleared, so the disc that wipes the agent out leaves a hole in the target.
    """
    frame = _ground(maze)
    if target_left:
        _paint(frame, maze.target, _HOLE_IN_TARGET)
    cell = maze.agent if agent is None else agent
    _paint(frame, cell, _AGENT_ON_TARGET if cell == maze.target else _AGENT_ON_FLOOR)
    return frame


def _ground(maze: Maze) -> np.ndarray:
    """The frame without the agent."""
    height, width = maze.walls.shape
    kinds = maze.walls.astype(np.intp)
    kinds[maze.target] = 2
    frame = np.empty((height * CELL_PIXELS, width * CELL_PIXELS, 3), dtype=np.uint8)
    # All pixel rows of a row of cells are the same.
    rows = frame.reshape(height, CELL_PIXELS, -1)
    rows[...] = _CELL_ROWS[kinds].reshape(height, 1, -1)
    return frame


def _paint(frame: np.ndarray, cell: Cell, tile: np.ndarray) -> None:
    top = cell[0] * CELL_PIXELS + _DISC_OFFSET
    left = cell[1] * CELL_PIXELS + _DISC_OFFSET
    frame[top : top + _DISC_SIZE, left : left + _DISC_SIZE] = tile


_ALPHANUMERIC = frozenset(ascii_letters + digits)
_CANONICAL: dict[str, tuple[object, object]] = {
    **{action_text(direction): ("move", direction) for direction in range(len(MOVES))},
    STOP_TEXT: ("stop", "stop"),
}


class Maze2DEnv(gymnasium.Env[np.ndarray, str]):
    """`maze_2d/easy` or `maze_2d/hard` with Gymnasium's API.

    Actions are text: `('move', d)` with an integer d in 0..3, or `('stop', s)` with 1 to 4 letters
    or digits. As in VisGym, the text is a Python literal and `True` counts as the integer 1. What
    is invalid, or runs into a wall, changes nothing. Only stopping terminates, with a reward of
    1.0 on the target and else 0.0. There is no turn limit: whoever runs episodes owns it.

    `info`: `executed` (the action took effect), `feedback` (a short sentence for the agent) and
    `success` (stopped on the target).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 (Gymnasium's name)

    def __init__(self, env_id: str = "maze_2d/easy", render_mode: str | None = None) -> None:
        self.size = SIZES[env_id]
        self.render_mode = render_mode
        pixels = self.size * CELL_PIXELS
        self.observation_space = spaces.Box(0, 255, (pixels, pixels, 3), np.uint8)
        self.action_space = spaces.Text(64, min_length=0, charset=printable)
        self.maze: Maze | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.maze = _draw_maze(self.np_random, self.size)
        self._walls = self.maze.walls.tolist()
        self._canvas = _ground(self.maze)
        self.agent = self.maze.agent
        return self._frame(), {"executed": False, "feedback": "", "success": False}

    def step(self, action: str) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.maze is not None, "reset() comes before step()"
        name, payload = _CANONICAL.get(action) or literal_tuple(action) or (None, None)
        executed = stopped = False
        if name is None:
            feedback = "Invalid: not an action."
        elif name == "move":
            if not (isinstance(payload, int) and 0 <= payload < len(MOVES)):
                feedback = "Invalid: payload out of range."
            elif self._move(payload):
                executed, feedback = True, "Moved."
            else:
                feedback = "Wall."
        elif name == "stop":
            if not _is_stop_payload(payload):
                feedback = "Invalid: payload out of range."
            else:
                executed = stopped = True
                feedback = "Stopped."
        else:
            feedback = "Invalid: unknown action."
        success = stopped and self.agent == self.maze.target
        info = {"executed": executed, "feedback": feedback, "success": success}
        return self._frame(), float(success), stopped, False, info

    def render(self) -> np.ndarray:
        assert self.maze is not None, "reset() comes before render()"
        return self._frame()

    def _move(self, direction: int) -> bool:
        down, right = MOVES[direction]
        row, column = self.agent
        if self._walls[row + down][column + right]:
            return False
        if self.agent == self.maze.target:
            _paint(self._canvas, self.agent, _HOLE_IN_TARGET)
        self.agent = (row + down, column + right)
        return True

    def _frame(self) -> np.ndarray:
        """A frame of its own: the caller may keep it."""
        frame = self._canvas.copy()
        on_target = self.agent == self.maze.target
        _paint(frame, self.agent, _AGENT_ON_TARGET if on_target else _AGENT_ON_FLOOR)
        return frame


def _is_stop_payload(payload: object) -> bool:
    return isinstance(payload, str) and 1 <= len(payload) <= 4 and _ALPHANUMERIC.issuperset(payload)


def invalid_feedback(parse_error: str | None) -> str:
    """What an environment says to a reply without an action. Never quotes the reply."""
    return f"Invalid: {error_reason(parse_error or 'not an action')}."


class Maze2DAdapter:
    """`Maze2DEnv` as the rollout sees it (`protocol.Env`)."""

    def __init__(self, env_id: str) -> None:
        self._env = Maze2DEnv(env_id)

    def reset(self, seed: int) -> np.ndarray:
        frame, _ = self._env.reset(seed=seed)
        return frame

    def step(self, action: str | None, parse_error: str | None = None) -> StepResult:
        if action is None:
            feedback = invalid_feedback(parse_error)
            return StepResult(self._env.render(), 0.0, False, False, False, False, feedback)
        frame, reward, terminated, truncated, info = self._env.step(action)
        return StepResult(frame, reward, terminated, truncated, **info)

    def prompt(self, action_format: str) -> str:
        lines = (
            "You see a maze from above: gray walls, white floor. You are the blue disc.",
            "Walk to the red square, one cell a turn, and stop on it.",
            *find_format(action_format).instructions,
        )
        return "\n".join(lines)

    def close(self) -> None:
        self._env.close()

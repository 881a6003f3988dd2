"""Demonstrations for the preparation: mazes, situations, cell labels, and moves of the solver.

Every example is a function of (seed, stage, index), so a stage that goes on after an interruption
sees what it would have seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wayfinder.chat.parse import STOP, Action
from wayfinder.config.sft import NoiseConfig, SituationConfig
from wayfinder.envs.maze2d import MOVES, SIZES, Cell, Maze, distance_map, generate_maze, layout_key
from wayfinder.envs.tasks import SEED_BITS, evaluation_tasks, forbidden_layouts
from wayfinder.seeding import derive_seed

# Kinds of a cell, as the picture shows them.
WALL, FLOOR, TARGET, TARGET_LEFT, AGENT, AGENT_ON_TARGET = range(6)
NUM_KINDS = 6
# What a cell's direction label can be: the four moves, or "here" on the target itself.
HERE = len(MOVES)
NUM_DIRECTIONS = len(MOVES) + 1
NO_LABEL = -100  # walls have no direction; the value that cross entropy leaves out

# What the environment says after a turn, with what it says about the state: all of these leave the
# agent where it is except the first.
MOVED = "Moved."
BUMPED = "Wall."
REFUSED = (
    "Invalid: no action found.",
    "Invalid: empty reply.",
    "Invalid: not an action.",
    "Invalid: unknown action.",
    "Invalid: payload out of range.",
    "Invalid: unknown direction.",
)
FEEDBACKS = ("", MOVED, BUMPED, *REFUSED)


@dataclass(frozen=True, slots=True)
class Situation:
    """A maze in the middle of an episode, and what the environment said last."""

    maze: Maze
    distances: np.ndarray  # int32 [height, width], moves to the target, -1 for walls
    agent: Cell
    target_left: bool  # the agent has stood on the target before
    feedback: str

    @property
    def at_target(self) -> bool:
        return self.agent == self.maze.target


class Situations:
    """An endless stream of situations on mazes that no evaluation set holds."""

    def __init__(
        self, env_id: str, seed: int, name: str, forbidden: frozenset[str], config: SituationConfig
    ):
        self._size = SIZES[env_id]
        self._seed = seed
        self._name = name
        self._forbidden = forbidden
        self._config = config

    def __getitem__(self, index: int) -> tuple[Situation, np.random.Generator]:
        """Situation `index`, and the generator that drew it, for whatever else is drawn."""
        rng = np.random.default_rng(derive_seed(self._seed, "sft", self._name, index))
        maze = self._draw_maze(rng)
        distances = distance_map(maze)
        return self._draw_situation(maze, distances, rng), rng

    def _draw_maze(self, rng: np.random.Generator) -> Maze:
        while True:
            maze = generate_maze(int(rng.integers(2**SEED_BITS)), self._size)
            if layout_key(maze) not in self._forbidden:
                return maze

    def _draw_situation(
        self, maze: Maze, distances: np.ndarray, rng: np.random.Generator
    ) -> Situation:
        config = self._config
        draw = rng.random(4)
        if draw[0] < config.start:
            return Situation(maze, distances, maze.agent, False, "")
        if draw[0] < config.start + config.at_target:
            agent = maze.target
        else:
            rows, columns = np.nonzero(distances >= 0)
            place = int(rng.integers(len(rows)))
            agent = (int(rows[place]), int(columns[place]))
        feedback = MOVED
        if draw[1] < config.bumped:
            feedback = BUMPED
        elif draw[1] < config.bumped + config.refused:
            feedback = REFUSED[int(rng.integers(len(REFUSED)))]
        target_left = agent != maze.target and draw[2] < config.target_left
        return Situation(maze, distances, agent, target_left, feedback)


def reserved_layouts(env_id: str, sets: list[list[int]]) -> frozenset[str]:
    """Layout keys of the reserved sets, each given as [first seed, count]."""
    tasks = [t for first, count in sets for t in evaluation_tasks(env_id, first, count)]
    return forbidden_layouts(tasks)


def cell_kinds(situation: Situation) -> np.ndarray:
    """What each cell shows, int64 [height, width]."""
    maze = situation.maze
    kinds = np.where(maze.walls, WALL, FLOOR)
    kinds[maze.target] = TARGET_LEFT if situation.target_left else TARGET
    kinds[situation.agent] = AGENT_ON_TARGET if situation.at_target else AGENT
    return kinds


def cell_directions(situation: Situation) -> np.ndarray:
    """The first move of the way to the target from each floor cell, int64 [height, width].

    `HERE` on the target, `NO_LABEL` on walls. The way is unique, because the maze is a tree.
    """
    distances = situation.distances
    labels = np.full(distances.shape, NO_LABEL, dtype=np.int64)
    floor = distances >= 0
    for direction, (down, right) in enumerate(MOVES):
        # The outer walls make the wrapped-around neighbour of a floor cell a wall: never nearer.
        neighbor = np.roll(distances, (-down, -right), axis=(0, 1))
        labels[floor & (neighbor >= 0) & (neighbor < distances)] = direction
    labels[situation.maze.target] = HERE
    return labels


def expert_action(situation: Situation) -> Action:
    """What a perfect agent does here: the move toward the target, or stop on it."""
    if situation.at_target:
        return STOP
    return next(d for d, left in _open_moves(situation) if left < _distance(situation))


def noisy_action(situation: Situation, noise: NoiseConfig, rng: np.random.Generator) -> Action:
    """What a sloppy demonstrator does here: detours, steps back, stops too early or too late."""
    draw = rng.random()
    if situation.at_target:
        if draw < noise.late_stop:
            return int(rng.integers(len(MOVES)))
        return STOP
    if draw < noise.wrong_stop:
        return STOP
    draw -= noise.wrong_stop
    if draw < noise.random_move:
        return int(rng.integers(len(MOVES)))
    draw -= noise.random_move
    if draw < noise.step_back:
        away = [d for d, left in _open_moves(situation) if left > _distance(situation)]
        if away:
            return away[int(rng.integers(len(away)))]
    return expert_action(situation)


def _distance(situation: Situation) -> int:
    return int(situation.distances[situation.agent])


def _open_moves(situation: Situation) -> list[tuple[int, int]]:
    """(direction, moves left after it) for every direction without a wall."""
    row, column = situation.agent
    around = [
        (direction, int(situation.distances[row + down, column + right]))
        for direction, (down, right) in enumerate(MOVES)
    ]
    return [(direction, left) for direction, left in around if left >= 0]

"""Which mazes are evaluated, which are trained on, and what can be reached on them.

A task is a function of (run seed, index) alone. No maze that is evaluated is ever trained on:
mazes are compared by layout and corners, because different seeds can give the same maze.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from wayfinder.envs.maze2d import SIZES, distance_map, generate_maze, layout_key
from wayfinder.errors import EnvError
from wayfinder.seeding import derive_seed
from wayfinder.types import Task

SEED_BITS = 31  # VisGym's tasks take seeds below 2**31
_MAX_ATTEMPTS = 1000


def evaluation_tasks(env_id: str, first_seed: int = 0, count: int = 64) -> list[Task]:
    """The fixed set with the seeds `first_seed`, `first_seed + 1`, ..."""
    if count < 1 or first_seed < 0 or first_seed + count > 2**SEED_BITS:
        raise ValueError(
            f"an evaluation set has seeds in 0..2**{SEED_BITS}-1 and at least one task, "
            f"not {count} tasks from seed {first_seed}"
        )
    return [Task(env_id, first_seed + index, index) for index in range(count)]


def task_key(task: Task) -> str:
    """Equal for two tasks that are the same problem: by layout for mazes, else by seed."""
    size = SIZES.get(task.env_id)
    if size is None:
        return f"{task.env_id}#{task.seed}"
    return layout_key(generate_maze(task.seed, size))


def forbidden_layouts(tasks: Iterable[Task]) -> frozenset[str]:
    """The keys that `TrainingTasks` must avoid so that `tasks` are never trained on."""
    return frozenset(task_key(task) for task in tasks)


@dataclass(frozen=True, slots=True)
class TrainingTasks:
    """The endless stream of training tasks of one run. Holds no cursor: any index, any order."""

    env_id: str
    run_seed: int
    forbidden: frozenset[str]  # of `forbidden_layouts`

    def task(self, index: int) -> Task:
        for attempt in range(_MAX_ATTEMPTS):
            seed = derive_seed(self.run_seed, "task", self.env_id, index, attempt, bits=SEED_BITS)
            task = Task(self.env_id, seed, index)
            if task_key(task) not in self.forbidden:
                return task
        raise EnvError(
            f"env.id: {_MAX_ATTEMPTS} seeds of {self.env_id!r} in a row gave evaluation tasks, "
            "so nothing is left to train on; make the evaluation set smaller (eval.tasks)"
        )


def optimal_moves(task: Task) -> int | None:
    """Moves of a perfect agent, without the final stop; None where it is not known."""
    size = SIZES.get(task.env_id)
    return None if size is None else _optimal_moves(task.seed, size)


@lru_cache(maxsize=65536)
def _optimal_moves(seed: int, size: int) -> int:
    maze = generate_maze(seed, size)
    return int(distance_map(maze)[maze.agent])


def ceiling(tasks: Sequence[Task], max_turns: int) -> float | None:
    """The share of `tasks` that a perfect agent solves in `max_turns` turns.

    Stopping costs a turn. None where it is not known for every task.
    """
    if not tasks:
        raise ValueError("the ceiling of no tasks is not defined")
    moves = [optimal_moves(task) for task in tasks]
    if None in moves:
        return None
    return sum(m + 1 <= max_turns for m in moves) / len(moves)

import pytest

from wayfinder.envs import tasks as tasks_module
from wayfinder.envs.maze2d import SIZES, generate_maze, layout_key
from wayfinder.envs.tasks import (
    TrainingTasks,
    ceiling,
    evaluation_tasks,
    forbidden_layouts,
    optimal_moves,
    task_key,
)
from wayfinder.errors import EnvError
from wayfinder.types import Task

EASY, HARD = "maze_2d/easy", "maze_2d/hard"


def test_the_evaluation_set_is_the_seeds_in_order():
    tasks = evaluation_tasks(EASY)
    assert tasks == [Task(EASY, seed, seed) for seed in range(64)]
    assert evaluation_tasks(HARD, first_seed=1000, count=2) == [
        Task(HARD, 1000, 0),
        Task(HARD, 1001, 1),
    ]


@pytest.mark.parametrize(("first", "count"), [(0, 0), (-1, 4), (2**31 - 1, 2)])
def test_impossible_evaluation_sets_are_refused(first, count):
    with pytest.raises(ValueError, match="evaluation set"):
        evaluation_tasks(EASY, first, count)


def test_a_training_task_is_a_function_of_run_seed_and_index():
    forbidden = forbidden_layouts(evaluation_tasks(EASY))
    stream = TrainingTasks(EASY, 7, forbidden)
    forward = [stream.task(index) for index in range(32)]
    again = TrainingTasks(EASY, 7, forbidden)
    assert [again.task(index) for index in reversed(range(32))] == forward[::-1]
    assert [task.index for task in forward] == list(range(32))
    assert len({task_key(task) for task in forward}) == 32
    assert all(0 <= task.seed < 2**31 for task in forward)
    other = [TrainingTasks(EASY, 8, forbidden).task(index) for index in range(32)]
    assert not {task.seed for task in forward} & {task.seed for task in other}
    hard = [TrainingTasks(HARD, 7, frozenset()).task(index) for index in range(32)]
    assert not {task.seed for task in forward} & {task.seed for task in hard}


def test_no_training_maze_equals_a_forbidden_one_whatever_its_seed(monkeypatch):
    """With mazes of 5x5 cells (16 layouts at most) nearly every seed repeats a forbidden one."""
    monkeypatch.setitem(SIZES, "maze_2d/small", 5)
    forbidden_tasks = evaluation_tasks("maze_2d/small", 0, 12)
    forbidden = forbidden_layouts(forbidden_tasks)
    stream = TrainingTasks("maze_2d/small", 0, forbidden)
    tasks = [stream.task(index) for index in range(200)]
    for task in tasks:
        assert layout_key(generate_maze(task.seed, 5)) not in forbidden
    unchecked = [TrainingTasks("maze_2d/small", 0, frozenset()).task(i) for i in range(200)]
    assert sum(a == b for a, b in zip(tasks, unchecked, strict=True)) < 150  # it had to retry


def test_a_stream_with_nothing_left_says_so(monkeypatch):
    monkeypatch.setitem(SIZES, "maze_2d/small", 3)  # one room, which is agent and target
    monkeypatch.setattr(tasks_module, "_MAX_ATTEMPTS", 20)
    forbidden = forbidden_layouts(evaluation_tasks("maze_2d/small", 0, 1))
    with pytest.raises(EnvError, match=r"nothing is left.*eval\.tasks"):
        TrainingTasks("maze_2d/small", 0, forbidden).task(0)


def test_other_environments_are_compared_by_seed():
    task = TrainingTasks("jigsaw/easy", 0, frozenset()).task(3)
    forbidden = forbidden_layouts([task])
    moved = TrainingTasks("jigsaw/easy", 0, forbidden).task(3)
    assert moved.seed != task.seed
    assert task_key(Task("jigsaw/hard", task.seed, 0)) not in forbidden


def test_the_ceiling_counts_the_stop_as_a_turn():
    tasks = evaluation_tasks(EASY)
    assert set(map(optimal_moves, tasks)) <= {12, 16, 20, 24, 28}
    assert min(map(optimal_moves, tasks)) == 12
    assert ceiling(tasks, 12) == 0.0
    assert ceiling(tasks, 13) == sum(optimal_moves(t) == 12 for t in tasks) / 64 > 0.0


def test_the_ceilings_of_the_easy_mazes():
    """Solvable share of the seeds 0..1999 in 15, 20, 24 and 30 turns."""
    tasks = evaluation_tasks(EASY, 0, 2000)
    counts = [round(2000 * ceiling(tasks, turns)) for turns in (15, 20, 24, 30)]
    assert counts == [1427, 1878, 1981, 2000]
    assert ceiling(evaluation_tasks(HARD, 0, 300), 45) == 1.0


def test_an_unknown_ceiling_is_none_and_an_empty_one_an_error():
    assert optimal_moves(Task("jigsaw/easy", 0, 0)) is None
    assert ceiling([Task(EASY, 0, 0), Task("jigsaw/easy", 0, 0)], 30) is None
    with pytest.raises(ValueError, match="no tasks"):
        ceiling([], 30)

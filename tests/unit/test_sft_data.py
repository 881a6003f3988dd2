"""Demonstrations: labels, actions, reserved mazes, and batches of patches."""

import numpy as np
import pytest
import torch

from wayfinder.chat.vision import VisionProcessor
from wayfinder.config.sft import NoiseConfig, SituationConfig, TinyModelConfig
from wayfinder.envs.maze2d import (
    MOVES,
    Maze2DAdapter,
    distance_map,
    generate_maze,
    layout_key,
    render,
)
from wayfinder.train import tiny
from wayfinder.train.sft_data import (
    AGENT,
    AGENT_ON_TARGET,
    FEEDBACKS,
    HERE,
    NO_LABEL,
    TARGET,
    TARGET_LEFT,
    Situation,
    Situations,
    cell_directions,
    cell_kinds,
    expert_action,
    noisy_action,
    reserved_layouts,
)
from wayfinder.train.sft_tower import PatchTable

EASY = "maze_2d/easy"
EVERYTHING = SituationConfig(start=0.2, at_target=0.2, bumped=0.2, refused=0.2, target_left=0.4)


def draw(count: int, config: SituationConfig = EVERYTHING, name: str = "test") -> list[Situation]:
    situations = Situations(EASY, 0, name, frozenset(), config)
    return [situations[index][0] for index in range(count)]


@pytest.fixture(scope="module")
def vision():
    tokenizer = tiny.build_tokenizer(["a"], vocab_size=300, max_positions=512)
    return VisionProcessor(tiny.build_processor(tokenizer, TinyModelConfig()))


def test_directions_lead_from_every_cell_to_the_target():
    for situation in draw(8):
        labels = cell_directions(situation)
        assert ((labels == NO_LABEL) == situation.maze.walls).all()
        for row, column in np.argwhere(situation.distances >= 0).tolist():
            steps = int(situation.distances[row, column])
            for _ in range(steps):
                down, right = MOVES[labels[row, column]]
                row, column = row + down, column + right
            assert (row, column) == situation.maze.target
            assert labels[row, column] == HERE


def test_kinds_tell_agent_and_target_apart():
    seen = set()
    for situation in draw(60):
        kinds = cell_kinds(situation)
        agent_kind = AGENT_ON_TARGET if situation.at_target else AGENT
        assert kinds[situation.agent] == agent_kind
        assert (kinds == agent_kind).sum() == 1
        if not situation.at_target:
            expected = TARGET_LEFT if situation.target_left else TARGET
            assert kinds[situation.maze.target] == expected
            seen.add(expected)
        seen.add(agent_kind)
    assert seen == {AGENT, AGENT_ON_TARGET, TARGET, TARGET_LEFT}


def test_the_expert_solves_the_environment_from_its_own_situations():
    seed = 5
    env = Maze2DAdapter(EASY)
    env.reset(seed)
    maze = generate_maze(seed, 9)
    distances = distance_map(maze)
    agent, result = maze.agent, None
    for _ in range(int(distances[maze.agent]) + 1):
        action = expert_action(Situation(maze, distances, agent, False, ""))
        text = "('stop', 'stop')" if action == "stop" else f"('move', {action})"
        result = env.step(text)
        if action != "stop":
            agent = (agent[0] + MOVES[action][0], agent[1] + MOVES[action][1])
    assert result.success


def test_feedbacks_are_those_of_the_environment():
    env = Maze2DAdapter(EASY)
    env.reset(0)
    said = {env.step(f"('move', {d})").feedback for d in (0, 1, 2, 3)}
    said |= {env.step(None, reason).feedback for reason in ("no action found", "empty reply")}
    said |= {env.step(None, "unknown direction 'up'").feedback, env.step("('move', 9)").feedback}
    assert {"Wall.", "Moved."} <= said <= set(FEEDBACKS)


def test_a_reserved_maze_is_never_drawn():
    free = Situations(EASY, 0, "x", frozenset(), SituationConfig())
    keys = [layout_key(free[index][0].maze) for index in range(20)]
    guarded = Situations(EASY, 0, "x", frozenset(keys[:10]), SituationConfig())
    again = [layout_key(guarded[index][0].maze) for index in range(20)]
    assert not set(keys[:10]) & set(again)
    assert again[10:] == keys[10:]


def test_reserved_layouts_hold_every_maze_of_every_set():
    keys = reserved_layouts(EASY, [[0, 4], [1000, 2]])
    assert keys == {layout_key(generate_maze(seed, 9)) for seed in (0, 1, 2, 3, 1000, 1001)}


def test_an_example_is_a_function_of_seed_stage_and_index():
    def first(seed, name):
        situation, rng = Situations(EASY, seed, name, frozenset(), EVERYTHING)[7]
        return layout_key(situation.maze), situation.agent, situation.feedback, rng.random()

    assert first(1, "clean") == first(1, "clean")
    assert len({first(1, "clean"), first(2, "clean"), first(1, "sloppy")}) == 3


@pytest.mark.parametrize(
    ("noise", "share"),
    [
        (NoiseConfig(random_move=0, step_back=0, wrong_stop=0, late_stop=0), 1.0),
        (NoiseConfig(random_move=0, step_back=0, wrong_stop=0.3, late_stop=0), 0.7),
        (NoiseConfig(random_move=0.4, step_back=0, wrong_stop=0, late_stop=0), 0.7),
    ],
)
def test_a_sloppy_demonstrator_errs_as_often_as_asked(noise, share):
    situation = next(s for s in draw(20) if not s.at_target)
    rng = np.random.default_rng(0)
    actions = [noisy_action(situation, noise, rng) for _ in range(4000)]
    right = sum(a == expert_action(situation) for a in actions) / len(actions)
    assert right == pytest.approx(share, abs=0.03)


def test_late_stops_move_off_the_target():
    situation = next(s for s in draw(40) if s.at_target)
    rng = np.random.default_rng(0)
    noise = NoiseConfig(random_move=1, step_back=0, wrong_stop=1, late_stop=0.25)
    actions = [noisy_action(situation, noise, rng) for _ in range(4000)]
    assert sum(a == "stop" for a in actions) / len(actions) == pytest.approx(0.75, abs=0.03)


def test_patches_put_together_equal_the_processor_s(vision):
    table = PatchTable(vision, 9)
    table.batch(draw(4, name="other"))  # so that later frames are made of patches already known
    situations = draw(40)
    batch = table.batch(situations)
    frames = [render(s.maze, s.agent, s.target_left) for s in situations]
    pixels, _ = vision.patches(frames)
    assert torch.equal(batch.patches[batch.index.flatten()], pixels)
    assert len(batch.patches) < len(pixels) / 4

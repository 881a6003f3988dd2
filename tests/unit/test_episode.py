"""Every way in which an episode can end, and that no episode depends on another one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from support.episodes import expert_moves
from support.scripted import Said, Script, ScriptedEnv, answer, picture
from support.stage import ENV_ID, SEED, SPEC, TASK, Stage, saying
from wayfinder.batch.plan import PlanSpec, update_plan
from wayfinder.batch.samples import episode_samples
from wayfinder.chat.vision import VisionProcessor
from wayfinder.envs.maze2d import MOVES, generate_maze
from wayfinder.envs.protocol import Env, make_env
from wayfinder.rollout.episode import EpisodeSpec, Place
from wayfinder.rollout.generator import ReplyRequest
from wayfinder.rollout.groups import run_free, run_lockstep
from wayfinder.types import Group, Outcome, Task, frame_hash

STOP = "('stop', 'stop')"
EXPERT = [f"('move', {d})" for d in expert_moves(SEED)]
_MAZE = generate_maze(SEED, 9)
BUMP = next(  # a move into a wall from where the agent starts
    f"('move', {d})"
    for d, (down, right) in enumerate(MOVES)
    if _MAZE.walls[_MAZE.agent[0] + down, _MAZE.agent[1] + right]
)
CUT = Said("('move'", finish_reason="length")


@pytest.fixture
def stage(processor) -> Stage:
    return Stage(processor)


@dataclass(frozen=True)
class Case:
    """One scripted episode and what is pinned of it."""

    script: Script
    outcome: Outcome
    reward: float
    turns: int
    spec: EpisodeSpec = SPEC
    env: Callable[[], Env] = lambda: make_env(ENV_ID, "maze2d")
    error: str | None = None


A, B = picture(225, 225), picture(100, 400)
CASES = {
    "solved": Case(saying(*EXPERT, STOP), Outcome.SOLVED, 2.25, len(EXPERT) + 1),
    "solved with the last reply": Case(
        saying(*EXPERT, STOP),
        Outcome.SOLVED,
        2.25,
        len(EXPERT) + 1,
        replace(SPEC, max_turns=len(EXPERT) + 1),
    ),
    "one turn short of the goal": Case(
        saying(*EXPERT, STOP),
        Outcome.TURN_LIMIT,
        0.25,
        len(EXPERT),
        replace(SPEC, max_turns=len(EXPERT)),
    ),
    "solved in spite of a bad reply": Case(
        saying("what?", *EXPERT, STOP), Outcome.SOLVED, 2.0, len(EXPERT) + 2
    ),
    "stopped elsewhere": Case(saying(BUMP, STOP), Outcome.STOPPED, 0.25, 2),
    "turn limit": Case(saying(BUMP), Outcome.TURN_LIMIT, 0.25, 3, replace(SPEC, max_turns=3)),
    "truncated by the environment": Case(
        saying(BUMP),
        Outcome.TURN_LIMIT,
        0.25,
        2,
        env=lambda: ScriptedEnv(A, [answer(B), answer(A, truncated=True)]),
    ),
    "context limit": Case(
        # The prompts of the three turns are 105, 200 and 295 ids long.
        saying(BUMP),
        Outcome.CONTEXT_LIMIT,
        0.25,
        2,
        replace(SPEC, max_model_len=300),
    ),
    "context limit at once": Case(
        saying(BUMP), Outcome.CONTEXT_LIMIT, 0.0, 0, replace(SPEC, max_model_len=100)
    ),
    "cut, and that ends it": Case(
        saying(BUMP, CUT), Outcome.REPLY_CUT, 0.0, 2, replace(SPEC, end_on_reply_cut=True)
    ),
    "cut, and told": Case(saying(CUT, STOP), Outcome.STOPPED, 0.0, 2),
    "cut without an action is a cut, not a parse failure": Case(
        saying(CUT),
        Outcome.REPLY_CUT,
        0.0,
        1,
        replace(SPEC, end_on_reply_cut=True, end_on_parse_failure=True),
    ),
    "cut behind an action": Case(
        saying(Said(BUMP + " and th", finish_reason="length")),
        Outcome.REPLY_CUT,
        0.25,
        1,
        replace(SPEC, end_on_reply_cut=True),
    ),
    "cut behind the winning action": Case(
        saying(*EXPERT, Said(STOP + " I", finish_reason="length")),
        Outcome.SOLVED,
        2.25,
        len(EXPERT) + 1,
        replace(SPEC, end_on_reply_cut=True),
    ),
    "no action, and that ends it": Case(
        saying(BUMP, "I wonder"),
        Outcome.PARSE_FAILURE,
        0.0,
        2,
        replace(SPEC, end_on_parse_failure=True),
    ),
    "no action, and told": Case(saying("I wonder", STOP), Outcome.STOPPED, 0.0, 2),
    "the environment raises": Case(
        saying(BUMP),
        Outcome.ENV_ERROR,
        0.0,
        2,
        env=lambda: ScriptedEnv(A, [answer(B), KeyError("lost")]),
        error="KeyError: 'lost'",
    ),
    "the environment cannot start": Case(
        saying(BUMP),
        Outcome.ENV_ERROR,
        0.0,
        0,
        env=lambda: ScriptedEnv(ValueError("bad seed")),
        error="ValueError: bad seed",
    ),
}


def test_every_outcome_of_an_episode_has_a_case():
    # ENGINE_LOST is no outcome that an episode finds out by itself.
    assert {case.outcome for case in CASES.values()} == set(Outcome) - {Outcome.ENGINE_LOST}


@pytest.mark.parametrize("schedule", [run_lockstep, run_free])
@pytest.mark.parametrize("name", CASES)
def test_an_episode_and_its_end(stage, name, schedule):
    case = CASES[name]
    (episode,) = stage.play(case.script, case.spec, [case.env()], schedule=schedule)
    assert episode.outcome is case.outcome
    assert episode.reward == case.reward
    assert len(episode.turns) == case.turns == len(stage.requests)
    assert episode.success == (case.outcome is Outcome.SOLVED)
    assert episode.error == case.error
    assert (episode.task, episode.member) == (TASK, 0)
    assert (episode.policy_version, episode.engine) == (8, 2)
    # Loss: every sampled token once, or none at all if the system failed.
    group = Group(TASK, (episode,))
    counted = sum(s.num_loss_tokens for e in group.valid for s in episode_samples(e, 0))
    failed = case.outcome is Outcome.ENV_ERROR
    assert episode.outcome.is_failure == failed
    assert counted == (0 if failed else episode.num_sampled_tokens)
    assert episode.num_sampled_tokens == sum(len(t.reply_ids) for t in episode.turns)
    assert (counted > 0) == (case.turns > 0 and not failed)


@pytest.mark.parametrize("outcome", Outcome)
def test_which_outcomes_are_no_fault_of_the_agent(outcome):
    assert outcome.is_failure == (outcome in (Outcome.ENGINE_LOST, Outcome.ENV_ERROR))
    assert outcome.is_terminated == (outcome in (Outcome.SOLVED, Outcome.STOPPED))


def test_a_lost_engine_takes_no_part_in_group_statistics(stage):
    solved, stopped, lost = (
        stage.play(script, places=[Place(TASK, member)])[0]
        for member, script in enumerate([saying(*EXPERT, STOP), saying(STOP), saying(STOP)])
    )
    lost = replace(lost, outcome=Outcome.ENGINE_LOST, reward=0.0)
    spec = PlanSpec("grpo_no_std", "drop", True, "token_mean", None, 1, 10_000, False, 1)
    group = Group(TASK, (solved, stopped, lost))
    assert group.valid == (solved, stopped)
    plan = update_plan([group], spec)
    assert plan.ranks[0][0].advantages.tolist() == [1.0, -1.0]
    assert plan.metrics["train/failed_episodes"] == 1


def test_form_is_rewarded_but_is_no_success(stage):
    (episode,) = stage.play(saying(BUMP), replace(SPEC, max_turns=2, task_reward=0.0))
    assert episode.reward == 0.25
    assert not episode.success
    plan_spec = PlanSpec("grpo", "drop", True, "token_mean", None, 1, 10_000, False, 1)
    metrics = update_plan([Group(TASK, (episode, episode))], plan_spec).metrics
    assert metrics["train/groups_none_solved"] == 1
    assert metrics["train/groups_all_solved"] == 0


def test_the_context_limit_leaves_room_for_a_whole_reply(stage):
    stage.play(saying(BUMP), replace(SPEC, max_turns=3))
    prompts = [len(request.prompt_ids) for request in stage.requests]
    for turns in (1, 2, 3):
        exact = replace(SPEC, max_turns=3, max_model_len=prompts[turns - 1] + SPEC.max_tokens)
        (episode,) = stage.play(saying(BUMP), exact)
        assert len(episode.turns) == turns
        assert episode.outcome is (Outcome.TURN_LIMIT if turns == 3 else Outcome.CONTEXT_LIMIT)
        (short,) = stage.play(saying(BUMP), replace(exact, max_model_len=exact.max_model_len - 1))
        assert (len(short.turns), short.outcome) == (turns - 1, Outcome.CONTEXT_LIMIT)


def test_one_episode_at_its_limit_does_not_disturb_the_others(stage):
    spec = replace(SPEC, max_model_len=300, max_turns=4)
    envs = [make_env(ENV_ID, "maze2d"), ScriptedEnv(A, [answer(A, terminated=True)])]
    long, other = stage.play(saying(BUMP), spec, envs, [Place(TASK, 0), Place(TASK, 1)])
    assert (long.outcome, other.outcome) == (Outcome.CONTEXT_LIMIT, Outcome.STOPPED)
    assert stage.batches == [2, 1]


@pytest.mark.parametrize("schedule", [run_lockstep, run_free])
@pytest.mark.parametrize("when", ["reset", "step"])
def test_an_environment_that_hangs_ends_its_own_episode_only(stage, when, schedule):
    release = threading.Event()

    class Hanging(ScriptedEnv):
        def reset(self, seed):
            if when == "reset":
                release.wait(30)
            return super().reset(seed)

        def step(self, action, parse_error=None):
            release.wait(30)
            return super().step(action, parse_error)

    spec = replace(SPEC, env_timeout_s=0.5)
    envs = [ScriptedEnv(A, [answer(B, terminated=True)]), Hanging(A, [answer(B)])]
    good, hung = stage.play(
        saying(BUMP), spec, envs, [Place(TASK, 0), Place(TASK, 1)], schedule, release.set
    )
    assert good.outcome is Outcome.STOPPED
    assert (hung.outcome, hung.reward) == (Outcome.ENV_ERROR, 0.0)
    assert hung.error == "no answer within env.step_timeout_s=0.5"
    assert len(hung.turns) == (0 if when == "reset" else 1)
    assert Group(TASK, (good, hung)).valid == (good,)


def test_many_hanging_environments_leave_the_others_their_time(stage):
    release = threading.Event()

    class Hanging(ScriptedEnv):
        def reset(self, seed):
            release.wait(30)
            return super().reset(seed)

    hanging = 64  # more than a thread pool has threads
    envs = [*(Hanging(A, []) for _ in range(hanging)), ScriptedEnv(A, [answer(B, terminated=True)])]
    places = [Place(TASK, member) for member in range(hanging + 1)]
    spec = replace(SPEC, env_timeout_s=1.0)
    episodes = stage.play(saying(BUMP), spec, envs, places, run_free, release.set)
    assert [e.outcome for e in episodes[:-1]] == [Outcome.ENV_ERROR] * hanging
    assert episodes[-1].outcome is Outcome.STOPPED


def test_a_timeout_that_the_environment_raises_is_its_own_error(stage):
    class Failing(ScriptedEnv):
        def step(self, action, parse_error=None):
            raise TimeoutError("its server is away")

    spec = replace(SPEC, env_timeout_s=20.0)
    (episode,) = stage.play(saying(BUMP), spec, [Failing(A, [])])
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error == "TimeoutError: its server is away"


def test_what_a_turn_records(stage):
    spec = replace(SPEC, max_turns=4)
    (episode,) = stage.play(saying(BUMP, "I wonder", CUT, Said(BUMP + "<|endoftext|>")), spec)
    end = stage.processor.tokenizer.eos_token_id
    first, second, third, fourth = episode.turns
    assert (first.action, first.parse_error, first.executed) == (BUMP, None, False)
    assert (first.text, first.feedback, first.closing_ids) == (BUMP, "Wall.", ())
    assert first.reply_ids[-1] == end  # the end of turn is sampled, so it is trained
    assert len(first.logprobs) == len(first.reply_ids)
    assert first.cached_tokens == len(stage.requests[0].prompt_ids) // 2
    assert (second.action, second.parse_error) == (None, "no action found")
    assert second.feedback == "Invalid: no action found."
    assert (third.finish_reason, third.closing_ids) == ("length", (end,))
    # A reply that ended on the other id that ends one is finished, not cut.
    assert (fourth.finish_reason, fourth.action, fourth.text) == ("stop", BUMP, BUMP)
    assert fourth.closing_ids == (end,)


def test_requests_extend_each_other_and_show_what_was_shown(stage):
    (episode,) = stage.play(saying(EXPERT[0], CUT, BUMP, "?"), replace(SPEC, max_turns=4))
    for before, turn, after in zip(stage.requests, episode.turns, stage.requests[1:], strict=False):
        known = before.prompt_ids + turn.reply_ids + turn.closing_ids
        assert after.prompt_ids[: len(known)] == known
        assert after.frames[:-1] == before.frames
    vision = VisionProcessor(stage.processor)
    for number, request in enumerate(stage.requests):
        assert request.frames == tuple(f for t in episode.turns[: number + 1] for f in t.frames)
        assert request.prompt_ids.count(vision.tokens.image_pad) == 81 * (number + 1)
        assert (request.max_tokens, request.temperature) == (16, 0.7)
    tokenizer = stage.processor.tokenizer
    tail = tokenizer.decode(stage.requests[2].prompt_ids).rsplit("<|im_start|>user\n", 1)[1]
    assert tail.startswith("Invalid: ")


@pytest.mark.parametrize("history", [1, 2])
def test_a_window_shows_its_last_frames_only(stage, history):
    spec = replace(SPEC, max_turns=5, history=history)
    (episode,) = stage.play(saying(*EXPERT), spec)
    frames = [turn.frames[0] for turn in episode.turns]
    assert len(set(frames)) == 5
    for number, request in enumerate(stage.requests):
        start = max(0, number + 1 - history)
        assert request.frames == tuple(frames[start : number + 1])
        assert episode.turns[number].window_start == start
    trained = [s.num_loss_tokens for s in episode_samples(episode, 0)]
    assert sum(trained) == episode.num_sampled_tokens


def test_a_frame_is_stored_once(stage):
    (episode,) = stage.play(saying(BUMP), replace(SPEC, max_turns=3))
    assert list(stage.frames) == [episode.final_frame]
    assert {frame for turn in episode.turns for frame in turn.frames} == {episode.final_frame}
    first = stage.frames[episode.final_frame]
    assert frame_hash(first) == episode.final_frame
    # Other episodes of the task start with the same picture, kept as the same array.
    others = stage.play(saying(EXPERT[0]), replace(SPEC, max_turns=1), places=[Place(TASK, 1)])
    assert stage.frames[episode.final_frame] is first
    assert list(stage.frames) == [episode.final_frame, others[0].final_frame]
    assert all(frame_hash(frame) == name for name, frame in stage.frames.items())


def test_frames_of_different_sizes_take_their_own_pads(stage):
    envs = [ScriptedEnv(A, [answer(B), answer(A, terminated=True)])]
    stage.play(saying(BUMP), SPEC, envs)
    pad = VisionProcessor(stage.processor).tokens.image_pad
    assert [r.prompt_ids.count(pad) for r in stage.requests] == [81, 81 + 72]


def test_the_prompt_is_asked_for_after_the_reset(stage):
    class Task(ScriptedEnv):
        def prompt(self, action_format):
            return f"{action_format} {self.seeds}"

    stage.play(saying(STOP), SPEC, [Task(A, [answer(B, terminated=True)])])
    text = stage.processor.tokenizer.decode(stage.requests[0].prompt_ids)
    assert f"tuple [{SEED}]" in text


def wander(request: ReplyRequest) -> str | Said:
    """A reply that depends on the request alone: mostly moves, now and then something else."""
    choice = request.seed % 13
    odd = {8: "I wonder", 9: CUT, 10: STOP}
    return odd.get(choice, f"('move', {choice % 4})")


PLACES = [Place(Task(ENV_ID, seed, i), m) for i, seed in enumerate([4, 77]) for m in range(3)]


@pytest.mark.parametrize("history", [None, 2])
def test_both_schedules_give_the_same_episodes(processor, history):
    spec = replace(SPEC, max_turns=8, history=history)
    lockstep, free = Stage(processor), Stage(processor)
    expected = lockstep.play(wander, spec, places=PLACES)
    assert free.play(wander, spec, places=PLACES, schedule=run_free) == expected
    assert free.frames.keys() == lockstep.frames.keys()
    # The schedules did differ: one asks for all at once, the other lets episodes overtake.
    assert lockstep.batches[0] == 6
    assert lockstep.batches == sorted(lockstep.batches, reverse=True)
    assert free.batches == []
    assert [r.request_id for r in free.requests] != [r.request_id for r in lockstep.requests]
    assert len({episode.outcome for episode in expected}) > 1


@pytest.mark.parametrize("schedule", [run_lockstep, run_free])
def test_an_episode_does_not_depend_on_the_others(processor, schedule):
    spec = replace(SPEC, max_turns=6)
    together = Stage(processor).play(wander, spec, places=PLACES, schedule=schedule)
    for place, episode in zip(PLACES, together, strict=True):
        alone = Stage(processor).play(wander, spec, places=[place], schedule=schedule)
        assert alone == [episode]


def test_every_reply_has_a_seed_of_its_own(processor):
    def seeds(spec: EpisodeSpec, places=PLACES) -> dict[str, int]:
        stage = Stage(processor)
        stage.play(saying(BUMP), replace(spec, max_turns=3), places=places)
        return {request.request_id: request.seed for request in stage.requests}

    base = seeds(SPEC)
    assert len(base) == len(set(base.values())) == 18
    assert all(0 <= seed < 2**31 for seed in base.values())
    assert seeds(SPEC) == base
    one = seeds(SPEC, PLACES[4:5])
    assert one.items() <= base.items()
    for change in ({"run_seed": 2}, {"step": 4}, {"stream": "eval"}):
        assert set(seeds(replace(SPEC, **change)).values()).isdisjoint(base.values())
    # A new policy version with the same step is the same luck.
    assert seeds(replace(SPEC, policy_version=9)) == base

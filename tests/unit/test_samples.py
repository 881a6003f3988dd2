"""Training samples: every sampled token once, behind the ids that the model saw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wayfinder.batch.samples import episode_samples
from wayfinder.chat.render import Observation, context_ids, window_start
from wayfinder.types import Episode, Outcome, Task, Turn

PAD = 9
PREFIX = (1, 1, 2)
HISTORIES = [None, 1, 2, 4]


def make_turn(window: int, observation: Observation, number: int, **changes) -> Turn:
    values = {
        "window_start": window,
        "observation_ids": observation.following if number else observation.opening,
        "opening_ids": observation.opening,
        "frames": (),
        "reply_ids": (),
        "logprobs": (),
        "closing_ids": (),
        "finish_reason": "stop",
        "text": "",
        "action": None,
        "parse_error": None,
        "feedback": "",
        "executed": False,
    }
    return Turn(**values | changes)


def make_episode(turns: list[Turn], prefix: tuple[int, ...] = PREFIX) -> Episode:
    return Episode(
        task=Task("maze_2d/easy", 5, 0),
        member=0,
        policy_version=0,
        engine=0,
        prefix_ids=prefix,
        turns=tuple(turns),
        outcome=Outcome.TURN_LIMIT,
        reward=0.0,
        final_frame="last",
    )


@st.composite
def played(draw, history: int | None):
    """An episode of 1 to 7 turns, and the context that was given to the model in each turn.

    All ids are different, so that no token can be taken for another one.
    """
    fresh = iter(range(100, 10**6))
    turns: list[Turn] = []
    contexts = []
    for number in range(draw(st.integers(1, 7))):
        frames = tuple(f"f{number}.{i}" for i in range(draw(st.integers(0, 2))))
        pads = (PAD,) * (3 * len(frames))
        observation = Observation(
            opening=(next(fresh), *pads, next(fresh)),
            following=(next(fresh), next(fresh), *pads, next(fresh)),
        )
        start = window_start(number, history)
        contexts.append(context_ids(PREFIX, turns, start, observation))
        length = draw(st.integers(0, 4))
        turns.append(
            make_turn(
                start,
                observation,
                number,
                frames=frames,
                reply_ids=tuple(next(fresh) for _ in range(length)),
                logprobs=tuple(-(number + 1) / (i + 3) for i in range(length)),
                closing_ids=(next(fresh),) * draw(st.integers(0, 1)),
            )
        )
    return make_episode(turns), contexts


@pytest.mark.parametrize("history", HISTORIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_sampled_token_is_trained_once_behind_what_the_model_saw(history, data):
    episode, contexts = data.draw(played(history))
    samples = episode_samples(episode, 17)
    trained: list[int] = []
    for sample in samples:
        assert sample.episode == 17
        trained += sample.ids[sample.loss_mask].tolist()
        for number in sorted(set(sample.turn_index[sample.loss_mask].tolist())):
            turn = episode.turns[number]
            where = np.flatnonzero(sample.turn_index == number)
            begin = int(where[0])
            assert where.tolist() == list(range(begin, begin + len(turn.reply_ids)))
            assert sample.loss_mask[where].all()
            assert tuple(sample.ids[:begin]) == contexts[number]
            assert tuple(sample.ids[where]) == turn.reply_ids
            logprobs = np.array(turn.logprobs, dtype=np.float32)
            np.testing.assert_array_equal(sample.behavior_logprobs[where], logprobs)
            assert sample.after_image[where].tolist() == (
                [bool(turn.frames)] + [False] * (len(where) - 1)
            )
    assert trained == [token for turn in episode.turns for token in turn.reply_ids]
    assert len(trained) == episode.num_sampled_tokens


@pytest.mark.parametrize("history", HISTORIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_frames_masks_and_shapes(history, data):
    episode, _ = data.draw(played(history))
    samples = episode_samples(episode, 0)
    closing = {token for turn in episode.turns for token in turn.closing_ids}
    last = -1
    for sample in samples:
        length = len(sample.ids)
        for name in ("loss_mask", "behavior_logprobs", "after_image", "turn_index"):
            assert getattr(sample, name).shape == (length,)
        assert sample.ids.dtype == np.int64
        assert sample.loss_mask.dtype == bool
        assert sample.behavior_logprobs.dtype == np.float32
        assert not sample.behavior_logprobs[~sample.loss_mask].any()
        assert not sample.after_image[~sample.loss_mask].any()
        assert (sample.turn_index[~sample.loss_mask] == -1).all()
        assert closing.isdisjoint(sample.ids[sample.loss_mask].tolist())
        assert sample.num_loss_tokens == sample.loss_mask.sum()
        # A sample shows whole turns in order: the last one is the last it trains.
        ids = sample.ids.tolist()
        shown = [
            turn
            for turn in episode.turns
            if turn.opening_ids[0] in ids or turn.observation_ids[0] in ids
        ]
        assert sample.frames == tuple(f for turn in shown for f in turn.frames)
        assert (sample.ids == PAD).sum() == 3 * len(sample.frames)
        numbers = [episode.turns.index(turn) for turn in shown]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert numbers[-1] > last
        last = numbers[-1]
    assert last == len(episode.turns) - 1


@pytest.mark.parametrize(
    ("history", "turns", "expected"),
    [
        (None, 7, [range(7)]),
        (1, 3, [[0], [1], [2]]),
        (2, 1, [[0]]),
        (2, 4, [[0, 1], [2], [3]]),
        (4, 4, [[0, 1, 2, 3]]),
        (4, 6, [[0, 1, 2, 3], [4], [5]]),
    ],
)
def test_which_turns_a_sample_trains(history, turns, expected):
    observation = Observation((3, PAD), (4, PAD))
    episode = make_episode(
        [
            make_turn(
                window_start(n, history),
                observation,
                n,
                frames=(f"f{n}",),
                reply_ids=(50 + n, 51),
                logprobs=(-1.0, -2.0),
            )
            for n in range(turns)
        ]
    )
    samples = episode_samples(episode, 0)
    trained = [sorted(set(s.turn_index[s.loss_mask].tolist())) for s in samples]
    assert trained == [list(e) for e in expected]
    shown = [len(s.frames) for s in samples]
    assert shown == [min(e[-1] + 1, history or 99) for e in expected]


# The example in the docstring of wayfinder.types, id by id. Prefix `S` is 1; an observation is a
# head, two pads and a tail; reply 0 ends itself with 40; reply 1 was cut and 40 would close it.
O0, O1, O1_FIRST = (20, PAD, PAD, 21), (41, 30, PAD, PAD, 31), (30, PAD, PAD, 31)
A0, A1 = (60, 61, 40), (70, 71)


def worked_example(history: int | None) -> Episode:
    return make_episode(
        [
            make_turn(
                0,
                Observation(O0, O0),
                0,
                frames=("red",),
                reply_ids=A0,
                logprobs=(-0.1, -0.2, -0.3),
            ),
            make_turn(
                window_start(1, history),
                Observation(O1_FIRST, O1),
                1,
                frames=("blue",),
                reply_ids=A1,
                logprobs=(-0.4, -0.5),
                closing_ids=(40,),
                finish_reason="length",
            ),
        ],
        prefix=(1,),
    )


def test_the_worked_example_with_full_history():
    (sample,) = episode_samples(worked_example(None), 3)
    table = [
        # id, loss, log-prob, first after an image, turn
        (1, 0, 0.0, 0, -1),  # S
        (20, 0, 0.0, 0, -1),  # O0
        (PAD, 0, 0.0, 0, -1),
        (PAD, 0, 0.0, 0, -1),
        (21, 0, 0.0, 0, -1),
        (60, 1, -0.1, 1, 0),  # A0
        (61, 1, -0.2, 0, 0),
        (40, 1, -0.3, 0, 0),
        (41, 0, 0.0, 0, -1),  # O1, the newline behind the end of turn first
        (30, 0, 0.0, 0, -1),
        (PAD, 0, 0.0, 0, -1),
        (PAD, 0, 0.0, 0, -1),
        (31, 0, 0.0, 0, -1),
        (70, 1, -0.4, 1, 1),  # A1
        (71, 1, -0.5, 0, 1),
    ]
    found = zip(
        sample.ids.tolist(),
        sample.loss_mask.astype(int).tolist(),
        sample.behavior_logprobs.round(6).tolist(),
        sample.after_image.astype(int).tolist(),
        sample.turn_index.tolist(),
        strict=True,
    )
    assert [(i, m, pytest.approx(p), a, t) for i, m, p, a, t in found] == table
    assert sample.frames == ("red", "blue")
    assert sample.episode == 3


def test_the_worked_example_with_one_frame_a_turn():
    first, second = episode_samples(worked_example(1), 3)
    assert tuple(first.ids) == (1, *O0, *A0)
    assert tuple(second.ids) == (1, *O1_FIRST, *A1)
    assert tuple(first.ids[first.loss_mask]) == A0
    assert tuple(second.ids[second.loss_mask]) == A1
    assert (first.frames, second.frames) == (("red",), ("blue",))
    assert second.turn_index.tolist() == [-1] * 5 + [1, 1]


def test_a_cut_reply_is_closed_before_the_next_observation_and_the_closing_has_no_loss():
    episode = worked_example(None)
    third = make_turn(
        0, Observation((5, PAD), (6, PAD)), 2, frames=("g",), reply_ids=(80,), logprobs=(-0.6,)
    )
    (sample,) = episode_samples(make_episode([*episode.turns, third], prefix=(1,)), 0)
    assert tuple(sample.ids) == (1, *O0, *A0, *O1, *A1, 40, 6, PAD, 80)
    assert sample.loss_mask.tolist()[-5:] == [True, False, False, False, True]


def test_an_episode_without_turns_gives_no_sample():
    assert episode_samples(make_episode([]), 0) == []

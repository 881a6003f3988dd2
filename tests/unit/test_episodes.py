"""Episodes on disk and as pictures."""

import dataclasses
import json
import math
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from support.episodes import IMAGE_PAD, NUM_PADS, expert_moves, walk
from wayfinder.errors import RunDirError
from wayfinder.record.episodes import (
    decode_png,
    encode_png,
    episodes_path,
    latest_episodes,
    pack_ids,
    read_episodes,
    read_frames,
    read_stored,
    stored_evaluations,
    unpack_ids,
    write_episodes,
)
from wayfinder.record.pictures import (
    GREEN,
    RED,
    action_symbol,
    contact_sheet,
    episode_gif,
    pick_episodes,
)
from wayfinder.types import Outcome, frame_hash


@pytest.fixture
def frames():
    return {}


@pytest.fixture
def episodes(frames):
    return [
        walk(0, [*expert_moves(0), "stop"], Outcome.SOLVED, frames),
        walk(0, [0, 0, None, 3, "stop"], Outcome.STOPPED, frames, member=1),
        walk(1, [2] * 30, Outcome.TURN_LIMIT, frames),
        walk(2, [], Outcome.ENV_ERROR, frames),
    ]


def test_round_trip_is_exact(tmp_path, episodes, frames):
    path = episodes_path(tmp_path, "eval", 10)
    path.parent.mkdir()
    write_episodes(path, episodes, frames)
    assert path == tmp_path / "episodes" / "eval_step_000010.jsonl"
    assert read_episodes(path) == episodes
    stored = read_frames(path)
    assert stored.keys() == frames.keys()
    assert all(frame_hash(frame) == name for name, frame in stored.items())
    one = episodes[0].final_frame
    assert read_frames(path, [one]).keys() == {one}


def test_frames_are_stored_once_and_small(tmp_path, episodes, frames):
    path = tmp_path / "e.jsonl"
    write_episodes(path, episodes, frames)
    mentions = sum(len(turn.frames) for e in episodes for turn in e.turns) + len(episodes)
    with zipfile.ZipFile(tmp_path / "e.frames.zip") as archive:
        names = archive.namelist()
        assert sorted(names) == sorted(f"{name}.png" for name in frames)
        assert len(names) < mentions
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert max(info.file_size for info in archive.infolist()) < 600
    turns = sum(len(e.turns) for e in episodes)
    assert path.stat().st_size < 700 * (turns + len(episodes))


def test_same_episodes_give_the_same_bytes(tmp_path, episodes, frames):
    for name in ("a", "b"):
        write_episodes(tmp_path / f"{name}.jsonl", episodes, frames)
    for suffix in (".jsonl", ".frames.zip"):
        a, b = ((tmp_path / name).with_suffix(suffix).read_bytes() for name in ("a", "b"))
        assert a == b


def test_lines_can_be_read_by_a_person(tmp_path, episodes, frames):
    def decode(ids):
        return " ".join("<pad>" if i == IMAGE_PAD else str(i) for i in ids)

    path = tmp_path / "e.jsonl"
    write_episodes(path, episodes, frames, decode)
    solved, stopped, *_ = map(json.loads, path.read_text().splitlines())
    assert (solved["success"], solved["outcome"], solved["num_turns"]) == (True, "solved", 13)
    assert (stopped["seed"], stopped["member"], stopped["reward"]) == (0, 1, 0.0)
    assert stopped["turns"][2]["parse_error"] == "no action"
    assert solved["turns"][0]["action"] == f"('move', {expert_moves(0)[0]})"
    assert solved["prompt"] == "1 2 3 4 <pad> 5"
    assert stopped["pieces"] == {str(i): str(i) for i in (20, 21, 22, 23, 24)}
    assert read_stored(path)[0].pieces[21] == "21"
    assert solved["turns"][0]["observation_ids"] == [4, [IMAGE_PAD, NUM_PADS], 5]


def test_nonfinite_numbers_stay_nonfinite(tmp_path, episodes, frames):
    turn = dataclasses.replace(episodes[1].turns[0], logprobs=(-1.0, -math.inf, math.nan))
    bad = dataclasses.replace(episodes[1], turns=(turn,), reward=math.nan)
    path = tmp_path / "e.jsonl"
    write_episodes(path, [bad], frames)
    (read,) = read_episodes(path)
    assert math.isnan(read.reward)
    assert read.turns[0].logprobs[0] == -1.0
    assert all(math.isnan(value) for value in read.turns[0].logprobs[1:])


def test_missing_frame_is_an_error_that_writes_nothing(tmp_path, episodes, frames):
    del frames[episodes[0].final_frame]
    with pytest.raises(KeyError):
        write_episodes(tmp_path / "e.jsonl", episodes, frames)
    assert list(tmp_path.iterdir()) == []


def test_other_format_is_refused(tmp_path):
    (tmp_path / "e.jsonl").write_text('{"format": 2}\n')
    with pytest.raises(RunDirError, match=r"e\.jsonl.*format 1"):
        read_episodes(tmp_path / "e.jsonl")


def test_latest_is_that_of_the_last_step_and_of_its_kind(tmp_path, frames):
    assert latest_episodes(tmp_path) is None
    (tmp_path / "episodes").mkdir()
    for kind, step in (("eval", 9), ("eval", 100), ("eval", 20), ("greedy", 200)):
        write_episodes(episodes_path(tmp_path, kind, step), [], frames)
    assert latest_episodes(tmp_path) == episodes_path(tmp_path, "eval", 100)
    (tmp_path / "episodes" / "notes.jsonl").touch()
    assert [(kind, step) for kind, step, _ in stored_evaluations(tmp_path)] == [
        ("eval", 9),
        ("eval", 20),
        ("eval", 100),
        ("greedy", 200),
    ]


@given(st.lists(st.integers(0, 3), max_size=40))
def test_packed_ids_unpack(ids):
    assert unpack_ids(pack_ids(ids)) == tuple(ids)
    assert len(pack_ids(ids)) <= len(ids)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_png_is_lossless_for_any_number_of_colors(height, width, num_colors, seed):
    draw = np.random.default_rng(seed)
    palette = draw.integers(0, 256, (num_colors, 3), dtype=np.uint8)
    frame = palette[draw.integers(0, num_colors, (height, width))]
    assert np.array_equal(decode_png(encode_png(frame)), frame)


@pytest.mark.parametrize(
    ("action", "symbol"),
    [
        ("('move', 0)", "\u2192"),
        ("('move', 1)", "\u2191"),
        ("('move', 2)", "\u2190"),
        ("('move', 3)", "\u2193"),
        ("<action>down</action>", "\u2193"),
        ("('stop', 'stop')", "\u25a0"),
        ("('rotate', [1, 2])", "('rotate', ["),
        (None, "?"),
    ],
)
def test_action_symbols(frames, action, symbol):
    turn = walk(0, [0], Outcome.STOPPED, frames).turns[0]
    assert action_symbol(dataclasses.replace(turn, action=action)) == symbol


def test_replay_has_a_page_a_turn_and_an_end(tmp_path, episodes, frames):
    path = tmp_path / "e.gif"
    episode_gif(episodes[1], frames, path)
    with Image.open(path) as gif:
        pages = []
        for page in range(gif.n_frames):
            gif.seek(page)
            pages.append((gif.info["duration"], np.asarray(gif.convert("RGB"), np.int16)))
    assert len(pages) == len(episodes[1].turns) + 1
    assert pages[-1][0] > pages[0][0]
    maze = pages[0][1][12:462, 12:462]
    expected = frames[episodes[1].turns[0].frames[0]].repeat(2, 0).repeat(2, 1).astype(np.int16)
    assert np.abs(maze - expected).max() < 30  # a palette of 64 colors
    red = [_num_pixels(page, RED) for _, page in pages]
    assert red[0] == 0  # a move
    assert red[2] > 50  # a reply without an action
    assert red[-1] > 1000  # the outcome, and a border in its color


def test_replay_of_an_episode_without_turns_shows_its_end(tmp_path, episodes, frames):
    episode_gif(episodes[3], frames, tmp_path / "e.gif")
    with Image.open(tmp_path / "e.gif") as gif:
        assert gif.n_frames == 1


def test_contact_sheet_has_a_row_an_episode_in_the_color_of_its_outcome(tmp_path, episodes, frames):
    contact_sheet(episodes[:1], episodes[1:3], frames, tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    third = len(sheet) // 3
    rows = [sheet[i * third : (i + 1) * third] for i in range(3)]
    assert [_num_pixels(row, GREEN) > 1000 for row in rows] == [True, False, False]
    assert [_num_pixels(row, RED) > 1000 for row in rows] == [False, True, True]
    # The turn limit was hit walking into a wall: its arrows are red too.
    turns = tuple(dataclasses.replace(turn, executed=True) for turn in episodes[2].turns)
    moved = dataclasses.replace(episodes[2], turns=turns)
    contact_sheet(episodes[:1], [episodes[1], moved], frames, tmp_path / "moved.png")
    other = np.asarray(Image.open(tmp_path / "moved.png"))[2 * third : 3 * third]
    assert _num_pixels(rows[2], RED) > _num_pixels(other, RED) + 1000
    with pytest.raises(ValueError, match="needs an episode"):
        contact_sheet([], [], frames, tmp_path / "none.png")


def test_picked_episodes_are_varied(frames):
    solved = [walk(s, [*expert_moves(s), "stop"], Outcome.SOLVED, frames) for s in range(12)]
    failed = [walk(s, [0, 0], Outcome.TURN_LIMIT, frames) for s in range(4)]
    failed += [walk(4, [0], Outcome.ENGINE_LOST, frames), walk(5, [0], Outcome.STOPPED, frames)]
    silent = walk(6, [], Outcome.ENV_ERROR, frames)
    chosen_solved, chosen_failed = pick_episodes([*failed, silent, *solved], 3)
    lengths = [len(e.turns) for e in chosen_solved]
    every = sorted(len(e.turns) for e in solved)
    assert (lengths[0], lengths[-1]) == (every[0], every[-1])
    assert [e.outcome for e in chosen_failed] == [
        Outcome.TURN_LIMIT,
        Outcome.STOPPED,
        Outcome.ENGINE_LOST,
    ]
    assert pick_episodes([silent], 3) == ([], [])
    assert len(pick_episodes(failed[:4], 3)[1]) == 3


def _num_pixels(image, color) -> int:
    return int((np.abs(image.astype(np.int16) - color).max(axis=-1) < 12).sum())

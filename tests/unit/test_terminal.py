"""Episodes in a terminal, and what may not reach it."""

import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from support.recorded import solver, wanderer, wanderer_moves, with_text
from wayfinder.record.terminal import draw_frame, show_episode, turn_line, visible

ARROWS = "\u2192\u2191\u2190\u2193"  # of the directions 0..3


def shown(episode, frames, **options) -> str:
    out = io.StringIO()
    show_episode(Console(file=out, width=80, **options), episode, frames, delay_s=0)
    return out.getvalue()


def test_a_pipe_gets_a_line_a_turn():
    frames = {}
    lines = shown(wanderer(1, frames), frames).splitlines()
    assert len(lines) == 7
    behind = wanderer_moves(1)[0]
    assert lines[0] == f"turn 1  {ARROWS[behind]}  ('move', {behind})  Wall.  p 0.74"
    assert lines[3].startswith("turn 4  ?  no action in 'I see a wall \u2588 and'  Wall.  p ")
    assert lines[6] == "stopped in 6 turns, reward 0"


def test_a_terminal_gets_the_frames_and_ends_with_the_outcome():
    frames = {}
    episode = solver(0, frames)
    text = shown(episode, frames, force_terminal=True, color_system="truecolor")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    last = plain[plain.rindex(" 1  \u2192") :]
    assert "13  \u25a0  ('stop', 'stop')  Moved.  p 0.22" in last
    assert "solved in 13 turns, reward 1" in last
    for color in ("255;0;0", "169;169;169", "0;0;255"):  # target, wall, agent
        assert f"38;2;{color}" in text


def test_a_frame_is_drawn_with_two_pixels_a_character():
    frame = np.zeros((20, 20, 3), np.uint8)
    frame[:10] = (255, 0, 0)
    lines = draw_frame(frame, columns=10).split("\n", allow_blank=True)
    rows = [line for line in lines if line.plain]
    assert [line.plain for line in rows] == ["\u2580" * 10] * 5
    styles = [str(line.spans[0].style) for line in rows]
    assert styles[:2] == ["#ff0000 on #ff0000"] * 2
    assert styles[2] == "#ff0000 on #000000"
    assert styles[3:] == ["#000000 on #000000"] * 2


@given(st.text())
def test_no_control_character_passes(text):
    safe = visible(text)
    assert safe.isprintable()
    assert visible("plain \u2588 [red]") == "plain \u2588 [red]"


@pytest.mark.parametrize("options", [{}, {"force_terminal": True, "color_system": None}])
def test_what_a_model_writes_does_not_drive_the_terminal(options):
    frames = {}
    hostile = "\x1b]0;owned\x07[bold]\x1b[2J\r\n"
    text = shown(with_text(wanderer(1, frames), hostile), frames, **options)
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "\\x1b]0;owned\\x07[bold]" in text.replace("\n", "")


def test_a_turn_that_changed_nothing_is_red():
    turns = wanderer(1, {}).turns
    executed = [turn.executed for turn in turns]
    assert True in executed
    for number, done in enumerate(executed):
        assert ("red" in str(turn_line(turns, number).spans)) == (not done)

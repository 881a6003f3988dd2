"""An episode as a person watches it in a terminal: the frame, and what was said about it.

On anything that is not a terminal (a pipe, a file) it is one line a turn. What the model and the
environment write is shown with its control characters escaped, so it cannot drive the terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np
from PIL import Image
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wayfinder.record.pictures import action_symbol, outcome_text
from wayfinder.types import Episode, Outcome, Turn

COLUMNS = 36
"""Width of a frame in characters; a character shows two pixels, one above the other."""

_TURNS_SHOWN = 16  # the last ones, beside the frame
_UPPER_HALF = "\u2580"


def show_episode(
    console: Console, episode: Episode, frames: Mapping[str, np.ndarray], delay_s: float
) -> None:
    """Go through an episode turn by turn, `delay_s` seconds each, and end with its outcome.

    `frames`: hash -> uint8 [height, width, 3]; it has all that the episode mentions.
    """
    turns = episode.turns
    if not console.is_terminal:
        for number in range(len(turns)):
            console.print(Text("turn ") + turn_line(turns, number), soft_wrap=True)
        console.print(outcome_line(episode), soft_wrap=True)
        return
    with Live(console=console, auto_refresh=False) as live:
        for number, turn in enumerate(turns):
            # First what the model sees, then what it does.
            for done in (number, number + 1):
                frame = frames[turn.frames[-1]] if turn.frames else None
                live.update(_view(episode, frame, done), refresh=True)
                time.sleep(delay_s / 2)
        live.update(_view(episode, frames[episode.final_frame], None), refresh=True)


def turn_line(turns: tuple[Turn, ...], number: int) -> Text:
    """` 3  <arrow>  ('move', 0)  Moved.  p 0.63`: p is the chance of the whole reply."""
    turn = turns[number]
    style = "" if turn.executed else "red"
    width = len(str(len(turns)))
    said = turn.action if turn.action is not None else f"no action in {visible(turn.text)!r}"
    # Without a style of its own, which what is appended would inherit.
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{number + 1:>{width}}  ", style="dim")
    text.append(f"{visible(action_symbol(turn))}  ", style=f"bold {style}")
    text.append(f"{visible(said)}  ", style=style)
    text.append(visible(turn.feedback), style=style or "dim")
    text.append(f"  p {math.exp(sum(turn.logprobs)):.2f}", style="dim")
    return text


def outcome_line(episode: Episode) -> Text:
    """`solved in 17 turns, reward 1`."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(outcome_text(episode.outcome), style=_outcome_style(episode.outcome))
    text.append(f" in {len(episode.turns)} turns, reward {episode.reward:g}")
    if episode.error:
        text.append(f": {visible(episode.error)}")
    return text


def visible(text: str) -> str:
    """`text` in one line, everything that is not printable escaped as in Python."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def draw_frame(frame: np.ndarray, columns: int = COLUMNS) -> Text:
    """A uint8 [height, width, 3] frame in half blocks, two rows of pixels a line."""
    height, width = frame.shape[:2]
    rows = 2 * max(1, round(columns * height / width / 2))
    # Averages would blur the few colors of a maze.
    pixels = np.asarray(Image.fromarray(frame).resize((columns, rows), Image.Resampling.NEAREST))
    picture = Text(no_wrap=True)
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            picture.append(_UPPER_HALF, style=f"{_rgb(above)} on {_rgb(below)}")
        picture.append("\n")
    return picture


def _view(episode: Episode, frame: np.ndarray | None, done: int | None) -> Group:
    """The frame beside the turns that are done; None: all of them, and the outcome."""
    turns = episode.turns
    end = len(turns) if done is None else done
    lines = [turn_line(turns, number) for number in range(max(0, end - _TURNS_SHOWN), end)]
    if done is None:
        lines += [Text(), outcome_line(episode)]
    head = Text(f"{visible(episode.task.env_id)}  seed {episode.task.seed}", style="bold")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(Text() if frame is None else draw_frame(frame), Group(head, Text(), *lines))
    return Group(Text(), table)


def _outcome_style(outcome: Outcome) -> str:
    if outcome is Outcome.SOLVED:
        return "bold green"
    return "bold" if outcome.is_failure else "bold red"


def _rgb(color: np.ndarray) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)

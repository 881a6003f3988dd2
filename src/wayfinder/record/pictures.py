"""Episodes as pictures: a replay (GIF) and a sheet of solved and failed ones (PNG)."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from wayfinder.record.atomic import atomic_write_bytes
from wayfinder.types import Episode, Outcome, Turn

Frames = Mapping[str, np.ndarray]
Color = tuple[int, int, int]

PAPER: Color = (250, 250, 248)
CARD: Color = (255, 255, 255)
INK: Color = (38, 42, 51)
MUTED: Color = (128, 134, 145)
LINE: Color = (218, 221, 226)
GREEN: Color = (22, 138, 86)
RED: Color = (200, 54, 46)
GREY: Color = (112, 117, 128)

_ARROWS = {
    "0": "\u2192",
    "1": "\u2191",
    "2": "\u2190",
    "3": "\u2193",
    "right": "\u2192",
    "up": "\u2191",
    "left": "\u2190",
    "down": "\u2193",
}
_STOP = "\u25a0"
_UNPARSED = "?"
_MOVE = re.compile(r"\bmove\b\W+([0-3])|\b(right|up|left|down)\b", re.IGNORECASE)

_SCALE = 2  # everything below is in half pixels: drawn large, so that text stays crisp
_THUMB = 112 * _SCALE
_GAP = 12 * _SCALE
_MARGIN = 22 * _SCALE
_LABEL = 132 * _SCALE
_STRIP = 24 * _SCALE  # below a frame: the actions until the next one
_COLUMNS = 9

_GIF_FRAME = 450
_GIF_CAPTION = 74
_TURN_MS = 450
_LAST_MS = 2200


@dataclass(frozen=True)
class _Cell:
    """One frame of a row, and what the agent did until the next frame of the row."""

    frame: str
    title: str
    actions: tuple[tuple[str, Color], ...]


def action_symbol(turn: Turn) -> str:
    """An arrow, a square for stop, `?` for a reply without an action, else the action's text."""
    if turn.action is None:
        return _UNPARSED
    if match := _MOVE.search(turn.action):
        return _ARROWS[(match[1] or match[2]).lower()]
    return _STOP if "stop" in turn.action.lower() else turn.action[:12]


def outcome_text(outcome: Outcome) -> str:
    """`turn_limit` for people: `turn limit`."""
    return outcome.value.replace("_", " ")


def outcome_color(outcome: Outcome) -> Color:
    """Green: solved. Red: the agent failed. Grey: the system failed."""
    if outcome is Outcome.SOLVED:
        return GREEN
    return GREY if outcome.is_failure else RED


def pick_episodes(
    episodes: Iterable[Episode], count: int = 3
) -> tuple[list[Episode], list[Episode]]:
    """Up to `count` solved and `count` failed episodes worth looking at.

    Solved: from the shortest to the longest. Failed: as many different outcomes as there are, the
    frequent ones first, those that the system caused last.
    Episodes without turns have nothing to show.
    """
    shown = sorted((e for e in episodes if e.turns), key=lambda e: (len(e.turns), e.task.index))
    solved = [e for e in shown if e.success]
    if len(solved) > count:
        places = np.linspace(0, len(solved) - 1, count).round().astype(int)
        solved = [solved[i] for i in places]
    by_outcome: dict[Outcome, list[Episode]] = {}
    for episode in shown:
        if not episode.success:
            by_outcome.setdefault(episode.outcome, []).append(episode)
    kinds = sorted(by_outcome, key=lambda o: (o.is_failure, -len(by_outcome[o])))
    failed: list[Episode] = []
    while len(failed) < count and any(by_outcome.values()):
        failed += [by_outcome[kind].pop() for kind in kinds if by_outcome[kind]]
    return solved, failed[:count]


def contact_sheet(
    solved: Sequence[Episode], failed: Sequence[Episode], frames: Frames, path: Path
) -> None:
    """A PNG with one row an episode: outcome at the left, frames, and under each its actions.

    Arrows that changed nothing (walls, invalid actions) are red. A row has at most nine frames,
    evenly spread; the last one is the end of the episode.
    """
    episodes = [*solved, *failed]
    if not episodes:
        raise ValueError("a contact sheet needs an episode")
    rows = [_row_cells(episode) for episode in episodes]
    columns = max(map(len, rows))
    row_height = _THUMB + _STRIP + 20 * _SCALE
    width = 2 * _MARGIN + _LABEL + columns * (_THUMB + _GAP) + _GAP
    height = 2 * _MARGIN + len(rows) * (row_height + _GAP) - _GAP
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, (episode, cells) in enumerate(zip(episodes, rows, strict=True)):
        top = _MARGIN + number * (row_height + _GAP)
        box = (_MARGIN, top, width - _MARGIN, top + row_height)
        draw.rounded_rectangle(box, 8 * _SCALE, CARD, LINE, _SCALE)
        color = outcome_color(episode.outcome)
        bar = (_MARGIN + 6 * _SCALE, top + 14 * _SCALE, _MARGIN + 9 * _SCALE, top + 108 * _SCALE)
        draw.rectangle(bar, color)
        _draw_label(draw, episode, _MARGIN + 18 * _SCALE, top + 14 * _SCALE)
        for place, cell in enumerate(cells):
            left = _MARGIN + _LABEL + _GAP + place * (_THUMB + _GAP)
            last = place == len(cells) - 1
            border = color if last else LINE
            _draw_cell(sheet, draw, cell, frames, left, top + 10 * _SCALE, border, last)
    _save(sheet, path, "PNG", optimize=True)


def episode_gif(episode: Episode, frames: Frames, path: Path) -> None:
    """A replay: each turn's last frame with the action it led to, and the end of the episode."""
    pages: list[Image.Image] = []
    total = len(episode.turns)
    shown: str | None = None
    for number, turn in enumerate(episode.turns, 1):
        shown = turn.frames[-1] if turn.frames else shown
        if shown is not None:
            what = turn.parse_error if turn.action is None else turn.feedback
            page = _gif_page(
                frames[shown],
                f"turn {number}/{total}",
                action_symbol(turn),
                INK if turn.executed else RED,
                what or "",
                LINE,
            )
            pages.append(page)
    color = outcome_color(episode.outcome)
    text = f"{episode.task.env_id}  seed {episode.task.seed}   reward {episode.reward:g}"
    final = frames[episode.final_frame]
    pages.append(
        _gif_page(final, f"{total} turns", outcome_text(episode.outcome), color, text, color)
    )
    # One palette for all pages: the colors of a page of its own would flicker.
    strip = Image.new("RGB", (pages[0].width, sum(page.height for page in pages)))
    for number, page in enumerate(pages):
        strip.paste(page, (0, number * page.height))
    palette = strip.quantize(64, Image.Quantize.MEDIANCUT)
    quantized = [page.quantize(palette=palette, dither=Image.Dither.NONE) for page in pages]
    _save(
        quantized[0],
        path,
        "GIF",
        save_all=True,
        append_images=quantized[1:],
        duration=[_TURN_MS] * (len(pages) - 1) + [_LAST_MS],
        loop=0,
    )


def _row_cells(episode: Episode) -> list[_Cell]:
    turns = episode.turns
    count = min(len(turns), _COLUMNS - 1)
    starts = sorted({round(i * len(turns) / count) for i in range(count)}) if count else []
    cells = []
    for start, end in zip(starts, [*starts[1:], len(turns)], strict=True):
        actions = tuple((action_symbol(t), INK if t.executed else RED) for t in turns[start:end])
        if turns[start].frames:
            cells.append(_Cell(turns[start].frames[-1], f"turn {start + 1}", actions))
    return [*cells, _Cell(episode.final_frame, "end", ())]


def _draw_label(draw: ImageDraw.ImageDraw, episode: Episode, left: int, top: int) -> None:
    color = outcome_color(episode.outcome)
    draw.text((left, top), outcome_text(episode.outcome), color, _font(15, bold=True))
    lines = (
        f"seed {episode.task.seed}",
        f"{len(episode.turns)} turns",
        f"reward {episode.reward:g}",
        f"version {episode.policy_version}",
    )
    for number, line in enumerate(lines):
        y = top + (27 + 17 * number) * _SCALE
        draw.text((left, y), line, INK if number == 0 else MUTED, _font(11))


def _draw_cell(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    cell: _Cell,
    frames: Frames,
    left: int,
    top: int,
    border: Color,
    last: bool,
) -> None:
    image = _fit(frames[cell.frame], _THUMB)
    x = left + (_THUMB - image.width) // 2
    sheet.paste(image, (x, top))
    edge = (2 if last else 1) * _SCALE
    box = (x - edge, top - edge, x + image.width + edge - 1, top + image.height + edge - 1)
    draw.rectangle(box, outline=border, width=edge)
    y = top + _THUMB + _STRIP // 2 + 2 * _SCALE
    if not cell.actions:
        draw.text((left + _THUMB // 2, y), cell.title, border if last else MUTED, _font(11), "mm")
        return
    draw.text((left, y), cell.title.removeprefix("turn "), MUTED, _font(9), "lm")
    symbols = [symbol for symbol, _ in cell.actions]
    size = 15
    room = _THUMB - 18 * _SCALE
    while size > 6 and _font(size).getlength("".join(symbols)) + 2 * len(symbols) > room:
        size -= 1
    x = left + 18 * _SCALE
    for symbol, color in cell.actions:
        draw.text((x, y), symbol, color, _font(size, bold=True), "lm")
        x += int(_font(size, bold=True).getlength(symbol)) + _SCALE


def _gif_page(
    frame: np.ndarray, left: str, middle: str, color: Color, right: str, border: Color
) -> Image.Image:
    image = _fit(frame, _GIF_FRAME)
    width = _GIF_FRAME + 24
    page = Image.new("RGB", (width, _GIF_FRAME + 24 + _GIF_CAPTION), PAPER)
    draw = ImageDraw.Draw(page)
    x, y = 12 + (_GIF_FRAME - image.width) // 2, 12 + (_GIF_FRAME - image.height) // 2
    page.paste(image, (x, y))
    draw.rectangle((x - 3, y - 3, x + image.width + 2, y + image.height + 2), None, border, 3)
    base = _GIF_FRAME + 24
    draw.text((14, base + 20), left, MUTED, _font(9), "lm")
    draw.text((width // 2, base + 18), middle, color, _font(14, bold=True), "mm")
    font = _font(7)
    while right and font.getlength(right) > width - 28:
        right = right.removesuffix("...")[:-1] + "..." if len(right) > 4 else ""
    draw.text((width // 2, base + 52), right, MUTED, font, "mm")
    return page


def _fit(frame: np.ndarray, size: int) -> Image.Image:
    """The frame with its longer side `size`; whole multiples keep hard pixel edges."""
    image = Image.fromarray(frame)
    factor = size / max(image.size)
    resample = Image.Resampling.NEAREST if factor.is_integer() else Image.Resampling.LANCZOS
    return image.resize((round(image.width * factor), round(image.height * factor)), resample)


def _save(image: Image.Image, path: Path, kind: str, **options: object) -> None:

    data = io.BytesIO()
    image.save(data, kind, **options)
    atomic_write_bytes(path, data.getvalue())


@cache
def _font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib ships and which has arrows; `size` in whole pixels."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/{name}", size * _SCALE)

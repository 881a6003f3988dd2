"""From a reply to an action, and back.

An action is text in the form that environments take, a Python tuple: `('move', 0)`. A model may be
taught to write it in another form; each form is one `ActionFormat`. To add one: define it below and
list it in `FORMATS`.

Parsing is total (no string makes it raise) and its work is bounded: only the last `WINDOW`
characters of a reply are read. The last well-formed action of a reply decides, even when it cannot
be executed: falling back on an earlier one would execute what the model has revised.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

DIRECTIONS = ("right", "up", "left", "down")  # the place is the number in `('move', d)`
STOP = "stop"
STOP_TEXT = "('stop', 'stop')"

WINDOW = 4096  # characters at the end of a reply in which an action is looked for
LITERAL_LIMIT = 1024  # characters of the longest action text that is evaluated
_MAX_CANDIDATES = 16

Action = int | str  # a direction 0..3 or `STOP`


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """Exactly one of the two is set: the action as environments take it, or why there is none.

    `error` holds no text of the reply except at most one plain word in quotes at its end.
    """

    action: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ActionFormat:
    """One way to write the actions of a maze.

    `pattern` finds candidates; `read` turns one match into an action or an error.
    """

    name: str
    instructions: tuple[str, ...]  # lines for the prompt
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str]], ParsedAction]
    render: Callable[[Action], str]


def parse_action(text: str, action_format: str, strict: bool = True) -> ParsedAction:
    """The action that `text` ends up with.

    `strict` knows the actions of a maze and gives them in canonical form. Without it (tuple format
    only) any `('name', literal)` passes through as it was written, for environments that have
    actions of their own.
    """
    tail = text[-WINDOW:]
    if not strict:
        if action_format != TUPLE.name:
            raise ValueError(f"only the format {TUPLE.name!r} can carry any action")
        action = _last_literal_tuple(tail)
        return ParsedAction(action, None) if action else _nothing_found(text, tail)
    fmt = find_format(action_format)
    last = None
    for match in fmt.pattern.finditer(tail):
        last = match
    return fmt.read(last) if last else _nothing_found(text, tail)


def format_action(action: Action, action_format: str) -> str:
    """What a model should write for `action` (0..3 or "stop"); `parse_action` reads it back."""
    return find_format(action_format).render(action)


def error_reason(error: str) -> str:
    """A parse error without the quoted word of the reply: one of a small closed set of texts."""
    return error.partition(" '")[0]


def find_format(name: str) -> ActionFormat:
    """The format called `name`; a `ValueError` names the known ones."""
    if name not in FORMATS:
        close = get_close_matches(name, FORMATS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown action format {name!r}, expected one of {list(FORMATS)}{hint}")
    return FORMATS[name]


def action_text(action: Action) -> str:
    """The canonical text that environments take for `action`."""
    if action == STOP:
        return STOP_TEXT
    if isinstance(action, int) and 0 <= action < len(DIRECTIONS):
        return f"('move', {int(action)})"
    raise ValueError(f"an action is 0..3 or {STOP!r}, not {action!r}")


def literal_tuple(text: str) -> tuple[object, object] | None:
    """`text` read as a literal tuple of two, or None. Total: refuses long text, never raises."""
    if len(text) > LITERAL_LIMIT:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about odd literals in a reply
            value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, tuple) and len(value) == 2 else None


def _nothing_found(text: str, tail: str) -> ParsedAction:
    empty = len(text) <= WINDOW and not tail.strip()
    return ParsedAction(None, "empty reply" if empty else "no action found")


def _quoted(word: str) -> str:
    """A word of a reply, cut down to what can be shown anywhere."""
    plain = re.sub(r"[^A-Za-z0-9 _-]", "", word)[:16].strip()
    return f" '{plain}'" if plain else ""


# Possessive repeats (`*+`) give up no character once taken, so a search is linear in the window.
_TUPLE_PATTERN = re.compile(
    r"""\(\s*+ (?P<q>['"]) (?P<name>\w{1,32}+) (?P=q) \s*+,\s*+
        (?P<payload> [^\s(),'"]{1,32}+ | '[^'\n]{0,32}+' | "[^"\n]{0,32}+" )
        \s*+ ,?+ \s*+ \)""",
    re.VERBOSE | re.ASCII,
)
_TUPLE_HEAD = re.compile(r"""\(\s*+(?P<q>['"])\w{1,64}+(?P=q)\s*+,""", re.ASCII)
_KEYWORD_PATTERN = re.compile(
    r"<\s*+action\s*+>(?P<word>[^<>]{0,64}+)<\s*+/\s*+action\s*+>", re.IGNORECASE | re.ASCII
)


def _read_tuple(match: re.Match[str]) -> ParsedAction:
    name, payload = match["name"], match["payload"]
    if name == "move":
        if not re.fullmatch(r"[+-]?\d{1,31}", payload, re.ASCII):
            return ParsedAction(None, "payload of move is not an integer")
        direction = int(payload)
        if not 0 <= direction < len(DIRECTIONS):
            return ParsedAction(None, "payload out of range")
        return ParsedAction(action_text(direction), None)
    if name == STOP:
        if not re.fullmatch(r"""['"][A-Za-z0-9]{1,4}['"]""", payload):
            return ParsedAction(None, "payload of stop is not stop")
        return ParsedAction(STOP_TEXT, None)
    return ParsedAction(None, f"unknown action{_quoted(name)}")


def _read_keyword(match: re.Match[str]) -> ParsedAction:
    word = match["word"].strip().lower()
    if word == STOP:
        return ParsedAction(STOP_TEXT, None)
    if word in DIRECTIONS:
        return ParsedAction(action_text(DIRECTIONS.index(word)), None)
    return ParsedAction(None, f"unknown direction{_quoted(word)}")


def _render_keyword(action: Action) -> str:
    action_text(action)  # refuses what is not an action
    return f"<action>{STOP if action == STOP else DIRECTIONS[int(action)]}</action>"


def _last_literal_tuple(tail: str) -> str | None:
    """The text of the last outermost `('name', literal)` in `tail`."""
    found, end = None, 0
    for head in list(_TUPLE_HEAD.finditer(tail))[-_MAX_CANDIDATES:]:
        if head.start() < end:
            continue  # inside the tuple found before
        stop = _closing_parenthesis(tail, head.start())
        if stop is not None and literal_tuple(tail[head.start() : stop]):
            found, end = tail[head.start() : stop], stop
    return found


def _closing_parenthesis(text: str, start: int) -> int | None:
    """The place behind the parenthesis that closes the one at `start`; strings are skipped."""
    depth, quote = 0, ""
    place, limit = start, min(len(text), start + LITERAL_LIMIT)
    while place < limit:
        char = text[place]
        if quote:
            if char == "\\":
                place += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return None


TUPLE = ActionFormat(
    name="tuple",
    instructions=(
        "Reply with one action: ('move', d) with d 0 right, 1 up, 2 left, 3 down,",
        "or ('stop', 'stop').",
    ),
    pattern=_TUPLE_PATTERN,
    read=_read_tuple,
    render=action_text,
)
KEYWORD = ActionFormat(
    name="keyword",
    instructions=(
        "Reply with one action: <action>right</action>, <action>up</action>,",
        "<action>left</action>, <action>down</action> or <action>stop</action>.",
    ),
    pattern=_KEYWORD_PATTERN,
    read=_read_keyword,
    render=_render_keyword,
)
FORMATS = {fmt.name: fmt for fmt in (TUPLE, KEYWORD)}

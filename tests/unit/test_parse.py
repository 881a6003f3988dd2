import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wayfinder.chat.parse import (
    DIRECTIONS,
    FORMATS,
    STOP,
    WINDOW,
    ParsedAction,
    action_text,
    error_reason,
    find_format,
    format_action,
    parse_action,
)

ACTIONS = [0, 1, 2, 3, STOP]
actions = st.sampled_from(ACTIONS)
formats = st.sampled_from(list(FORMATS))
# Text near the grammar finds more than arbitrary text does.
pieces = st.sampled_from(
    [
        *("(", ")", "'move'", '"move"', "'stop'", ",", " ", "0", "3", "7", "-", "\n", "\x00"),
        *("<action>", "</action>", "< action >", "left", "north", "<", ">", "/", "\\", "'"),
        *("[", "]", "\ud800"),
    ]
)
replies = st.lists(pieces, max_size=60).map("".join) | st.text(max_size=200)
# Text that cannot be part of an action itself.
filler = st.text(alphabet="abc .:\n-", max_size=30)


@given(actions, formats)
def test_what_is_formatted_is_parsed_back(action, action_format):
    found = parse_action(format_action(action, action_format), action_format)
    assert found == ParsedAction(action_text(action), None)


@given(st.lists(actions, min_size=1, max_size=6), formats, filler)
def test_the_last_action_wins(several, action_format, text):
    reply = text.join(["", *(format_action(a, action_format) for a in several), ""])
    assert parse_action(reply, action_format).action == action_text(several[-1])


@settings(max_examples=300)
@given(replies, formats)
def test_parsing_is_total(reply, action_format):
    found = parse_action(reply, action_format)
    assert (found.action is None) != (found.error is None)
    assert found.action is None or found.action in map(action_text, ACTIONS)
    loose = parse_action(reply, "tuple", strict=False)
    assert (loose.action is None) != (loose.error is None)
    assert loose.action is None or loose.action in reply


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("('move', 2)", "('move', 2)"),
        ('I go up: ("move",1) .', "('move', 1)"),
        ("( 'move' ,\n +3 , )", "('move', 3)"),
        ("('stop', 'ok')", "('stop', 'stop')"),
        ("```('move', 0)```", "('move', 0)"),
        ("(('move', 0))", "('move', 0)"),
        ("('move', 0) or ('move", "('move', 0)"),  # a cut one is not well-formed
    ],
)
def test_tuples_are_read(reply, expected):
    assert parse_action(reply, "tuple") == ParsedAction(expected, None)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("", "empty reply"),
        (" \n\t", "empty reply"),
        ("north!", "no action found"),
        ("('move', 2", "no action found"),
        ("('move' 2)", "no action found"),
        ("<action>left</action>", "no action found"),
        ("('move', 4)", "payload out of range"),
        ("('move', -1)", "payload out of range"),
        ("('move', 1) no, ('move', 9)", "payload out of range"),  # the last word decides
        ("('move', '1')", "payload of move is not an integer"),
        ("('move', 1.0)", "payload of move is not an integer"),
        ("('move', True)", "payload of move is not an integer"),
        ("('move', \u0661)", "payload of move is not an integer"),
        ("('stop', 'now please')", "payload of stop is not stop"),
        ("('stop', 1)", "payload of stop is not stop"),
        ("('jump', 0)", "unknown action 'jump'"),
    ],
)
def test_a_tuple_reply_without_action_says_why(reply, error):
    assert parse_action(reply, "tuple") == ParsedAction(None, error)


@pytest.mark.parametrize("number", range(4))
def test_keywords_are_the_directions_in_order(number):
    word = DIRECTIONS[number]
    for reply in (f"<action>{word}</action>", f"< Action >\n {word.upper()} </ACTION >"):
        assert parse_action(reply, "keyword").action == f"('move', {number})"


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("", "empty reply"),
        ("left", "no action found"),
        ("<action>left", "no action found"),
        ("<action>left</answer>", "no action found"),
        ("('move', 0)", "no action found"),
        ("<action>north</action>", "unknown direction 'north'"),
        ("<action>\u017ftop</action>", "unknown direction 'top'"),  # lower case of S it is not
        ("<action></action>", "unknown direction"),
        ("<action>" + "n" * 60 + "</action>", "unknown direction '" + "n" * 16 + "'"),
        ("<action>|im_end|</action>", "unknown direction 'im_end'"),
        ("<action>'quoted'</action>", "unknown direction 'quoted'"),
    ],
)
def test_a_keyword_reply_without_action_says_why(reply, error):
    assert parse_action(reply, "keyword") == ParsedAction(None, error)


@settings(max_examples=200)
@given(replies, formats)
def test_reasons_are_a_closed_set(reply, action_format):
    error = parse_action(reply, action_format).error
    assert error is None or error_reason(error) in {
        "empty reply",
        "no action found",
        "payload out of range",
        "payload of move is not an integer",
        "payload of stop is not stop",
        "unknown action",
        "unknown direction",
    }


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("('move', 0)", "('move', 0)"),
        (
            "first ('swap', [[0, 1], [2, 2]]), then ('reorder', [2, 0, 1]).",
            "('reorder', [2, 0, 1])",
        ),
        ("('place', (3, -1.5, 'a) b'))", "('place', (3, -1.5, 'a) b'))"),
        ("('outer', ('inner', 1))", "('outer', ('inner', 1))"),
        ("('write', 'it\\'s (1')", "('write', 'it\\'s (1')"),
        ("('good', 1) ('bad', f(2))", "('good', 1)"),
        ("('bad', (('good', 1)", "('good', 1)"),
        ("('turn', 90, 0) ('turn', None)", "('turn', None)"),
    ],
)
def test_any_literal_action_passes_when_not_strict(reply, expected):
    assert parse_action(reply, "tuple", strict=False) == ParsedAction(expected, None)


@pytest.mark.parametrize("reply", ["", "('a')", "('a', x)", "('a', 1, 2)", "(1, 2)", "('a', {[]})"])
def test_other_text_does_not_pass_when_not_strict(reply):
    assert parse_action(reply, "tuple", strict=False).action is None


def test_odd_literals_do_not_warn():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        reply = "('write', '\\d')"  # an escape that Python does not know
        assert parse_action(reply, "tuple", strict=False).action == reply
        assert parse_action("('write', 0or 1)", "tuple", strict=False).action is None
    assert not seen


def test_only_the_end_of_a_reply_is_read():
    action = "('move', 0)"
    assert parse_action(action + "-" * (WINDOW - len(action)), "tuple").action == action
    assert parse_action(action + "-" * WINDOW, "tuple").error == "no action found"
    assert parse_action(action + " " * WINDOW, "tuple").error == "no action found"


@pytest.mark.parametrize(
    "unit",
    [
        *("(", " ", "( '", "('a'", "('move',", "('move', ", "('move', 0", "('a', (", "('a',["),
        *("('a', '", "('a',-", "'", "\x00", "\udfff", "0", "\\"),
        *("<action>", "<action> ", "< ", "<action><"),
    ],
)
def test_the_work_is_bounded(unit):
    reply = unit * (10_000_000 // len(unit))
    start = time.perf_counter()
    for action_format in FORMATS:
        parse_action(reply, action_format)
    parse_action(reply, "tuple", strict=False)
    assert time.perf_counter() - start < 0.5


def test_many_broken_candidates_cost_little():
    broken = "('a',(1)," * 440 + ",x" + ")" * 300  # each could be evaluated, and fails
    best = 1.0
    for _ in range(5):  # the best of several: other processes share the core
        start = time.perf_counter()
        assert parse_action(broken, "tuple", strict=False).action is None
        best = min(best, time.perf_counter() - start)
    assert best < 0.1


def test_unknown_names_are_programming_errors():
    with pytest.raises(ValueError, match="did you mean 'keyword'"):
        find_format("keywords")
    with pytest.raises(ValueError, match="tuple"):
        parse_action("x", "keyword", strict=False)
    for wrong in (4, -1, "left", None):
        for action_format in FORMATS:
            with pytest.raises(ValueError, match="an action is"):
                format_action(wrong, action_format)

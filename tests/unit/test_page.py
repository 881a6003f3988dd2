"""The page of a run: everything is in it, and nothing that a model wrote is markup."""

import base64
import hashlib
import json
import re
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.recorded import make_run, solver, store, wanderer, with_text
from wayfinder.errors import RunDirError
from wayfinder.record.episodes import decode_png, read_episodes, read_frames
from wayfinder.record.page import render_page, write_page
from wayfinder.record.page_data import COLORS, collect
from wayfinder.types import Outcome, frame_hash

TEMPLATES = Path(__file__).parents[2] / "src/wayfinder/record/templates"


class Outline(HTMLParser):
    """The tags of a page with their attributes, and the texts of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))
        self._open = tag
        self.texts.setdefault(tag, [""]) if tag != "script" else self.texts.setdefault(
            tag, []
        ).append("")

    def handle_endtag(self, tag):
        self._open = ""

    def handle_data(self, data):
        if self._open:
            self.texts[self._open][-1] += data

    @property
    def data(self) -> dict:
        return json.loads(self.texts["script"][0])


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("page") / "run")


def evaluation(data: dict, kind: str, step: int) -> dict:
    (found,) = [e for e in data["evaluations"] if (e["kind"], e["step"]) == (kind, step)]
    return found


def test_page_is_one_file_that_asks_for_nothing(run_path):
    path = write_page(run_path)
    assert path == run_path / "page.html"
    page = path.read_text()
    outline = Outline(page)
    assert not {"link", "iframe", "object", "embed"} & {tag for tag, _ in outline.tags}
    names = [name for _, attributes in outline.tags for name, _ in attributes]
    assert "src" not in names
    assert "href" not in names
    assert [name for name in names if name.startswith("on")] == []
    addresses = set(re.findall(r"https?://[^\"'\s]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which no browser fetches
    assert "@import" not in page
    assert "url(" not in page


def test_policy_lets_this_script_and_style_run_and_no_other(run_path):
    outline = Outline(write_page(run_path).read_text())
    (policy,) = [dict(a)["content"] for tag, a in outline.tags if dict(a).get("http-equiv")]
    data, script = outline.texts["script"]
    for kind, text in (("script", script), ("style", outline.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert json.loads(data)


def test_scripts_put_texts_into_the_page_as_text_only():
    code = "".join(path.read_text() for path in TEMPLATES.glob("*.js"))
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function("):
        assert way not in code
    assert "textContent" in code


def test_every_episode_is_there_turn_by_turn(run_path):
    data = Outline(write_page(run_path).read_text()).data
    assert [(e["kind"], e["step"]) for e in data["evaluations"]] == [
        ("eval", 0),
        ("eval", 10),
        ("greedy", 10),
        ("train", 10),
    ]
    assert data["notes"] == []
    path = run_path / "episodes" / "eval_step_000000.jsonl"
    frames = read_frames(path)
    for row, episode in zip(
        evaluation(data, "eval", 0)["episodes"], read_episodes(path), strict=True
    ):
        assert (row["seed"], row["outcome"]) == (episode.task.seed, episode.outcome)
        assert _frame(data, row["replay"]["final"]) == episode.final_frame
        for shown, turn in zip(row["replay"]["turns"], episode.turns, strict=True):
            reply, seen, feedback, executed, cut, start, logprobs = shown
            text, tokens, symbol, action, problem = data["replies"][reply]
            assert _text(data, text) == turn.text
            assert [_text(data, i) for i in tokens] == [f"t{i}" for i in turn.reply_ids]
            assert _text(data, action) == turn.action
            assert _text(data, problem) == turn.parse_error
            assert (_text(data, symbol) == "?") == (turn.action is None)
            assert _text(data, feedback) == turn.feedback
            assert executed == turn.executed
            assert cut == (turn.finish_reason == "length")
            assert start == turn.window_start
            assert np.allclose(
                np.multiply(logprobs, data["logprob_unit"]), turn.logprobs, atol=1e-4
            )
            assert [_frame(data, i) for i in seen] == list(turn.frames)
            assert set(turn.frames) <= frames.keys()
    assert data["metrics"]["steps"] == list(range(11))
    assert data["metrics"]["series"]["train/solve_rate"][:2] == [None, 0.45]
    facts = dict(data["facts"])
    assert facts["solve rate"] == "16.7% (1/6) \u2192 83.3% (5/6)"
    assert facts["worst mismatch"] == "2.0e-05"
    assert facts["begun"] == "2026-11-30 14:20 UTC"
    assert facts["overrides"] == "+experiment=maze_easy seed=3"


def test_frames_replies_and_texts_are_held_once(run_path):
    data = collect(run_path)
    for kind in ("frames", "strings", "replies"):
        assert len({json.dumps(value) for value in data[kind]}) == len(data[kind])
    stored = set()
    for archive in run_path.glob("episodes/*.zip"):
        stored |= set(zipfile.ZipFile(archive).namelist())
    assert len(data["frames"]) == len(stored)


HOSTILE = [
    "</script><script>hacked = 1</script>",
    "<!--<script>",
    "]]>",
    "{{data}} {{script}}",
    "<img src=x onerror=hacked=1>",
    "\ud800 \u2028 \x00 \u202e &lt;",
    "</title><svg onload=hacked=1>",
]


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.sampled_from(HOSTILE), st.text(), st.text("</script>!-\"'&{}\\", max_size=30)))
def test_whatever_is_written_the_page_has_the_same_markup(tmp_path_factory, text):
    base = tmp_path_factory.getbasetemp()
    outlines = []
    for name, words in (("plain", "word"), ("hostile", text)):
        run = base / f"page-{name}"
        run.mkdir(exist_ok=True)
        frames = {}
        episodes = [with_text(wanderer(1, frames), words)]
        store(run, "eval", 0, episodes, frames)
        (run / "config.resolved.json").write_text(json.dumps({"config": {"experiment": words}}))
        (run / "summary.json").write_text(json.dumps({"status": words, "error": words}))
        outlines.append(Outline(write_page(run).read_text(encoding="utf-8")))
    plain, hostile = outlines
    assert hostile.tags == plain.tags
    data = hostile.data
    (row,) = data["evaluations"][0]["episodes"]
    assert row["env"] == text
    assert data["title"] == text or not text
    assert _text(data, row["replay"]["error"]) == text
    for reply, _, feedback, *_ in row["replay"]["turns"]:
        assert _text(data, data["replies"][reply][0]) == text
        assert _text(data, feedback) == (text or None)


def test_hostile_token_pieces_and_prompts_are_data_too(tmp_path, run_path):
    frames = {}
    path = store(tmp_path, "eval", 0, [wanderer(1, frames)], frames)
    record = json.loads(path.read_text())
    record["prompt"] = record["pieces"]["21"] = HOSTILE[0]
    path.write_text(json.dumps(record) + "\n")
    outline = Outline(write_page(tmp_path).read_text())
    assert outline.tags == [
        (tag, attributes) for tag, attributes in Outline(write_page(run_path).read_text()).tags
    ]
    assert HOSTILE[0] in outline.data["strings"]


def test_episodes_without_token_texts_show_the_ids(tmp_path):
    frames = {}
    path = store(tmp_path, "eval", 0, [solver(1, frames)], frames)
    record = json.loads(path.read_text())
    del record["pieces"], record["prompt"]
    path.write_text(json.dumps(record) + "\n")
    data = collect(tmp_path)
    (row,) = data["evaluations"][0]["episodes"]
    assert row["replay"]["prompt"] is None
    tokens = data["replies"][row["replay"]["turns"][0][0]][1]
    assert [_text(data, token) for token in tokens] == ["#20", "#21", "#22"]


def _remove(name):
    return lambda run: (run / name).unlink()


def _overwrite(name, text):
    return lambda run: (run / name).write_text(text)


def _drop_episodes(run):
    for path in (run / "episodes").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (_remove("summary.json"), "summary.json: missing"),
        (_remove("config.resolved.json"), "config.resolved.json: missing"),
        (_remove("metrics.jsonl"), "metrics.jsonl: no line"),
        (_overwrite("summary.json", "{"), "summary.json: cannot be read"),
        (_overwrite("config.resolved.json", "[1]"), "config.resolved.json: an object was expected"),
        (_overwrite("config.resolved.json", '{"config": 3, "overrides": 1}'), None),
        (_overwrite("metrics.jsonl", '{"step": 1, "elapsed_s": 1, "a": "b"}\n{"st'), None),
        (_drop_episodes, "no episodes are stored"),
        (_remove("episodes/eval_step_000010.jsonl"), "no episodes of eval at step 10"),
        (_remove("episodes/eval_step_000010.frames.zip"), "eval_step_000010.frames.zip: no frames"),
        (_overwrite("episodes/eval_step_000010.frames.zip", "x"), "no frames: BadZipFile"),
        (_overwrite("episodes/eval_step_000010.jsonl", "{"), "eval_step_000010.jsonl: left out"),
        (
            _overwrite("episodes/eval_step_000010.jsonl", '{"format": 0}\n'),
            "eval_step_000010.jsonl: left out",
        ),
        (
            _overwrite("episodes/eval_step_000010.jsonl", '{"format": 1, "turns": 3}\n'),
            "eval_step_000010.jsonl: left out",
        ),
    ],
)
def test_partial_and_broken_runs_say_what_is_missing(tmp_path, damage, note):
    run = make_run(tmp_path / "run")
    damage(run)
    data = Outline(write_page(run).read_text()).data
    assert any(note in found for found in data["notes"]) if note else data["notes"] == []


def test_an_empty_directory_has_a_page_and_none_has_not(tmp_path):
    data = Outline(write_page(tmp_path).read_text()).data
    assert data["evaluations"] == []
    assert len(data["notes"]) == 4
    with pytest.raises(RunDirError, match=r"no-run.*run directory was expected"):
        write_page(tmp_path / "no-run")


def test_page_that_would_be_too_large_keeps_failures_and_every_outcome(run_path):
    whole = collect(run_path)
    size = len(render_page(whole))
    budget = (size - len(render_page(collect(run_path, 0)))) // 3
    data = collect(run_path, budget)
    assert len(render_page(data)) < size - budget
    rows = [row for e in data["evaluations"] for row in e["episodes"]]
    assert [r["outcome"] for r in rows] == [
        r["outcome"] for e in whole["evaluations"] for r in e["episodes"]
    ]
    left_out = sum(row["replay"] is None for row in rows)
    assert 0 < left_out < len(rows)
    assert data["notes"] == [
        f"{left_out} episodes are coloured but cannot be replayed here, to keep the page small; "
        "episodes/ has them."
    ]
    last = evaluation(data, "eval", 10)["episodes"]
    assert [r["replay"] is not None for r in last if r["outcome"] != "solved"] == [True]
    nothing = evaluation(collect(run_path, 0), "eval", 0)["episodes"]
    assert all(row["replay"] is None for row in nothing)


def test_frames_that_are_not_mazes_are_reduced(tmp_path):
    frames = {}
    episode = wanderer(1, frames)
    draw = np.random.default_rng(0)
    noise = {name: draw.integers(0, 256, (480, 640, 3), dtype=np.uint8) for name in frames}
    store(tmp_path, "eval", 0, [episode], noise)
    for uri in collect(tmp_path)["frames"]:
        kind, _, data = uri.partition(";base64,")
        assert kind == "data:image/jpeg"
        assert decode_png(base64.b64decode(data)).shape == (192, 256, 3)


def test_every_outcome_has_a_colour_of_its_own():
    assert len({COLORS[outcome] for outcome in Outcome}) == len(Outcome)


def _text(data, index):
    return None if index is None else data["strings"][index]


def _frame(data, index) -> str:
    """Hash of a frame of the page."""
    png = base64.b64decode(data["frames"][index].removeprefix("data:image/png;base64,"))
    return frame_hash(decode_png(png))

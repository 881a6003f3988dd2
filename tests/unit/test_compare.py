"""Two evaluations maze by maze."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.episodes import ENV_ID, expert_moves, walk
from support.runs import make_run
from wayfinder.config.load import compose
from wayfinder.errors import ConfigError, RunDirError
from wayfinder.record.compare import compare, comparison_text, find_evaluation
from wayfinder.record.episodes import episodes_path, write_episodes
from wayfinder.reporting import report
from wayfinder.statistics import paired_difference
from wayfinder.types import Outcome


def _evaluate(run: Path, step: int, solved: dict[int, list[bool]]) -> Path:
    """Episodes of one evaluation: maze seed -> success of each of its samples."""
    frames = {}
    episodes = [
        walk(seed, [*expert_moves(seed), "stop"], Outcome.SOLVED, frames, member)
        if success
        else walk(seed, ["stop"], Outcome.STOPPED, frames, member)
        for seed, samples in solved.items()
        for member, success in enumerate(samples)
    ]
    path = episodes_path(run, "eval", step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_episodes(path, episodes, frames)
    return path


@pytest.fixture
def root(tmp_path):
    """Eight mazes: one is gained and one is lost between the steps 0 and 10 of seed 0, three are
    gained by the run with groups of 16."""
    one = make_run(tmp_path, ["seed=0"], {0: 0.25})
    hard = {seed: [seed < 4] for seed in range(8)}
    _evaluate(one, 0, hard)
    _evaluate(one, 10, hard | {3: [False], 4: [True]})
    two = make_run(tmp_path, ["algorithm.group_size=16"], {0: 0.25})
    _evaluate(two, 10, hard | {4: [True], 5: [True], 6: [True]})
    return tmp_path


ONE, TWO = "maze_easy/seed-0", "maze_easy/algorithm.group_size-16_seed-0"


def test_mazes_are_paired(root):
    first, second = (find_evaluation(text, root) for text in (f"{ONE}@0", TWO))
    found = compare(first, second)
    assert (found.mazes, found.only_first, found.only_second) == (8, 0, 0)
    assert (found.rate_first[0], found.rate_second[0]) == (0.5, 0.875)
    before = [1.0] * 4 + [0.0] * 4
    assert found.difference == paired_difference(before, [1.0] * 7 + [0.0])
    assert [change.maze for change in found.gained] == [(ENV_ID, 4), (ENV_ID, 5), (ENV_ID, 6)]
    assert found.gained[0].first == ("stopped",)
    assert found.gained[0].second == ("solved",)
    assert found.lost == ()
    assert found.is_significant
    back = compare(second, first)
    assert back.difference[0] == -found.difference[0]
    assert (back.gained, len(back.lost)) == ((), 3)


def test_the_text_says_what_changed_and_what_is_not_shown(root):
    first, second = (find_evaluation(text, root) for text in (f"{ONE}@0", ONE))
    assert second == episodes_path(root / ONE, "eval", 10)
    found = compare(first, second)
    text = comparison_text(found, root)
    assert not found.is_significant
    assert text.startswith(f"# {ONE}@10 against {ONE}@0\n")
    assert f"| {ONE}@0 | 0.500 | " in text
    assert "paired by maze: +0.000 (95% interval -0.375 to +0.375; 0 lies inside" in text
    assert f"Better (1):\n- {ENV_ID} seed 4: stopped -> solved\n" in text
    assert f"Worse (1):\n- {ENV_ID} seed 3: solved -> stopped\n" in text
    assert "Settings that differ" not in text
    other = comparison_text(compare(second, find_evaluation(TWO, root)), root)
    assert "Settings that differ:\n- algorithm.group_size: 8 -> 16\n" in other


def test_samples_of_one_maze_are_one_value(root):
    first = _evaluate(root / ONE, 20, {0: [True, False], 1: [True, True]})
    second = _evaluate(root / ONE, 30, {0: [True, True], 1: [True, True]})
    found = compare(first, second)
    assert (found.mazes, found.rate_first[0], found.difference[0]) == (2, 0.75, 0.25)
    assert found.gained[0].first == ("solved", "stopped")


def test_other_mazes_are_left_out_and_counted(root):
    first = _evaluate(root / ONE, 20, {0: [True], 1: [True], 2: [False]})
    second = _evaluate(root / ONE, 30, {1: [False], 9: [True]})
    found = compare(first, second)
    assert (found.mazes, found.only_first, found.only_second) == (1, 2, 1)
    text = comparison_text(found, root)
    assert f"Mazes in both: 1; 2 more of {ONE}@20 are left out; 1 more of {ONE}@30" in text
    with pytest.raises(RunDirError, match="on the same mazes"):
        compare(first, _evaluate(root / ONE, 40, {9: [True]}))


def test_an_evaluation_is_found_by_run_step_checkpoint_or_file(root, monkeypatch):
    path = episodes_path(root / ONE, "eval", 0)
    checkpoint = root / ONE / "checkpoints" / "step_000000"
    checkpoint.mkdir()
    for text in (f"{ONE}@0", f"{root / ONE}@0", str(checkpoint), str(path)):
        assert find_evaluation(text, root) == path
    monkeypatch.chdir(root / "maze_easy")
    assert find_evaluation("seed-0@0", Path("/nowhere")).samefile(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("maze_easy/seed-7", "found nothing there"),
        (f"{ONE}@5", "at step 5 was expected .* found those of the steps 0, 10"),
        ("maze_easy/seed-1", "found none. Mend: name another run"),
    ],
)
def test_what_is_not_there_is_named(root, text, words):
    make_run(root, ["seed=1"])
    with pytest.raises(RunDirError, match=words):
        find_evaluation(text, root)


def test_a_file_that_is_no_evaluation_is_refused(root):
    path = episodes_path(root / ONE, "eval", 0)
    for line in ('{"format": 1}', '{"form', "[]"):
        path.write_text(f"{line}\n")
        with pytest.raises(RunDirError, match="the episodes of an evaluation were expected"):
            compare(path, path)
    path.write_text('{"format": 2}\n')
    with pytest.raises(RunDirError, match="episodes of format 1 were expected"):
        compare(path, path)


def test_the_report_prints_and_keeps_the_comparison(root, capsys):
    config = compose(["task=report", f"root={root}", f"report.compare=[{ONE}@0,{ONE}@10]"])
    report(config, [], 0.0)
    text = (root / "report" / "compare.md").read_text()
    assert f"# {ONE}@10 against {ONE}@0" in text
    assert text in capsys.readouterr().out


def test_a_comparison_takes_two(root):
    for given in ("[a]", "[a,b,c]"):
        with pytest.raises(ConfigError, match=r"report\.compare=.*two evaluations"):
            compose(["task=report", f"root={root}", f"report.compare={given}"])

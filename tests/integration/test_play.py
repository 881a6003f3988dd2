"""One maze in the terminal, with the real engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from wayfinder.record.episodes import latest_episodes, read_episodes
from wayfinder.record.pictures import outcome_text

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def run(root: Path, *overrides: str) -> str:
    command = [sys.executable, "run.py", "+experiment=maze_easy", f"paths.root={root}", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_play_shows_the_episode_that_an_evaluation_plays(tmp_path):
    maze = ("play.seed=2", "eval.first_seed=2", "eval.tasks=1")
    lines = run(tmp_path, *maze, "task=play", "cluster.slots=2").splitlines()
    assert list(tmp_path.iterdir()) == []  # no run, and no adapter is left behind
    run(
        tmp_path,
        *maze,
        "task=evaluate",
        "run.name=evaluated",
        "eval.unseen_tasks=0",
        "eval.final_greedy=false",
        "tracking=none",
    )
    (episode,) = read_episodes(latest_episodes(tmp_path / "evaluated"))
    count = len(episode.turns)
    shown = [line for line in lines if re.match(r"turn +\d", line)]
    assert len(shown) == count
    for number, (line, turn) in enumerate(zip(shown, episode.turns, strict=True), 1):
        assert re.match(rf"turn +{number} ", line)
        assert turn.action in line
        assert turn.feedback in line
    assert f"{outcome_text(episode.outcome)} in {count} turns, reward {episode.reward:g}" in lines

"""Hand-made run directories, for tests of what reads them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from support.episodes import ENV_ID, expert_moves, walk
from wayfinder.record.episodes import episodes_path, write_episodes
from wayfinder.record.layout import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from wayfinder.record.metrics import MetricsLog
from wayfinder.types import Episode, Outcome

CONFIG = {
    "experiment": "maze_easy",
    "seed": 3,
    "env": {"id": ENV_ID},
    "model": {"name": "tiny"},
    "rollout": {"temperature": 0.7},
}


def decode(ids: list[int]) -> str:
    return " ".join(f"t{token}" for token in ids)


def wanderer(seed: int, frames: dict[str, np.ndarray], member: int = 0) -> Episode:
    """An episode that walks into a wall, moves, writes nonsense, turns back and gives up."""
    return walk(seed, wanderer_moves(seed), Outcome.STOPPED, frames, member)


def wanderer_moves(seed: int) -> list[int | str | None]:
    # From a corner there is a wall behind, and the first passage is two cells long.
    ahead = expert_moves(seed)[0]
    behind = (ahead + 2) % 4
    return [behind, ahead, ahead, None, behind, "stop"]


def solver(seed: int, frames: dict[str, np.ndarray], member: int = 0) -> Episode:
    return walk(seed, [*expert_moves(seed), "stop"], Outcome.SOLVED, frames, member)


def with_text(episode: Episode, text: str) -> Episode:
    """The episode with `text` everywhere that a model or an environment can write to."""
    turns = tuple(
        dataclasses.replace(
            turn,
            text=text,
            action=None if turn.action is None else text,
            parse_error=text if turn.action is None else None,
            feedback=text,
        )
        for turn in episode.turns
    )
    task = dataclasses.replace(episode.task, env_id=text)
    return dataclasses.replace(episode, turns=turns, task=task, error=text)


def store(
    run_path: Path, kind: str, step: int, episodes: list[Episode], frames: dict[str, np.ndarray]
) -> Path:
    path = episodes_path(run_path, kind, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_episodes(path, episodes, frames, decode)
    return path


def make_run(run_path: Path, seeds: int = 6) -> Path:
    """A finished run: at step 0 one maze is solved, at step 10 all but the last; then a greedy
    evaluation, and the training episodes of step 10, two of each of two mazes."""
    run_path.mkdir(parents=True, exist_ok=True)
    frames: dict[str, np.ndarray] = {}
    for step, num_solved in ((0, 1), (10, seeds - 1)):
        play = [solver if seed < num_solved else wanderer for seed in range(seeds)]
        store(run_path, "eval", step, [play[i](i, frames) for i in range(seeds)], frames)
    store(run_path, "greedy", 10, [solver(seed, frames) for seed in range(seeds)], frames)
    trained = [play(s, frames, i) for s in (50, 51) for i, play in enumerate((solver, wanderer))]
    store(run_path, "train", 10, trained, frames)
    log = MetricsLog(run_path / METRICS_FILE)
    for step in range(11):
        log.log(step, _metrics(step, seeds))
    log.log(10, {"greedy/solve_rate": 1.0, "greedy/num_solved": 6.0, "greedy/num_episodes": 6.0})
    log.finish({}, 0)
    record = {
        "format": 1,
        "created": 1796048443.2,
        "config_hash": "9ff304ef3e8f9d24",
        "overrides": ["+experiment=maze_easy", "seed=3"],
        "commit": "a42f21b542a9f404e33a",
        "dirty": False,
        "config": CONFIG,
    }
    (run_path / CONFIG_FILE).write_text(json.dumps(record))
    summary = {"status": "finished", "wall_s": 600.0, "peak_memory_bytes": 8 * 2**30, "error": None}
    (run_path / SUMMARY_FILE).write_text(json.dumps(summary))
    return run_path


def _metrics(step: int, seeds: int) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    if step:
        metrics = {
            "train/solve_rate": 0.4 + step / 20,
            "train/entropy": 0.3 - step / 50,
            "train/grad_norm": 0.1,
            "mismatch/abs_logprob_diff_max": 2e-6 * step,
            "mismatch/abs_logprob_diff_mean": 1e-7,
            "time/rollout_s": 9.0,
            "time/update_s": 5.0,
        }
    if step in (0, 10):
        solved = 1 if step == 0 else seeds - 1
        metrics |= {
            "eval/solve_rate": solved / seeds,
            "eval/solve_rate_low": max(0.0, solved / seeds - 0.2),
            "eval/solve_rate_high": min(1.0, solved / seeds + 0.2),
            "eval/num_solved": float(solved),
            "eval/num_episodes": float(seeds),
            "eval/ceiling": 1.0,
        }
    return metrics

"""Evaluation on a fixed set of tasks: every task, every sample, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wayfinder.config.schema import Config
from wayfinder.envs.tasks import ceiling, optimal_moves
from wayfinder.rollout.episode import Place
from wayfinder.runtime.workers import Workers
from wayfinder.specs import episode_spec
from wayfinder.statistics import interval_of_mean, pass_at_k
from wayfinder.types import Episode, Outcome, Task


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Metrics under `<kind>/`, and what was played."""

    metrics: dict[str, float]
    episodes: list[Episode]
    frames: dict[str, np.ndarray]
    solve_rate: float


def run_evaluation(
    workers: Workers,
    config: Config,
    tasks: Sequence[Task],
    kind: str,
    step: int,
    version: int,
    temperature: float | None,
) -> Evaluation:
    """Play `eval.samples` episodes of each task with the policy that the engines serve.

    The random stream is a function of run seed, kind, task and sample, not of the step: two
    evaluations of one policy are equal, and two policies meet the same luck.
    """
    places = [Place(task, member) for task in tasks for member in range(config.eval.samples)]
    spec = episode_spec(config, kind, 0, version, temperature)
    played = workers.play(places, spec, lockstep=str(config.rollout.schedule) == "lockstep")
    metrics = evaluation_metrics(
        played.episodes, tasks, config.env.max_turns, kind, config.eval.pass_at
    )
    metrics[f"{kind}/temperature"] = spec.temperature
    return Evaluation(
        metrics, played.episodes, workers.fetch_frames(played), metrics[f"{kind}/solve_rate"]
    )


def evaluation_metrics(
    episodes: Sequence[Episode],
    tasks: Sequence[Task],
    max_turns: int,
    kind: str,
    pass_at: Sequence[int] = (1,),
) -> dict[str, float]:
    """Figures of one evaluation. Each task has equal weight; an episode that the system failed
    counts as not solved, so no figure improves by a fault."""
    if not episodes:
        raise ValueError("an evaluation without episodes says nothing")
    by_task = solved_by_task(episodes)
    rates = [float(np.mean(successes)) for successes in by_task.values()]
    low, high = interval_of_mean(rates)
    turns = [turn for episode in episodes for turn in episode.turns]
    outcomes = [episode.outcome for episode in episodes]
    metrics = {
        f"{kind}/all/pass_at_{k}": float(
            np.mean([pass_at_k(len(s), sum(s), k) for s in by_task.values()])
        )
        for k in sorted({1, *pass_at})
    }
    metrics |= {
        f"{kind}/solve_rate": float(np.mean(rates)),
        f"{kind}/solve_rate_low": low,
        f"{kind}/solve_rate_high": high,
        f"{kind}/num_episodes": float(len(episodes)),
        f"{kind}/num_solved": float(sum(e.success for e in episodes)),
        f"{kind}/mean_turns": len(turns) / len(episodes),
        f"{kind}/illegal_moves": float(sum(t.action is not None and not t.executed for t in turns)),
        f"{kind}/parse_failures": float(sum(t.action is None for t in turns)),
        f"{kind}/cut_replies": float(sum(t.finish_reason == "length" for t in turns)),
        f"{kind}/wrong_stops": float(outcomes.count(Outcome.STOPPED)),
        f"{kind}/timeouts": float(outcomes.count(Outcome.TURN_LIMIT)),
        f"{kind}/failed_episodes": float(sum(o.is_failure for o in outcomes)),
    }
    best = ceiling(tasks, max_turns)
    if best is not None:
        metrics[f"{kind}/ceiling"] = best
    return metrics | _by_path_length(episodes, kind)


def solved_by_task(episodes: Sequence[Episode]) -> dict[int, list[bool]]:
    """Success of each episode, by the index of its task."""
    by_task: dict[int, list[bool]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task.index, []).append(episode.success)
    return by_task


def _by_path_length(episodes: Sequence[Episode], kind: str) -> dict[str, float]:
    """Solve rate by the length of the shortest path, and how direct the solved episodes were.

    `optimality` is the mean of shortest path / moves made, over solved episodes; turns that did not
    move, the final stop apart, count as moves. Empty where shortest paths are not known.
    """
    solved: dict[str, list[bool]] = {}
    directness = []
    for episode in episodes:
        shortest = optimal_moves(episode.task)
        if shortest is None:
            return {}
        solved.setdefault(_length_bin(shortest), []).append(episode.success)
        if episode.success:
            directness.append(shortest / max(shortest, len(episode.turns) - 1))
    metrics = {f"{kind}/{name}/pass_at_1": float(np.mean(s)) for name, s in sorted(solved.items())}
    if directness:
        metrics[f"{kind}/optimality"] = float(np.mean(directness))
    return metrics


def _length_bin(moves: int) -> str:
    """Five lengths to a bin, named so that they sort: `path_06_10`."""
    low = 5 * ((moves - 1) // 5) + 1
    return f"path_{low:02d}_{low + 4:02d}"

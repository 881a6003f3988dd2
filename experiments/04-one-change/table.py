"""Table and figure of the study, from the directories of its runs.

    python experiments/04-one-change/table.py outputs/maze_easy_short

An arm is what its command changed; the arm that changed nothing is the base. Differences are to
the base on the same mazes and seeds, with a 95% interval over mazes. Prints the table and writes it
as `arms.csv`, with `curves.png` and `outcomes.csv`: of every evaluation the mazes that were solved,
one digit a maze in the order of their seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from wayfinder.record.episodes import episodes_path, read_episodes
from wayfinder.record.runs import RunRecord, read_runs
from wayfinder.record.table import results
from wayfinder.statistics import paired_difference

HERE = Path(__file__).parent
BASE = "base"
TRAIN, EVAL = "train/solve_rate", "eval/solve_rate"
EVALUATED = (2, 4)


def main(root: str) -> None:
    runs, left_out = read_runs(Path(root))
    print(*(f"left out {item.name}: {item.reason}" for item in left_out), sep="\n")
    arms: dict[str, dict[int, RunRecord]] = {}
    for run in sorted(runs, key=lambda run: run.name):
        if run.status == "finished":
            arms.setdefault(arm(run), {})[run.config["seed"]] = run
    arms = {BASE: arms.pop(BASE), **arms}
    table = pd.DataFrame([row(name, members, arms[BASE]) for name, members in arms.items()])
    table.to_csv(HERE / "arms.csv", index=False)
    shown = table.astype(str)
    lines = ["| " + " | ".join(shown.columns) + " |", "|" + "---|" * len(shown.columns)]
    lines += ["| " + " | ".join(values) + " |" for values in shown.to_numpy()]
    print("\n".join(lines))
    outcomes(arms).to_csv(HERE / "outcomes.csv", index=False)
    draw(arms)


def arm(run: RunRecord) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(run.changed.items())) or BASE


def row(name: str, members: dict[int, RunRecord], base: dict[int, RunRecord]) -> dict[str, str]:
    rates = pd.DataFrame([dict(run.series(TRAIN)) for run in members.values()])
    commits = sorted({run.summary["commit"][:7] for run in members.values()})
    found = {
        "arm": name,
        "seeds": ", ".join(map(str, sorted(members))),
        "commit": ", ".join(commits),
    }
    found |= {f"train {step}": f"{rates[step].mean():.3f}" for step in sorted(rates)}
    for step in EVALUATED:
        solved = [dict(run.series(EVAL))[step] for run in members.values()]
        found[f"64 mazes, {step}"] = f"{np.mean(solved):.3f} ({min(solved):.2f}-{max(solved):.2f})"
        found[f"to base, {step}"] = ""
        if name != BASE:
            mean, low, high = difference(members, base, step)
            star = " *" if low > 0 or high < 0 else ""
            found[f"to base, {step}"] = f"{mean:+.3f} ({low:+.2f} to {high:+.2f}){star}"
    tokens = results(list(members.values()))["sampled_tokens"].mean()
    found["tokens sampled"] = f"{tokens:,.0f}"
    return found


def difference(
    members: dict[int, RunRecord], base: dict[int, RunRecord], step: int
) -> tuple[float, float, float]:
    """Of arm - base in the share of a maze's solved episodes, over the seeds that both have."""
    seeds = sorted(members.keys() & base.keys())
    before, after = (solved([runs[seed] for seed in seeds], step) for runs in (base, members))
    assert before.keys() == after.keys()
    return paired_difference(list(before.values()), [after[maze] for maze in before])


def solved(runs: list[RunRecord], step: int) -> dict[int, float]:
    mazes: dict[int, list[bool]] = {}
    for run in runs:
        for episode in read_episodes(episodes_path(run.path, "eval", step)):
            mazes.setdefault(episode.task.seed, []).append(episode.success)
    return {maze: float(np.mean(outcomes)) for maze, outcomes in mazes.items()}


def outcomes(arms: dict[str, dict[int, RunRecord]]) -> pd.DataFrame:
    rows = []
    for name, members in arms.items():
        for seed, run in sorted(members.items()):
            for step, rate in run.series(EVAL):
                mazes = sorted(solved([run], step).items())
                digits = "".join(str(int(outcome)) for _, outcome in mazes)
                rows.append((name, seed, run.summary["commit"][:7], step, rate, digits))
    return pd.DataFrame(rows, columns=["arm", "seed", "commit", "step", "solve_rate", "solved"])


def draw(arms: dict[str, dict[int, RunRecord]]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    colors = plt.colormaps["tab20"]
    for number, (name, members) in enumerate(arms.items()):
        series = [dict(run.series(TRAIN)) for run in members.values()]
        steps = sorted(series[0])
        rates = np.array([[one[step] for step in steps] for one in series])
        style = {"lw": 3, "color": "black"} if name == BASE else {"color": colors(number)}
        axes.plot(steps, rates.mean(axis=0), "o-", ms=4, label=name, **style)
    axes.set(xlabel="step", ylabel="solve rate of training episodes, mean over seeds")
    axes.set_xticks(steps)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(HERE / "curves.png", dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])

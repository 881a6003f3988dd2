"""Table and figure of whole training runs, from their files.

    python experiments/training_table.py experiments/01-maze-easy outputs/maze_easy/seed-{0,1,2}
    python experiments/training_table.py experiments/01-maze-easy                # draw again

Copies `metrics.jsonl` and `summary.json` of each run into the record, prints the table of all runs
that the record holds and draws its `curve.png`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")


import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

PHASES = ("rollout", "update", "sync")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    arguments = parser.parse_args()
    record = arguments.record
    for run in arguments.runs:
        target = record / run.name
        target.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "summary.json"):
            shutil.copy(run / name, target / name)
    paths = sorted(path.parent for path in record.glob("*/metrics.jsonl"))
    rows = [figures(path) for path in paths]
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")
    draw(paths, record / "curve.png")


def read(path: Path) -> tuple[list[dict], dict]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((path / "summary.json").read_text())


def figures(path: Path) -> dict[str, str]:
    lines, summary = read(path)
    first, last = lines[0], lines[-1]
    merged: dict = {}
    for line in lines:
        merged |= line
    steps = [line for line in lines if "time/rollout_s" in line]
    # A step lasts from the line before it, of a step or an evaluation, to its own.
    total = sum(
        after["elapsed_s"] - before["elapsed_s"]
        for before, after in itertools.pairwise(lines)
        if "time/rollout_s" in after
    )
    shares = [sum(line.get(f"time/{name}_s", 0.0) for line in steps) / total for name in PHASES]
    solved = [line["train/solve_rate"] for line in steps]
    return {
        "run": path.name,
        "first": f"{first['eval/num_solved']:.0f}/{first['eval/num_episodes']:.0f}",
        "last": f"{merged['eval/num_solved']:.0f}/{merged['eval/num_episodes']:.0f}",
        "greedy": f"{merged['greedy/num_solved']:.0f}/{merged['greedy/num_episodes']:.0f}",
        "unseen": f"{merged['unseen/num_solved']:.0f}/{merged['unseen/num_episodes']:.0f}",
        "training over 90% at step": str(
            next((i for i, s in enumerate(solved, 1) if s > 0.9), "never")
        ),
        "mismatch max": f"{max(s.get('mismatch/abs_logprob_diff_max', 0) for s in steps):.1e}",
        "first evaluation": f"{first['elapsed_s']:.0f} s",
        "whole run": f"{summary['wall_s'] / 60:.1f} min",
        # A driver that joined a Ray cannot see its workers.
        "memory": f"{memory / 2**30:.1f} GiB" if (memory := summary["peak_memory_bytes"]) else "",
        "rollout / update / sync / other": " / ".join(
            f"{100 * share:.0f}%" for share in (*shares, 1 - sum(shares))
        ),
        "commit": f"{summary['commit'][:7]}{' (changed)' if summary['dirty'] else ''}",
        "steps": str(last["step"]),
    }


def draw(paths: list[Path], file: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    for path in paths:
        lines, _ = read(path)
        steps = [line for line in lines if "train/solve_rate" in line]
        evaluations = [line for line in lines if "eval/solve_rate" in line]
        color = left.plot(
            [line["step"] for line in steps],
            [line["train/solve_rate"] for line in steps],
            label=path.name,
        )[0].get_color()
        left.plot(
            [line["step"] for line in evaluations],
            [line["eval/solve_rate"] for line in evaluations],
            "o",
            color=color,
        )
        right.plot(
            [line["step"] for line in steps],
            [line["train/mean_turns"] for line in steps],
            color=color,
        )
    left.set(title="solve rate (line: training, dot: 64 mazes)", xlabel="step", ylim=(0, 1.03))
    right.set(title="turns per training episode", xlabel="step", ylim=(0, None))
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=len(paths), frameon=False)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()

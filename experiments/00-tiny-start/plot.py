"""Draws `curve.png` beside the record of a preparation.

python experiments/00-tiny-start/plot.py [a training_record.json, if not the one here]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHIPPED = Path(__file__).parent / "training_record.json"
PANELS = (
    ("vision", "1 vision: the tower", ("cells", "kinds", "mazes"), "share right"),
    ("clean", "2 clean: imitation", ("replies",), "share of replies right"),
)


def main(path: Path) -> None:
    record = json.loads(path.read_text())
    stages = {stage["name"]: stage for stage in record["stages"]}
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axis, (name, title, keys, label) in zip(axes, PANELS, strict=False):
        curve = stages[name]["curve"]
        for key in keys:
            axis.plot([row["examples"] for row in curve], [row[key] for row in curve], label=key)
        axis.set(title=title, xlabel="examples", ylabel=label, ylim=(0, 1.02))
        axis.legend(loc="lower right")
    probes = sorted(record["blend"], key=lambda row: row["share"])
    axis = axes[2]
    axis.plot([row["share"] for row in probes], [row["solve_rate"] for row in probes], marker="o")
    axis.axhline(record["config"]["target_solve_rate"], color="gray", linestyle="--", label="aim")
    axis.set(
        title="3 sloppy: solve rate, evaluation mazes",
        xlabel="share of the sloppy weights in the blend",
        ylabel="solve rate",
        ylim=(0, 1.02),
    )
    axis.legend()
    figure.savefig(path.with_name("curve.png"), dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)

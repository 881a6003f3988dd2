"""Runs the exactness tests and writes the largest error that each of them saw.

    python experiments/02-exactness/measure.py       # about 8 minutes on two cores

Writes `measured.json`: for each check its claim, the bound that the test holds, the number of cases
and the largest error of all cases, as the tests report it (junit properties named `error`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = (
    "unit/test_advantage.py",
    "unit/test_kl.py",
    "unit/test_logprobs.py",
    "unit/test_loss.py",
    "unit/test_positions.py",
    "integration/test_engine.py",
    "integration/test_policy_rank.py",
    "integration/test_vllm_parts.py",
)
CHECKS = {  # test: what is compared with what, bound
    "test_logprobs_agree_before_and_after_two_updates": (
        "log-probs: engine / trainer, 3 turns and frames, after two updates, each history",
        "1e-4",
    ),
    "test_ranks_and_scales_mean_the_same_on_both_sides": (
        "log-probs: engine / trainer, ranks 12, 24 (rank-stabilised), 48",
        "1e-4",
    ),
    "test_a_probe_equals_the_trainers": ("raw log-probs of a prompt: engine / trainer", "1e-4"),
    "test_equal_to_float64": ("log-probs: float32 / float64 reference", "1e-5 relative"),
    "test_equal_to_the_models_own_positions": ("M-RoPE: ours / transformers", "0"),
    "test_positions_equal_those_of_vllms_model": ("M-RoPE: ours / vLLM", "0"),
    "test_equals_vllms_own_for_adapters": ("LoRA on a CPU: ours / vLLM's, float32", "1e-5"),
    "test_equals_the_formula": ("advantages / the formula in a loop", "1e-12"),
    "test_gradient_as_a_loss_is_the_documented_one": (
        "gradient of each KL kind in the loss / by hand, all tokens enumerated",
        "1e-12",
    ),
    "test_gradient_in_the_reward_is_the_documented_one": (
        "gradient of KL in the reward / by hand",
        "1e-12",
    ),
    "test_value_and_gradient_equal_the_loop": (
        "gradient of all losses x reductions x importance modes / float64 loop",
        "1e-9",
    ),
    "test_any_split_gives_the_same_update_and_the_same_metrics": (
        "gradient: any split into micro-batches / one, relative",
        "1e-6",
    ),
    "test_gradient_is_that_of_one_process_for_any_split": (
        "gradient: 1, 2, 3 FSDP2 ranks, uneven, idle / transformers + PEFT in one process, "
        "relative to the largest entry",
        "1e-4",
    ),
    "test_how_it_is_computed_changes_nothing": (
        "gradient: packed, eager, checkpointed / the same process",
        "1e-4",
    ),
    "test_saved_and_loaded_ranks_go_on_as_if_nothing_happened": (
        "adapter after save, load and two updates / without the break, 1 and 2 ranks",
        "0",
    ),
}


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"),
                *("-o", "junit_family=xunit1"),
                *(f"tests/{name}" for name in FILES),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            check=False,
        )
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    rows = []
    for name, (claim, bound) in CHECKS.items():
        own = [case for case in cases if case.attrib["name"].split("[")[0] == name]
        errors = [
            float(item.attrib["value"])
            for case in own
            for item in case.iter("property")
            if item.attrib["name"] == "error"
        ]
        if not errors:
            raise SystemExit(f"{name}: no error was reported")
        rows.append(
            {"test": name, "claim": claim, "bound": bound, "cases": len(own), "error": max(errors)}
        )
    (HERE / "measured.json").write_text(json.dumps(rows, indent=1) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

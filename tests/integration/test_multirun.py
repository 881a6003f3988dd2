"""`run.py -m` with the real loop around a training that takes no time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from support.configs import model_directory

ROOT = Path(__file__).parents[2]

# What happens to each group size is in plan.json, so that a repeated command may fare better.
STAND_IN = """
import json, os, pathlib, runpy, signal, sys, time
from wayfinder import loop
from wayfinder.errors import SyncError
def with_workers(config, directory, log, trackers, task):
    size = config.algorithm.group_size
    print("training", size, "again" if directory.resumed else "anew")
    log.log(0, {"eval/solve_rate": size / 16, "eval/num_episodes": 64.0})
    match json.loads(pathlib.Path("plan.json").read_text()).get(str(size)):
        case "bug":
            raise ZeroDivisionError("a bug")
        case "lost":
            raise SyncError("the adapter is lost")
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
loop._with_workers = with_workers
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _sweep(cwd: Path, plan: dict[int, str]) -> subprocess.CompletedProcess[str]:
    (cwd / "plan.json").write_text(json.dumps(plan))
    return subprocess.run(
        [
            *(sys.executable, "-c", STAND_IN, str(ROOT / "run.py")),
            *("-m", "+experiment=maze_easy", "algorithm.group_size=4,8,16", "tracking=none"),
            f"model.path={model_directory(cwd / 'model')}",
        ],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def _trained(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("training")]


def _table(cwd: Path) -> pd.DataFrame:
    table = pd.read_csv(cwd / "outputs" / "report" / "results.csv")
    return table.set_index("algorithm.group_size")


@pytest.mark.slow
def test_a_repeated_multirun_does_what_is_left_and_no_failed_job_costs_another(tmp_path):
    done = _sweep(tmp_path, {4: "bug", 16: "lost"})
    assert done.returncode == 1, done.stderr
    assert _trained(done) == ["training 4 anew", "training 8 anew", "training 16 anew"]
    assert done.stderr.index("job failed, the others go on: #0 ") < done.stderr.index("Traceback")
    said = done.stderr[done.stderr.index("2 of 3 jobs failed:") :]
    assert "ZeroDivisionError: a bug" in said
    assert "SyncError: the adapter is lost" in said
    table = _table(tmp_path)
    assert dict(table["status"]) == {4: "failed", 8: "finished", 16: "failed"}
    for size, words in ((4, "ZeroDivisionError: a bug"), (16, "SyncError: the adapter is lost")):
        log = tmp_path / "outputs" / table.loc[size, "name"] / "error.log"
        assert "Traceback" in log.read_text()
        assert words in log.read_text()
        assert str(log.relative_to(tmp_path)) in said
    assert not (tmp_path / "outputs" / table.loc[8, "name"] / "error.log").exists()

    done = _sweep(tmp_path, {16: "terminate"})
    assert done.returncode == 143, done.stderr
    assert _trained(done) == ["training 4 again", "training 16 again"]
    assert done.stdout.count("finished already: ") == 1
    assert "wrote " not in done.stdout
    assert "jobs failed" not in done.stderr

    done = _sweep(tmp_path, {})
    assert done.returncode == 0, done.stderr
    assert _trained(done) == ["training 16 again"]
    assert done.stdout.count("finished already: ") == 2
    table = _table(tmp_path)
    assert dict(table["status"]) == {4: "finished", 8: "finished", 16: "finished"}
    assert dict(table["solve_rate_last"]) == {4: 0.25, 8: 0.5, 16: 1.0}
    assert dict(table["attempts"]) == {4: 2, 8: 1, 16: 3}

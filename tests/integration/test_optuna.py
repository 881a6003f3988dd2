"""`+sweep=optuna` with the plugin itself, where it is installed (requirements-sweeps.txt)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from support.configs import model_directory

pytestmark = pytest.mark.skipif(
    not find_spec("hydra_plugins.hydra_optuna_sweeper"), reason="hydra-optuna-sweeper is missing"
)
ROOT = Path(__file__).parents[2]

# The rate is best without a pull; which trials fail is said by $FAIL and $UNMEASURED.
STAND_IN = """
import os, runpy, sys, types
from wayfinder.errors import SyncError
loop = types.ModuleType("wayfinder.loop")
def train(config, overrides, began):
    print("trial", config.algorithm.optimizer.lr, config.algorithm.kl_coef)
    if config.algorithm.group_size == int(os.environ.get("FAIL", 0)):
        raise SyncError("the adapter is lost")
    if config.algorithm.group_size == int(os.environ.get("UNMEASURED", 0)):
        return float("nan")
    return 1.0 - 10 * config.algorithm.kl_coef
loop.train = train
sys.modules["wayfinder.loop"] = loop
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _study(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-c", STAND_IN, str(ROOT / "run.py"), "-m", "+experiment=maze_easy"),
            *("+sweep=optuna", f"model.path={model_directory(cwd / 'model')}", *arguments),
        ],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def _trials(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"trial .*", done.stdout)


def _best(cwd: Path) -> dict:
    return yaml.safe_load((cwd / "multirun" / "optimization_results.yaml").read_text())


def test_a_study_finds_the_greatest_rate_and_repeats_itself(tmp_path):
    first = _study(tmp_path)
    assert first.returncode == 0, first.stderr
    assert len(set(_trials(first))) == 20
    assert _best(tmp_path)["best_value"] == 1.0
    assert _best(tmp_path)["best_params"]["algorithm.kl_coef"] == 0
    assert _trials(_study(tmp_path)) == _trials(first)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("FAIL", "SyncError: the adapter is lost"), ("UNMEASURED", "this job has none")],
)
def test_a_study_goes_on_after_a_failed_trial_and_tells_of_it(tmp_path, kind, words):
    done = _study(tmp_path, "hydra.sweeper.n_trials=8", **{kind: "8"})
    assert len(_trials(done)) == 8
    assert done.returncode == 1
    closing = done.stderr[re.search(r"\d of 8 jobs failed:", done.stderr).start() :]
    assert words in closing
    assert _best(tmp_path)["best_params"]["algorithm.group_size"] != 8


def test_trials_run_side_by_side(tmp_path):
    beside = ("hydra/launcher=side_by_side", "hydra.launcher.n_jobs=2", "cluster.address=auto")
    done = _study(tmp_path, "hydra.sweeper.n_trials=4", *beside)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Launching 2 jobs, at most 2 at once") == 2
    assert len(_trials(done)) == 4


def test_a_study_can_be_kept(tmp_path):
    kept = ("hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=lr")
    for _ in range(2):
        done = _study(tmp_path, "hydra.sweeper.n_trials=2", *kept)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "study.db").exists()

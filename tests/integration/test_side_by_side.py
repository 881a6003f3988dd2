"""Jobs of a sweep at the same time: real processes and the real loop, around a training that takes
no time; and real slots of a real Ray, under light actors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import psutil
import pytest
import ray

from support.configs import model_directory

pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).parents[2]

_HEAD = """
import json, os, pathlib, runpy, signal, sys, time
from wayfinder import loop
# A test run in the background inherits an ignored SIGINT; a person's terminal does not give one.
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
_TAIL = """
loop._with_workers = with_workers
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# What happens to each group size is in plan.json. Each job leaves its process id.
STAND_IN = f"""{_HEAD}
def with_workers(config, directory, log, trackers, task):
    size = config.algorithm.group_size
    plan = json.loads(pathlib.Path("plan.json").read_text())
    print("training", size, "again" if directory.resumed else "anew")
    log.log(0, {{"eval/solve_rate": size / 16, "eval/num_episodes": 64.0}})
    pathlib.Path(f"pid-{{size}}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while len(list(pathlib.Path().glob("pid-*"))) < plan["meet"]:
        assert time.monotonic() < deadline, "the others are not there"
        time.sleep(0.05)
    match plan.get(str(size)):
        case "bug":
            raise ZeroDivisionError("a bug")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(120)
        case "interrupted":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
{_TAIL}"""
# Notes its device, and holds the slot until there is a file `go`.
WITH_SLOTS = f"""{_HEAD}
from wayfinder import specs
from wayfinder.runtime import cluster as runtime
class Rank:
    def __init__(self, *_):
        pass
class Engine:
    def __init__(self, index):
        pass
    def devices(self):
        import ray
        return ray.get_gpu_ids()
    def close(self):
        pass
runtime.PolicyWorker, runtime.EngineWorker = Rank, Engine
def with_workers(config, directory, log, trackers, task):
    with runtime.Cluster(specs.cluster_spec(config)) as cluster:
        devices = cluster.wait([e.devices.remote() for e in cluster.engines], 60, "an engine")
        pathlib.Path(f"slot-{{config.seed}}.json").write_text(json.dumps(devices))
        deadline = time.monotonic() + 180
        while not pathlib.Path("go").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
{_TAIL}"""


@contextmanager
def _started(cwd: Path, stand_in: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, with what it says in `out`."""
    with open(cwd / "out", "w") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", stand_in, str(ROOT / "run.py")),
                *("-m", "+experiment=maze_easy", "tracking=none", "hydra/launcher=side_by_side"),
                *(f"model.path={model_directory(cwd / 'model')}", *arguments),
            ],
            cwd=cwd,
            env={k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"},
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _plan(cwd: Path, meet: int = 0, **plan: str) -> None:
    for file in cwd.glob("pid-*"):
        file.unlink()
    sizes = {"four": "4", "eight": "8", "sixteen": "16"}
    (cwd / "plan.json").write_text(
        json.dumps({"meet": meet, **{sizes[name]: what for name, what in plan.items()}})
    )


def _sizes(cwd: Path, *arguments: str):
    # Nothing here joins the Ray at that address.
    given = ("algorithm.group_size=4,8,16", "cluster.address=auto", *arguments)
    return _started(cwd, STAND_IN, *given)


def _done(cwd: Path, *arguments: str, expect: int) -> str:
    with _sizes(cwd, *arguments) as process:
        code = process.wait(120)
    said = (cwd / "out").read_text()
    assert code == expect, said
    return said


def _trained(said: str) -> list[str]:
    return sorted(line for line in said.splitlines() if "training" in line)


def _table(cwd: Path) -> pd.DataFrame:
    table = pd.read_csv(cwd / "outputs" / "report" / "results.csv")
    return table.set_index("algorithm.group_size")


def _pids(cwd: Path, count: int, timeout_s: float = 60) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while len(texts := [f.read_text() for f in cwd.glob("pid-*")]) < count or not all(texts):
        assert time.monotonic() < deadline, (cwd / "out").read_text()
        time.sleep(0.05)
    return [int(text) for text in texts]


def _statuses(cwd: Path) -> list[str]:
    summaries = (cwd / "outputs" / "maze_easy").glob("*/summary.json")
    return sorted(json.loads(summary.read_text())["status"] for summary in summaries)


def test_jobs_run_at_once_and_what_ends_one_ends_no_other(tmp_path):
    _plan(tmp_path, meet=3, four="bug", eight="killed")
    said = _done(tmp_path, expect=1)
    assert _trained(said) == ["#0 training 4 anew", "#1 training 8 anew", "#2 training 16 anew"]
    assert said.index("job failed, the others go on: #") < said.index("2 of 3 jobs failed:")
    closing = said[said.index("2 of 3 jobs failed:") :]
    assert "ZeroDivisionError: a bug" in closing
    assert "its process was ended by SIGKILL" in closing
    assert "#0 ZeroDivisionError: a bug" in said.splitlines()  # with its trace, as it happened
    table = _table(tmp_path)
    assert table.loc[4, "status"] == "failed"
    assert table.loc[16, "status"] == "finished"
    log = tmp_path / "outputs" / table.loc[4, "name"] / "error.log"
    assert "ZeroDivisionError: a bug" in log.read_text()
    assert str(log.relative_to(tmp_path)) in closing

    _plan(tmp_path, eight="interrupted")  # by another hand, which meant this job alone
    said = _done(tmp_path, expect=1)
    assert _trained(said) == ["#0 training 4 again", "#1 training 8 again"]
    assert said.count("finished already: ") == 1
    assert "it was interrupted, alone" in said[said.index("1 of 3 jobs failed:") :]

    _plan(tmp_path)
    said = _done(tmp_path, expect=0)
    assert _trained(said) == ["#1 training 8 again"]
    assert said.count("finished already: ") == 2
    table = _table(tmp_path)
    assert dict(table["status"]) == {4: "finished", 8: "finished", 16: "finished"}
    assert dict(table["solve_rate_last"]) == {4: 0.25, 8: 0.5, 16: 1.0}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interruption_ends_all_jobs_in_order(tmp_path, number, code):
    _plan(tmp_path, four="hang", eight="hang", sixteen="hang")
    with _sizes(tmp_path, "hydra.launcher.n_jobs=2") as process:
        pids = _pids(tmp_path, 2)
        os.killpg(process.pid, number)  # as a terminal and `timeout` do
        assert process.wait(60) == code
    said = (tmp_path / "out").read_text()
    assert said.count("interrupted; repeat the command to go on") == 2, said
    assert len(_trained(said)) == 2
    assert "Traceback" not in said
    assert "failed" not in said
    assert "wrote " not in said
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert _statuses(tmp_path) == ["interrupted", "interrupted"]

    _plan(tmp_path)
    said = _done(tmp_path, "hydra.launcher.n_jobs=2", expect=0)
    assert [line.split()[-1] for line in _trained(said)] == ["again", "again", "anew"]


def test_jobs_do_not_outlive_a_command_that_is_killed(tmp_path):
    _plan(tmp_path, four="hang", eight="hang", sixteen="hang")
    with _sizes(tmp_path) as process:
        jobs = [psutil.Process(pid) for pid in _pids(tmp_path, 3)]
        process.kill()
        _, alive = psutil.wait_procs(jobs, timeout=30)
    assert alive == []
    assert _statuses(tmp_path) == ["interrupted"] * 3


# --- on Ray


@pytest.fixture(scope="module")
def address():
    """A Ray with two slots, of which nothing is real but the numbers of their devices."""
    ray.init(
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def _seeds(cwd: Path, address: str):
    slots = ("cluster.device=cuda", "cluster.slots=1", "cluster.cpus_per_slot=1")
    return _started(cwd, WITH_SLOTS, "seed=0,1,2", f"cluster.address={address}", *slots)


def _until_two_hold_slots_and_one_waits(cwd: Path, process: subprocess.Popen) -> list[list]:
    """The devices of those that hold slots."""
    deadline = time.monotonic() + 150
    while "waiting for slots" not in (said := (cwd / "out").read_text()) or _held(cwd) < 2:
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    assert _held(cwd) == 2
    return [json.loads(file.read_text()) for file in cwd.glob("slot-*.json")]


def _held(cwd: Path) -> int:
    return sum(bool(file.read_text()) for file in cwd.glob("slot-*.json"))


def test_jobs_get_slots_of_their_own_and_wait_for_them(tmp_path, address):
    with _seeds(tmp_path, address) as process:
        held = _until_two_hold_slots_and_one_waits(tmp_path, process)
        assert sorted(held) == [[[0]], [[1]]]
        (tmp_path / "go").touch()
        code = process.wait(120)
    said = (tmp_path / "out").read_text()
    assert code == 0, said
    assert said.count("waiting for slots: cluster.slots=1 needs 1 x {") == 1, said
    assert _held(tmp_path) == 3
    assert _statuses(tmp_path) == ["finished"] * 3


def test_an_interruption_gives_all_slots_back(tmp_path, address):
    with _seeds(tmp_path, address) as process:
        _until_two_hold_slots_and_one_waits(tmp_path, process)
        assert ray.available_resources().get("GPU", 0) == 0
        process.terminate()
        assert process.wait(60) == 143, (tmp_path / "out").read_text()
    assert _statuses(tmp_path) == ["interrupted"] * 3
    deadline = time.monotonic() + 30
    while ray.available_resources().get("GPU", 0) < 2:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.2)

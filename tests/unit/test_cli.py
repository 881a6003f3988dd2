"""`run.py` as a user meets it: a process with an exit code, stdout and stderr."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.configs import model_directory
from support.runs import make_run

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "configs"
# An idle core takes about a second; other work on the machine must not turn this red.
SECONDS = 30

# The stage behind run.py, in place of a training that takes minutes.
STAND_IN = """
import atexit, os, runpy, signal, sys, time, types
from wayfinder.errors import SyncError
loop = types.ModuleType("wayfinder.loop")
def finished(config, overrides, began):
    print(type(config).__name__, config.algorithm.group_size, overrides)
    return 0.5
def broken(config, overrides, began):
    raise SyncError(f"adapter of group size {config.algorithm.group_size} is lost")
def wrong(config, overrides, began):
    raise ZeroDivisionError("a bug")
def signalled(number):
    def train(config, overrides, began):
        os.kill(os.getpid(), number)
        time.sleep(10)
    return train
def cut_off(config, overrides, began):
    from wayfinder.runtime import ray_session
    ray_session._given_up = True
    # As Ray's client does when objects go back to a store that is gone.
    atexit.register(os._exit, 7)
    signalled(signal.SIGTERM)(config, overrides, began)
# A test run in the background inherits an ignored SIGINT; a person's terminal does not give one.
signal.signal(signal.SIGINT, signal.default_int_handler)
loop.train = {
    "finished": finished, "broken": broken, "wrong": wrong,
    "terminated": signalled(signal.SIGTERM), "interrupted": signalled(signal.SIGINT),
    "cut off": cut_off,
}[sys.argv.pop(1)]
loop.evaluate = lambda config, overrides, began: print("evaluated") or 0.5
sys.modules["wayfinder.loop"] = loop
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _python(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def _run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _python(cwd, str(ROOT / "run.py"), *arguments)


def _stand_in(
    cwd: Path, kind: str, *arguments: str, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    model = model_directory(cwd / "model")
    given = (*flags, "+experiment=maze_easy", f"model.path={model}", *arguments)
    return _python(cwd, "-c", STAND_IN, kind, str(ROOT / "run.py"), *given)


def test_help_lists_groups_and_examples_quickly(tmp_path):
    began = time.monotonic()
    done = _run(tmp_path, "--help")
    assert time.monotonic() - began < SECONDS
    assert done.returncode == 0
    assert "python run.py +experiment=maze_easy " in done.stdout
    assert "algorithm: cispo, dapo, dr_grpo, grpo, gspo, reinforce_pp, rloo" in done.stdout
    assert 'eval "$(python run.py' in done.stdout


def test_the_composed_config_is_shown_quickly_and_without_running(tmp_path):
    began = time.monotonic()
    done = _run(tmp_path, "+experiment=maze_easy_hyperpod", "--cfg", "job", "--resolve")
    assert time.monotonic() - began < SECONDS
    assert done.returncode == 0
    assert done.stdout.startswith((GOLDEN / "maze_easy_hyperpod.yaml").read_text())
    assert list(tmp_path.iterdir()) == []


def test_hydras_own_config_is_valid_and_writes_nothing(tmp_path):
    done = _run(tmp_path, "--cfg", "hydra", "--resolve")
    assert done.returncode == 0, done.stderr
    assert "output_subdir: null" in done.stdout


def test_the_entry_imports_nothing_heavy(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import run\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'wandb', 'pandas', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = _python(tmp_path, "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_what_cannot_run_is_refused_in_one_message(tmp_path):
    done = _run(
        tmp_path,
        "+experiment=maze_easy",
        "algorithm.grup_size=4",
        "steps=many",
        "model.path=./nowhere",
        "algorithm.group_size=1",
        "algorithm.mini_batches=3",
        "model.lora.rank=0",
        "env.max_turns=0",
        "rollout.top_p=0.9",
        "paths.root=/dev/null/runs",
    )
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].endswith("9 problems:")
    assert {line.partition(":")[0] for line in lines[1:]} == {
        "  - algorithm.grup_size=4",
        "  - steps=many",
        "  - model.path=./nowhere",
        "  - algorithm.group_size=1",
        "  - algorithm.tasks_per_step=16",
        "  - model.lora.rank=0",
        "  - env.max_turns=0",
        "  - rollout.top_p=0.9",
        "  - paths.root=/dev/null/runs",
    }
    assert list(tmp_path.iterdir()) == []


def test_a_rule_is_enough_to_refuse_a_command_that_composes(tmp_path):
    done = _stand_in(tmp_path, "finished", "env.max_turns=0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[1].startswith("  - env.max_turns=0: expected 1 or more")


def test_a_job_gets_its_config_and_leaves_no_directories(tmp_path):
    done = _stand_in(tmp_path, "finished", "algorithm.group_size=4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Config 4 ['+experiment=maze_easy'")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_report_needs_no_model_and_no_experiment(tmp_path):
    make_run(tmp_path / "runs", [], {0: 0.5})
    done = _run(tmp_path, "task=report", "root=runs")
    assert done.returncode == 0, done.stderr
    assert "# 1 run\n" in (tmp_path / "runs" / "report" / "results.md").read_text()
    done = _run(tmp_path, "task=report", "root=nowhere")
    assert done.returncode == 2
    assert "root=nowhere: expected a directory with runs below it" in done.stderr
    (tmp_path / "empty").mkdir()
    done = _run(tmp_path, "task=report", "paths.root=empty")
    assert done.returncode == 1
    assert "run directories were expected" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_evaluation_is_dispatched_by_its_task(tmp_path):
    assert _stand_in(tmp_path, "finished", "task=evaluate").stdout == "evaluated\n"


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("broken", 1, "adapter of group size 8 is lost"),
        ("terminated", 143, "repeat the command"),
        ("interrupted", 130, "repeat the command"),
        ("cut off", 143, "repeat the command"),
    ],
)
def test_a_job_that_ends_early_says_so_without_a_trace(tmp_path, kind, code, words):
    done = _stand_in(tmp_path, kind)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bug_keeps_its_trace(tmp_path):
    done = _stand_in(tmp_path, "wrong")
    assert done.returncode == 1
    assert "ZeroDivisionError: a bug" in done.stderr
    assert "Traceback" in done.stderr
    assert "Warning" not in done.stderr  # of a callback, before the bug


@pytest.mark.parametrize("flags", [(), ("-m",)])
def test_a_path_that_refers_to_nothing_is_told_once_a_job(tmp_path, flags):
    jobs = ("seed=0,1",) if flags else ()
    done = _stand_in(tmp_path, "finished", "paths.root=${nope}/x", *jobs, flags=flags)
    assert done.returncode == (1 if flags else 2)
    assert "paths.root=${nope}/x: expected a value" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    assert ("2 of 2 jobs failed:" in done.stderr) == bool(flags)


def test_a_named_sweep_starts_each_of_its_jobs(tmp_path):
    done = _stand_in(tmp_path, "finished", "+sweep=grpo_grid")
    assert done.returncode == 0, done.stderr
    jobs = [line for line in done.stdout.splitlines() if line.startswith("Config")]
    grid = list(itertools.product((4, 8, 16), (8, 32), ("0", "0.001")))
    for job, (size, rank, kl) in zip(jobs, grid, strict=True):
        assert job.startswith(f"Config {size} ")
        assert f"'model.lora.rank={rank}', 'algorithm.kl_coef={kl}'" in job


def test_a_multirun_of_refused_jobs_lists_them_all(tmp_path):
    done = _stand_in(tmp_path, "broken", "algorithm.group_size=1,4,8", flags=("-m",))
    assert done.returncode == 1
    said = done.stderr[done.stderr.index("3 of 3 jobs failed:") :].splitlines()
    assert "#0 " in said[1]
    assert "ConfigError: The configuration cannot run" in said[1]
    assert "#1 " in said[2]
    assert "SyncError: adapter of group size 4 is lost" in said[2]
    assert "group size 8" in said[3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["seed=0,1"], "cluster.address=null: expected the Ray that the jobs share"),
        (["seed=0,1", "task=sft", "cluster.address=auto"], "task=sft: expected train or evaluate"),
        (["seed=0,1", "hydra.launcher.n_jobs=0"], "hydra.launcher.n_jobs=0: expected 1 or more"),
        # One of the jobs is enough.
        (["cluster=laptop,hyperpod"], "cluster.address=null"),
    ],
)
def test_jobs_side_by_side_are_refused_where_they_would_be_in_each_others_way(
    tmp_path, arguments, words
):
    done = _stand_in(tmp_path, "finished", "hydra/launcher=side_by_side", *arguments, flags=("-m",))
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("The configuration cannot run, 1 problem:\n  - ")
    assert words in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_jobs_side_by_side_have_a_process_each_and_say_whose_a_line_is(tmp_path):
    arguments = ("algorithm.group_size=4,8", "cluster.address=auto", "hydra/launcher=side_by_side")
    done = _stand_in(tmp_path, "finished", *arguments, flags=("-m",))
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^#. Config .", done.stdout, re.M)) == ["#0 Config 4", "#1 Config 8"]
    done = _stand_in(tmp_path, "broken", *arguments, flags=("-m",))
    assert done.returncode == 1
    assert "#1 adapter of group size 8 is lost\n" in done.stderr
    assert "SyncError: adapter of group size 8 is lost" in done.stderr.split("2 of 2 jobs")[1]


def test_jobs_in_processes_of_their_own_one_after_the_other_need_no_cluster(tmp_path):
    one = ("hydra/launcher=side_by_side", "hydra.launcher.n_jobs=1")
    done = _stand_in(tmp_path, "finished", "algorithm.group_size=4,8", *one, flags=("-m",))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^#. Config .", done.stdout, re.M) == ["#0 Config 4", "#1 Config 8"]


def test_a_multirun_reads_numbers_as_a_run_does_and_goes_on_after_a_failed_job(tmp_path):
    # Negative values are refused with what the job was given: one from a file, one as typed here.
    (tmp_path / "conf" / "sweep").mkdir(parents=True)
    (tmp_path / "conf" / "sweep" / "lr.yaml").write_text(
        "# @package _global_\n"
        "hydra:\n  sweeper:\n    params:\n      algorithm.optimizer.lr: -1e-5,-0.00001\n"
    )
    flags = ("-m", "--config-dir", str(tmp_path / "conf"))
    typed = "algorithm.optimizer.eps=-1e-5,-1.0e-5"
    done = _stand_in(tmp_path, "finished", "+sweep=lr", typed, flags=flags)
    assert done.returncode == 1
    # Each of four jobs as it is refused, and Hydra's last word about the first.
    assert done.stderr.count("  - algorithm.optimizer.lr=-1e-05: expected") == 5, done.stderr
    assert done.stderr.count("  - algorithm.optimizer.eps=-1e-05: expected") == 5, done.stderr
    assert "Traceback" not in done.stderr

"""The main job, small, with every component real: run as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from support.jobs import ROOT, Running, command, figures, run
from support.wandb_log import all_of, history, only, read_records
from wayfinder.record.episodes import latest_episodes, read_episodes
from wayfinder.record.metrics import read_metrics
from wayfinder.record.wandb_tracker import STEP_AXIS
from wayfinder.runtime.adapter_sync import read_latest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def first(root) -> str:
    return run(root, "first", "tracking.wandb.adapter=true")


def test_a_run_leaves_what_it_promises(first, root):
    directory = root / "first"
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 2
    assert 0 <= summary["solve_rate_first"] <= 1
    assert summary["peak_memory_bytes"] > 2**30
    assert summary["wall_s"] > 0
    assert summary["versions"]["torch"]
    assert "step 1/2 solve " in first
    assert "step 2/2 solve " in first
    assert "eval step 0/2 eval/all/pass_at_1 " in first
    assert (directory / "picture.png").stat().st_size > 10_000
    episodes = read_episodes(latest_episodes(directory))
    assert [e.task.seed for e in episodes] == list(range(8))
    lines = read_metrics(directory / "metrics.jsonl")
    assert max(line.get("mismatch/abs_logprob_diff_max", 0) for line in lines) < 1e-3
    assert any(line.get("mismatch/abs_logprob_diff_max", 0) > 0 for line in lines)
    assert read_latest(directory / "adapters").version == 2
    assert (directory / "checkpoints" / "step_2" / "COMMITTED").exists()


def test_all_of_a_run_is_in_its_wandb_file(first, root):
    directory = root / "first"
    (log,) = directory.glob("wandb/offline-run-*/*.wandb")
    records = read_records(log)
    began = only(records, "run")
    assert (began.project, began.run_group, began.job_type) == ("wayfinder", "maze_easy", "train")
    config = {item.key: item.value_json for item in began.config.update}
    assert json.loads(config["algorithm"])["group_size"] == 4
    rows = history(records)
    sent = {key: value for row in rows if row[STEP_AXIS] == 2 for key, value in row.items()}
    last = read_metrics(directory / "metrics.jsonl")[-1]
    assert {key: sent[key] for key in last.keys() & sent.keys()} == {
        key: pytest.approx(last[key]) for key in last.keys() & sent.keys()
    }
    assert {"eval/solve_rate", "train/grad_norm", "mismatch/abs_logprob_diff_max"} <= sent.keys()
    tables = [row for row in rows if "eval/episodes._type" in row or "eval/episodes" in row]
    assert [row[STEP_AXIS] for row in tables] == [0, 2]
    (adapter,) = [found for found in all_of(records, "artifact") if found.type == "model"]
    published = directory / "adapters" / "2"
    assert {entry.local_path for entry in adapter.manifest.contents} == {
        str(path) for path in published.iterdir()
    }
    assert only(records, "exit").exit_code == 0


def test_the_same_command_gives_the_same_figures(first, root):
    run(root, "second")
    assert figures(root / "first") == figures(root / "second")
    for name in ("adapters/2/adapter_model.safetensors", "episodes/eval_step_000002.jsonl"):
        assert (root / "first" / name).read_bytes() == (root / "second" / name).read_bytes()


def test_two_ranks_and_two_engines(first, root):
    run(root, "two", "cluster.slots=2")
    one, two = figures(root / "first"), figures(root / "two")
    assert [line["step"] for line in one] == [line["step"] for line in two]
    assert two[-1]["mismatch/abs_logprob_diff_max"] < 1e-3
    engines = {e.engine for e in read_episodes(latest_episodes(root / "two"))}
    assert engines == {0, 1}
    # Sums are in another order, so a sampled token may differ; the first step's figures may not.
    for key in ("train/grad_norm", "train/policy_loss", "train/entropy"):
        assert two[1][key] == pytest.approx(one[1][key], rel=1e-3, abs=1e-6), key


def test_repeating_a_finished_command_returns_its_result(first, root):
    before = (root / "first" / "metrics.jsonl").read_bytes()
    began = time.monotonic()
    assert "finished already" in run(root, "first")
    assert time.monotonic() - began < 60
    assert (root / "first" / "metrics.jsonl").read_bytes() == before


def test_another_config_for_the_same_directory_is_refused(first, root):
    output = run(root, "first", "algorithm.kl_coef=0.01", expect=2)
    assert "algorithm.kl_coef: 0.0 -> 0.01" in output


def test_an_interrupted_run_goes_on_and_ends_the_same(first, root):
    """SIGTERM after the first step: exit code, truthful summary, nothing left running; the same
    command then ends in the same adapter."""
    extra = ["checkpoint.interval=1"]
    process = subprocess.Popen(
        command(root, "stopped", *extra), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("step 1/2"):
            break
    # The checkpoint of step 1 follows its line.
    while not (root / "stopped/checkpoints/step_1/COMMITTED").exists():
        time.sleep(0.05)
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGTERM)
    process.stdout.read()
    assert process.wait(120) == 143
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert len(gone) > 3
    summary = json.loads((root / "stopped" / "summary.json").read_text())
    assert summary["status"] == "interrupted"

    run(root, "stopped", *extra)
    assert json.loads((root / "stopped" / "summary.json").read_text())["status"] == "finished"
    assert figures(root / "stopped") == figures(root / "first")
    weights = "adapters/2/adapter_model.safetensors"
    assert (root / "stopped" / weights).read_bytes() == (root / "first" / weights).read_bytes()
    events = (root / "stopped" / "events.log").read_text()
    assert "resumed at step 1" in events


def test_evaluation_alone_measures_the_start(first, root):
    run(root, "alone", "task=evaluate")
    (line,) = read_metrics(root / "alone" / "metrics.jsonl")
    start = read_metrics(root / "first" / "metrics.jsonl")[0]
    assert line["eval/solve_rate"] == start["eval/solve_rate"]


def test_the_canary_learns_nothing(root):
    """With learning rate 0 the run itself checks ratios, digest and mismatch."""
    output = run(root, "canary", "+debug=canary")
    assert "step 2/2 " in output
    digests = {
        json.loads((root / f"canary/adapters/{version}/manifest.json").read_text())["files"][
            "adapter_model.safetensors"
        ]["sha256"]
        for version in (1, 2)
    }
    assert len(digests) == 1
    steps = read_metrics(root / "canary" / "metrics.jsonl")[1:]
    assert [line["train/lr"] for line in steps] == [0, 0]
    assert any(line["train/grad_norm"] > 0 for line in steps)
    assert max(abs(line["train/ratio_mean"] - 1) for line in steps) < 1e-5


@pytest.mark.parametrize(
    ("override", "words", "versions"),
    [
        # No engine and trainer agree to the last bit, so these bounds break at once.
        ("sync.probe_tolerance=1e-12", "does not serve adapter version 0", ["0"]),
        ("algorithm.mismatch={alarm:1e-12,stop:1e-12}", "Nothing was trained in this step", ["0"]),
    ],
)
def test_a_bound_that_is_broken_stops_the_run(root, override, words, versions):
    name = override.split("=")[0]
    output = run(root, name, override, expect=1)
    assert words in output
    assert override.split("=")[0] in output
    summary = json.loads((root / name / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert words in summary["error"]
    published = [p.name for p in (root / name / "adapters").iterdir() if p.name.isdigit()]
    assert published == versions


def test_a_signal_while_ray_starts_leaves_nothing_behind(root):
    running = Running(root, "early")
    running.until(lambda: "gcs" in running.processes())
    running.process.send_signal(signal.SIGTERM)
    assert running.end(60) == 143  # and none of its processes is left
    summary = json.loads((running.directory / "summary.json").read_text())
    assert summary["status"] == "interrupted"

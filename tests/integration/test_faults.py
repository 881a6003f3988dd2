"""Processes that are killed in the middle of a run: the result of the undisturbed run, or a clear
stop from which the same command goes on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from support.jobs import Running, assert_same_result, run

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_whole_group_lets_the_run_save_and_end(root, calm, number, code):
    """As a terminal and `timeout` send it. Ray is out of its reach, so a finished step is saved."""
    running = Running(root, f"group-{code}")
    running.until_line("step 1/2")
    running.until_playing()
    began = time.monotonic()
    os.killpg(running.process.pid, number)
    assert running.end(60) == code
    assert time.monotonic() - began < 45
    assert running.summary["status"] == "interrupted"
    assert "interrupted; step 1 is saved" in running.events
    run(root, f"group-{code}")
    assert "resumed at step 1" in running.events
    assert_same_result(running.directory, calm)


@pytest.mark.parametrize("victim", ["gcs", "raylet"])
def test_a_lost_ray_ends_the_run_with_a_clear_message(root, calm, victim):
    running = Running(root, f"lost-{victim}", "checkpoint.interval=1")
    running.until_line("step 1/2")
    running.until_playing()[victim].kill()
    began = time.monotonic()
    assert running.end(120) == 1
    assert time.monotonic() - began < 90
    told = running.summary
    assert told["status"] == "failed"
    assert told["error"].startswith("ClusterError: Ray was lost")
    assert "Repeat the command" in running.output
    run(root, f"lost-{victim}", "checkpoint.interval=1")
    assert_same_result(running.directory, calm)


def test_a_killed_driver_costs_the_step_under_way(root, calm):
    """The command may be repeated at once, while the workers of the first one still go."""
    running = Running(root, "driver", "checkpoint.interval=1")
    running.until_line("step 1/2")
    running.until_playing()
    running.process.kill()
    running.process.wait()
    assert not (running.directory / "summary.json").exists()
    run(root, "driver", "checkpoint.interval=1")
    assert "resumed at step 1" in running.events
    assert_same_result(running.directory, calm)
    # Ray's agents give up when its head was silent for a minute.
    assert not running.kill_left(100)


def test_every_process_of_the_job_gets_the_signal(root):
    """As some schedulers send it: Ray ends with the run, which tells the truth all the same."""
    running = Running(root, "everyone")
    running.until_line("step 1/2")
    for process in [*running.until_playing().values(), running.process]:
        os.kill(process.pid, signal.SIGTERM)
    assert running.end(90) == 143
    assert running.summary["status"] == "interrupted"


@pytest.mark.parametrize("victim", ["engine", "core"])
def test_a_killed_engine_is_made_anew_and_plays_again(root, calm, victim):
    running = Running(root, f"killed-{victim}")
    running.until_line("step 1/2")
    running.until_playing()[victim].kill()
    assert running.end() == 0
    assert "engine 0 is made anew" in running.events
    assert running.summary["status"] == "finished"
    assert_same_result(running.directory, calm)
    assert sum("step 1/2" in line and line.startswith("step") for line in running.lines) == 1


def test_a_core_that_is_killed_while_it_starts_is_made_anew(root, calm):
    running = Running(root, "early-core")
    running.until(lambda: "core" in running.processes())
    running.processes()["core"].kill()
    assert running.end() == 0
    assert "an engine's core process died while it started" in running.events
    assert_same_result(running.directory, calm)


def test_an_engine_that_cannot_start_says_why_and_is_not_tried_again(root):
    said = run(root, "no-room", "rollout.kv_cache_gib=1000000", expect=1)
    assert "an engine cannot start: ValueError: Available memory" in said
    assert "Traceback" not in said
    assert "made anew" not in (root / "no-room" / "events.log").read_text()


def test_a_silent_engine_is_made_anew(root, calm):
    """SIGSTOP: the core process is there and gives no answer."""
    running = Running(root, "silent", "rollout.request_timeout_s=10")
    running.until_line("step 1/2")
    running.until_playing()["core"].send_signal(signal.SIGSTOP)
    assert running.end() == 0
    assert "gave no answer within rollout.request_timeout_s=10" in running.events
    assert_same_result(running.directory, calm)


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_a_killed_rank_takes_the_run_back_to_its_last_checkpoint(root, calm, checkpoints):
    name = f"rank-{checkpoints}"
    running = Running(root, name, f"checkpoint.interval={checkpoints}")
    running.until_line("step 1/2")
    running.until_playing()["rank"].kill()
    assert running.end() == 0
    assert "all workers are made anew from the last checkpoint" in running.events
    assert ("resumed at step 1" in running.events) == bool(checkpoints)
    assert (running.directory / "metrics.discarded.jsonl").exists() != bool(checkpoints)
    assert_same_result(running.directory, calm)


def test_what_dies_again_and_again_stops_the_run(root):
    running = Running(root, "again", "cluster.max_restarts=1")
    running.until_line("step 1/2")
    running.until_playing()["engine"].kill()
    running.until(lambda: "engine 0 is made anew" in running.events)
    running.until_playing()["rank"].kill()
    assert running.end() == 1
    told = running.summary
    assert told["status"] == "failed"
    assert "cluster.max_restarts=1" in told["error"]
    assert "repeat the command" in running.output

"""Metrics on disk, in the console and in the real W&B client (offline)."""

import io
import json
import logging
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from support.wandb_log import all_of, history, only, read_records
from wayfinder.errors import RunDirError
from wayfinder.record.console import ConsoleTracker, eval_line, step_line
from wayfinder.record.metrics import MetricsLog, read_metrics
from wayfinder.record.tracking import DISABLED, Trackers
from wayfinder.record.wandb_tracker import STEP_AXIS, WandbTracker, wandb_run_id


def raw_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(path: Path) -> list[int]:
    return [line["step"] for line in raw_lines(path)]


def test_one_strict_json_line_a_step_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.log(1, {"train/solve_rate": 0.5})
    line = raw_lines(path)[0]
    assert line["step"] == 1
    assert line["train/solve_rate"] == 0.5
    assert abs(line["time"] - time.time()) < 60


def test_nonfinite_is_null_counted_and_warned_about(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with caplog.at_level(logging.WARNING):
        MetricsLog(path).log(1, {"train/kl": float("nan"), "a": float("-inf"), "b": 1.0})
    line = raw_lines(path)[0]
    assert (line["train/kl"], line["a"], line["b"]) == (None, None, 1.0)
    assert line["record/nonfinite"] == 2
    assert "train/kl" in caplog.text
    assert "NaN" not in path.read_text()


def test_steps_may_not_go_back_and_names_may_not_clash(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log(3, {"a": 1.0})
    with pytest.raises(ValueError, match="step 2 after step 3"):
        log.log(2, {"a": 1.0})
    with pytest.raises(ValueError, match="step"):
        log.log(4, {"step": 1.0})


def test_lines_of_one_step_are_merged_by_the_reader(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.log(1, {"a": 1.0})
    log.log(1, {"b": 2.0, "a": 3.0})
    log.log(2, {"a": 4.0})
    assert [(m["step"], m["a"], m.get("b")) for m in read_metrics(path)] == [
        (1, 3.0, 2.0),
        (2, 4.0, None),
    ]


def test_truncation_keeps_the_checkpoint_step_and_loses_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path)
    for step in range(8):
        first.log(step, {"attempt": 1.0})
    first.finish({}, 1)
    second = MetricsLog(path)
    assert second.last_step == 7
    assert second.truncate_after(5) == 2
    for step in (6, 7, 8):
        second.log(step, {"attempt": 2.0})
    lines = raw_lines(path)
    assert [(line["step"], line["attempt"]) for line in lines] == [
        *((step, 1.0) for step in range(6)),
        *((step, 2.0) for step in (6, 7, 8)),
    ]
    assert steps_of(tmp_path / "metrics.discarded.jsonl") == [6, 7]
    assert second.truncate_after(8) == 0
    assert second.truncate_after(-1) == 9
    second.log(0, {"attempt": 3.0})
    assert steps_of(path) == [0]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_half_written_last_line_is_cut_off_and_kept_aside(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.log(1, {"a": 1.0})
    log.log(2, {"a": 2.0})
    log.finish({}, 1)
    path.write_bytes(path.read_bytes()[:-cut])
    assert [line["step"] for line in read_metrics(path)] == [1]
    again = MetricsLog(path)
    assert again.last_step == 1
    again.log(2, {"a": 3.0})
    assert steps_of(path) == [1, 2]
    assert '"step": 2' in raw_lines(tmp_path / "metrics.discarded.jsonl")[0]["half_line"]


def test_broken_line_in_the_middle_is_refused_for_writing_and_skipped_for_reading(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = '{"step": %d, "elapsed_s": 1.0}\n'
    path.write_text(good % 1 + "garbage\n" + good % 2)
    with pytest.raises(RunDirError, match="line 2"):
        MetricsLog(path)
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_elapsed_time_goes_on_over_attempts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path, started=time.time() - 100)
    first.log(1, {})
    first.log(2, {})
    first.finish({}, 1)
    second = MetricsLog(path, started=time.time() - 10)
    second.truncate_after(1)
    second.log(2, {})
    assert raw_lines(path)[-1]["elapsed_s"] == pytest.approx(110, abs=5)
    assert second.elapsed_s == pytest.approx(110, abs=5)


def test_log_that_cannot_be_made_names_the_file(tmp_path):
    with pytest.raises(RunDirError, match=r"missing/metrics\.jsonl"):
        MetricsLog(tmp_path / "missing" / "metrics.jsonl")


TRAIN = {
    "train/solve_rate": 0.53125,
    "train/reward_mean": 0.53125,
    "train/kl": 0.00012,
    "train/entropy": 0.4,
    "mismatch/abs_logprob_diff_max": 1.7e-6,
    "time/rollout_s": 9.81,
}
EVAL = {
    "eval/all/pass_at_1": 0.84375,
    "eval/num_solved": 54.0,
    "eval/num_episodes": 64.0,
    "eval/ceiling": 1.0,
    "eval/mean_turns": 17.25,
    "eval/wrong_stops": 3.0,
}
STEP_LINE = (
    "step 12/160 solve 0.53 reward 0.53 kl 0.0001 entropy 0.400 mismatch_max 1.7e-06 rollout 9.8s"
)
EVAL_LINE = (
    "eval step 10/160 eval/all/pass_at_1 0.844 (54/64) ceiling 1.000 turns 17.2 wrong_stops 3"
)


def test_stable_lines():
    assert step_line(12, 160, TRAIN) == STEP_LINE
    assert eval_line(10, 160, EVAL) == EVAL_LINE
    greedy = {"greedy/all/pass_at_1": 1.0}
    assert eval_line(160, 160, greedy, "greedy") == "eval step 160/160 greedy/all/pass_at_1 1.000"


def test_console_prints_the_lines_that_a_step_has():
    out = io.StringIO()
    console = ConsoleTracker(160, live=True, out=out)
    console.phase("rollout")
    console.log(0, {"time/save_s": 1.0})
    console.log(12, TRAIN)
    console.log(10, EVAL)
    console.finish({}, 0)
    assert out.getvalue().splitlines() == [STEP_LINE, EVAL_LINE]  # and no bar: not a terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_gets_a_bar_and_the_same_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    console = ConsoleTracker(160, live=True, first_step=11, out=out)
    console.phase("rollout [bold]")
    console.log(12, TRAIN)
    console.pictures(12, {"picture": Path("run/[red].png")})
    console.finish({}, 0)
    text = out.getvalue()
    assert STEP_LINE in text.replace("\r", "\n")  # not wrapped at 60 columns
    assert "12/160" in text.split(STEP_LINE)[1]
    assert "rollout [bold]" in text
    assert "picture run/[red].png" in text
    plain = Terminal()
    console = ConsoleTracker(160, live=False, out=plain)
    console.log(12, TRAIN)
    assert plain.getvalue() == STEP_LINE + "\n"


class ClosedTerminal(io.StringIO):
    def write(self, text):
        raise BrokenPipeError("gone")


def test_failing_tracker_is_switched_off_once_and_counted(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    trackers = Trackers([MetricsLog(path), ConsoleTracker(9, False, out=ClosedTerminal())])

    def unreachable():
        raise ConnectionError("no route")

    with caplog.at_level(logging.WARNING):
        trackers.add(unreachable, "wandb")
        for step in (1, 2, 3):
            trackers.log(step, {"train/solve_rate": 0.5})
        trackers.finish({}, 0)
    assert steps_of(path) == [1, 2, 3]
    assert trackers.disabled == {
        "wandb": "ConnectionError: no route",
        "console": "BrokenPipeError: gone",
    }
    assert len(caplog.records) == 2
    assert [line.get(DISABLED) for line in raw_lines(path)] == [1, 2, 2]


def test_failing_metrics_file_ends_the_run_and_leaves_no_half_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    trackers = Trackers([MetricsLog(path)])
    trackers.log(1, {"a": 1.0})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, old[1]))
    try:
        with pytest.raises(RunDirError, match=r"metrics\.jsonl.*Mend"):
            trackers.log(2, {"a": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert path.read_bytes().endswith(b"\n")
    trackers.log(2, {"a": 2.0})
    assert steps_of(path) == [1, 2]


RUN_ID = "0123456789abcdef"


def start_wandb(run_path: Path) -> WandbTracker:
    return WandbTracker(
        run_path,
        mode="offline",
        run_id=RUN_ID,
        project="wayfinder",
        entity=None,
        group="maze_easy",
        job_type="train",
        name="seed=1",
        tags=["a"],
        config={"algorithm": {"group_size": 8}},
    )


def log_steps(tracker: WandbTracker, steps: range, attempt: float) -> None:
    for step in steps:
        tracker.log(step, {"train/solve_rate": step / 10, "attempt": attempt})


# A driver that disappears, without a word to the client, once its rows are on disk.
CRASH = """
import os, time
from pathlib import Path
from support.wandb_log import history, read_records
from test_metrics_log import log_steps, start_wandb

run_path = Path(os.environ["RUN_PATH"])
log_steps(start_wandb(run_path), range(1, 8), 1.0)
log = next(run_path.glob("wandb/offline-run-*/*.wandb"))
deadline = time.time() + 30
while time.time() < deadline and len(history(read_records(log))) < 7:
    time.sleep(0.1)
os._exit(9)
"""


@pytest.fixture(scope="module")
def two_attempts(tmp_path_factory):
    """A crash after step 7, a resume from the checkpoint of step 5, then a failure at step 9."""
    run_path = tmp_path_factory.mktemp("run")
    (run_path / "wandb").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for key in [key for key in os.environ if key.startswith("WANDB_")]:
            patch.delenv(key)
        patch.setenv("HOME", str(run_path))
        patch.setenv("RUN_PATH", str(run_path))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        crashed = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True)
        assert crashed.returncode == 9, crashed.stderr
        tracker = start_wandb(run_path)
        log_steps(tracker, range(6, 10), 2.0)
        image = Image.new("RGB", (20, 20), (255, 0, 0))
        for name in ("picture.png", "replay.gif"):
            image.save(run_path / name)
        tracker.pictures(
            9, {"picture": run_path / "picture.png", "replay": run_path / "replay.gif"}
        )
        tracker.finish({"status": "failed", "solve_rate_last": 0.9, "error": None}, 1)
    logs = sorted(run_path.glob(f"wandb/offline-run-*/run-{RUN_ID}.wandb"))
    return run_path, [read_records(log) for log in logs]


def test_wandb_has_every_step_of_both_attempts_on_our_axis(two_attempts):
    _, (crashed, resumed) = two_attempts
    steps = [[row[STEP_AXIS] for row in history(r) if "attempt" in row] for r in two_attempts[1]]
    assert steps == [[1, 2, 3, 4, 5, 6, 7], [6, 7, 8, 9]]
    row = history(resumed)[0]
    assert (row[STEP_AXIS], row["train/solve_rate"], row["attempt"]) == (6, 0.6, 2.0)
    for records in (crashed, resumed):
        axis, rest = all_of(records, "metric")[:2]
        assert axis.name == STEP_AXIS
        assert (rest.glob_name, rest.step_metric) == ("*", STEP_AXIS)


def test_wandb_internal_steps_of_the_attempts_do_not_overlap(two_attempts):
    crashed, resumed = ([row["_step"] for row in history(r)] for r in two_attempts[1])
    assert max(crashed) < min(resumed)
    assert resumed == sorted(set(resumed))


def test_wandb_run_says_what_it_is_and_how_it_ended(two_attempts):
    run_path, (crashed, resumed) = two_attempts
    for records in (crashed, resumed):
        run = only(records, "run")
        assert (run.run_id, run.project, run.run_group) == (
            RUN_ID,
            "wayfinder",
            "maze_easy",
        )
        assert (run.job_type, run.display_name, list(run.tags)) == ("train", "seed=1", ["a"])
        config = {update.key: json.loads(update.value_json) for update in run.config.update}
        assert config["algorithm"] == {"group_size": 8}
    assert all_of(crashed, "exit") == []
    assert only(resumed, "exit").exit_code == 1
    summary = {
        update.key or ".".join(update.nested_key): json.loads(update.value_json)
        for record in all_of(resumed, "summary")
        for update in record.update
    }
    assert (summary["status"], summary["solve_rate_last"]) == ("failed", 0.9)
    pictures = [row for row in history(resumed) if any(key.startswith("picture") for key in row)]
    assert pictures[0][STEP_AXIS] == 9
    media = list(run_path.glob("wandb/offline-run-*/files/media/*/*"))
    assert sorted(path.suffix for path in media) == [".gif", ".png"]


def test_wandb_sync_finds_every_attempt_below_the_run(two_attempts):
    run_path, _ = two_attempts
    command = [sys.executable, "-m", "wandb", "sync", "--dry-run", str(run_path / "wandb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = done.stdout + done.stderr
    assert "Would sync 2 run(s)" in said
    assert said.count(f"run-{RUN_ID}.wandb") == 2


def test_wandb_that_cannot_start_does_not_stop_the_run(tmp_path):
    trackers = Trackers([MetricsLog(tmp_path / "metrics.jsonl")])
    (tmp_path / "wandb").touch()  # where the client wants its directory
    trackers.add(lambda: start_wandb(tmp_path), "wandb")
    trackers.log(1, {"a": 1.0})
    assert list(trackers.disabled) == ["wandb"]
    assert steps_of(tmp_path / "metrics.jsonl") == [1]


def test_wandb_id_is_that_of_the_run_directory():
    one = wandb_run_id("maze/seed-0", "hash", 1.5)
    assert one == wandb_run_id("maze/seed-0", "hash", 1.5)
    others = {
        wandb_run_id("maze/seed-1", "hash", 1.5),
        wandb_run_id("maze/seed-0", "hush", 1.5),
        wandb_run_id("maze/seed-0", "hash", 2.5),
    }
    assert len(others | {one}) == 4
    assert one.isalnum()

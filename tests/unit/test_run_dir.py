"""Run directories: fresh, resumed, finished, foreign, contended, unwritable."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from wayfinder.errors import RunDirError, RunRefusedError
from wayfinder.record.atomic import (
    atomic_write_bytes,
    atomic_write_json,
    nonfinite_to_null,
    write_error,
)
from wayfinder.record.lock import Holder, locks_stay_on_this_host, read_holder, try_lock
from wayfinder.record.memory import PeakMemory
from wayfinder.record.run_dir import RunDir, read_summary
from wayfinder.record.summary import Status, build_summary

CONFIG = {"task": "train", "seed": 0, "algorithm": {"group_size": 8}, "tracking": {"console": True}}
OTHER = {"task": "train", "seed": 0, "algorithm": {"group_size": 4}, "tracking": {"console": True}}


def open_run(root, name="maze/seed-0", config=CONFIG, config_hash="a", on_existing="resume"):
    return RunDir.open(root, name, config, config_hash, on_existing, ["+experiment=maze"])


def files(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_fresh_directory_records_config_code_and_versions(tmp_path):
    with open_run(tmp_path) as run:
        assert run.path == tmp_path / "maze" / "seed-0"
        assert (run.name, run.resumed, run.finished_summary) == ("maze/seed-0", False, None)
        assert {"config.resolved.json", "events.log", "lock", "episodes", "adapters"} <= files(
            run.path
        )
        record = json.loads((run.path / "config.resolved.json").read_text())
    assert record["config"] == CONFIG
    assert (record["config_hash"], record["overrides"]) == ("a", ["+experiment=maze"])
    assert record["versions"]["python"].startswith("3.")
    assert record["versions"]["torch"]
    assert {"commit", "dirty"} <= record.keys()


def test_each_failure_leaves_its_traceback_in_the_directory(tmp_path):
    for number in (1, 2):
        with open_run(tmp_path) as run:
            try:
                raise ValueError("inner") from ZeroDivisionError(f"number {number}")
            except ValueError as error:
                run.failure(error)
    text = (run.path / "error.log").read_text()
    assert text.count("test_each_failure_leaves_its_traceback_in_the_directory") == 2
    assert text.index("number 1") < text.index("number 2")
    assert (run.path / "events.log").read_text().count(" failed: ValueError: inner\n") == 2


def test_record_does_not_import_what_it_names():
    code = (
        "import sys, wayfinder.record.tracking, wayfinder.record.summary, wayfinder.record.report,"
        "wayfinder.record.memory; from wayfinder.record.provenance import versions; versions();"
        "print(sorted({'torch','ray','vllm','hydra','omegaconf','wandb','matplotlib'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_same_config_unfinished_resumes_and_never_rewrites_the_record(tmp_path):
    open_run(tmp_path).close()
    path = tmp_path / "maze" / "seed-0"
    before = (path / "config.resolved.json").stat()
    moved = {**CONFIG, "tracking": {"console": False}}
    with open_run(tmp_path, config=moved) as run:
        assert run.resumed
        assert run.finished_summary is None
    assert (path / "config.resolved.json").stat() == before
    assert "tracking.console: true -> false" in (path / "events.log").read_text()


def test_created_is_that_of_the_first_attempt(tmp_path):
    with open_run(tmp_path) as first:
        created = first.created
    with open_run(tmp_path) as second:
        assert second.created == created


def test_finished_run_returns_its_summary_without_a_lock(tmp_path):
    with open_run(tmp_path) as run:
        run.write_summary({"status": "finished", "solve_rate_last": 0.97})
        # Still locked by the first: a finished directory is only read.
        again = open_run(tmp_path)
        assert again.finished_summary == {"status": "finished", "solve_rate_last": 0.97}
    again.close()


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_unfinished_summary_is_set_aside_and_the_run_goes_on(tmp_path, status):
    with open_run(tmp_path) as run:
        run.write_summary({"status": status})
    with open_run(tmp_path) as run:
        assert run.resumed
        assert run.finished_summary is None
        assert read_summary(run.path) is None
        previous = json.loads((run.path / "summary.previous.json").read_text())
        assert previous == {"status": status}


def test_other_config_is_refused_with_the_keys_that_differ(tmp_path):
    open_run(tmp_path).close()
    with pytest.raises(RunDirError) as caught:
        open_run(tmp_path, config=OTHER, config_hash="b")
    message = str(caught.value)
    assert "algorithm.group_size: 8 -> 4" in message
    assert "seed" not in message.split("Keys that differ")[1].split("Mend")[0]
    assert "run.on_existing=new" in message
    assert "+experiment=maze" in message
    open_run(tmp_path).close()  # the refusal left no lock behind


def test_fail_refuses_a_used_directory_but_not_an_empty_one(tmp_path):
    (tmp_path / "maze" / "seed-0" / ".hydra").mkdir(parents=True)
    (tmp_path / "maze" / "seed-0" / "run.log").touch()
    open_run(tmp_path, on_existing="fail").close()
    with pytest.raises(RunDirError, match=r"run\.on_existing=fail"):
        open_run(tmp_path, on_existing="fail")


def test_new_takes_the_next_free_suffix(tmp_path):
    runs = [open_run(tmp_path, on_existing="new") for _ in range(3)]
    assert [run.name for run in runs] == ["maze/seed-0", "maze/seed-0-2", "maze/seed-0-3"]
    for run in runs:
        run.close()
    assert open_run(tmp_path, on_existing="new").name == "maze/seed-0-4"


@pytest.mark.parametrize("on_existing", ["resume", "fail"])
def test_directory_with_foreign_files_is_refused(tmp_path, on_existing):
    (tmp_path / "maze" / "seed-0").mkdir(parents=True)
    (tmp_path / "maze" / "seed-0" / "thesis.tex").touch()
    with pytest.raises(RunRefusedError, match="Mend"):
        open_run(tmp_path, on_existing=on_existing)
    assert [path.name for path in (tmp_path / "maze" / "seed-0").iterdir()] == ["thesis.tex"]
    assert open_run(tmp_path, on_existing="new").name == "maze/seed-0-2"


@pytest.mark.parametrize("name", ["", "../x", "a=b", "a,b", "a b", "/abs", "a//b", ".hidden"])
def test_names_that_would_need_quoting_are_refused(tmp_path, name):
    with pytest.raises(RunDirError, match=r"run\.name"):
        open_run(tmp_path, name=name)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99}'])
def test_unreadable_record_is_refused_not_overwritten(tmp_path, content):
    path = tmp_path / "maze" / "seed-0" / "config.resolved.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(RunDirError, match=r"config\.resolved\.json"):
        open_run(tmp_path)
    assert path.read_text() == content


def test_root_that_is_a_file_names_the_path_and_the_mend(tmp_path):
    (tmp_path / "root").touch()
    with pytest.raises(RunDirError, match=r"root/maze/seed-0.*paths\.root"):
        open_run(tmp_path / "root")


HOLD = """
import sys, time
from pathlib import Path
from wayfinder.record.run_dir import RunDir
run = RunDir.open(Path(sys.argv[1]), "maze/seed-0", {config!r}, "a", sys.argv[2], [])
print(run.name, flush=True)
time.sleep(60)
"""


def hold_in_another_process(root, on_existing="resume"):
    code = HOLD.format(config=CONFIG)
    command = [sys.executable, "-c", code, str(root), on_existing]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("maze/seed-0")
    return process


def test_second_process_is_refused_until_the_first_is_killed(tmp_path):
    process = hold_in_another_process(tmp_path)
    try:
        with pytest.raises(RunDirError, match=f"in use by process {process.pid} on host"):
            open_run(tmp_path)
        new = open_run(tmp_path, on_existing="new")
        assert new.name == "maze/seed-0-2"
        new.close()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with open_run(tmp_path) as run:
        assert run.resumed


def no_flock(fd, operation):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def write_holder(path, **changes):
    me = Holder.this_process()
    fields = {"pid": me.pid, "host": me.host, "started": me.started, "since": 0.0}
    path.write_text(json.dumps({**fields, "released": False, **changes}))


def test_kernel_lock_is_exclusive_and_released(tmp_path):
    lock = try_lock(tmp_path / "lock")
    assert try_lock(tmp_path / "lock") is None
    lock.release()
    lock.release()
    assert read_holder(tmp_path / "lock").released
    assert try_lock(tmp_path / "lock") is not None


def test_without_flock_the_file_decides(tmp_path):
    path = tmp_path / "lock"
    lock = try_lock(path, no_flock)
    assert try_lock(path, no_flock) is None
    lock.release()
    again = try_lock(path, no_flock)
    assert again is not None
    assert files(tmp_path) == {"lock"}  # no guard, no temporary file


def test_without_flock_a_dead_process_of_this_host_is_replaced(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_holder(tmp_path / "lock", pid=gone.pid)
    assert try_lock(tmp_path / "lock", no_flock) is not None
    assert read_holder(tmp_path / "lock").pid == os.getpid()


def test_without_flock_a_later_process_with_the_same_id_is_another_one(tmp_path):
    write_holder(tmp_path / "lock", started=Holder.this_process().started - 3600)
    assert try_lock(tmp_path / "lock", no_flock) is not None


def test_without_flock_an_owner_on_another_host_stays(tmp_path):
    write_holder(tmp_path / "lock", host="elsewhere", pid=1, started=0.0)
    assert try_lock(tmp_path / "lock", no_flock) is None


def test_without_flock_an_unreadable_lock_asks_for_a_person(tmp_path):
    (tmp_path / "lock").write_text("garbage")
    with pytest.raises(RunDirError, match="delete the file"):
        try_lock(tmp_path / "lock", no_flock)


@pytest.mark.parametrize(
    ("options", "local"),
    [("rw,flock", False), ("rw,localflock", True), ("rw,local_lock=all", True), ("rw", False)],
)
def test_mount_options_tell_whether_flock_spans_hosts(options, local):
    mounts = (
        "overlay / overlay rw,nolock 0 0\n"
        f"10.0.0.1@tcp:/fs /shared\\040disk lustre {options} 0 0\n"
        "tmpfs /shared\\040disk/other tmpfs rw 0 0\n"
    )
    assert locks_stay_on_this_host(mounts, Path("/shared disk/outputs/run")) is local


def test_atomic_write_leaves_the_old_file_when_the_new_one_fails(tmp_path):
    path = tmp_path / "summary.json"
    atomic_write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="nan"):
        atomic_write_json(path, {"a": float("nan")})
    path.with_name("folder").mkdir()
    with pytest.raises(RunDirError, match="folder"):
        atomic_write_bytes(path.with_name("folder"), b"x")
    assert json.loads(path.read_text()) == {"a": 1}
    assert files(tmp_path) == {"summary.json", "folder"}


@contextmanager
def files_at_most(size):
    """Writes beyond `size` bytes of a file fail, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_atomic_write_that_finds_no_room_names_the_file(tmp_path):
    path = tmp_path / "summary.json"
    atomic_write_bytes(path, b"old")
    with files_at_most(1000), pytest.raises(RunDirError, match=r"summary\.json.*Mend"):
        atomic_write_bytes(path, b"x" * 5000)
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == {"summary.json"}


@pytest.mark.parametrize(
    ("number", "mend"),
    [(errno.ENOSPC, "free space"), (errno.EROFS, "read-only"), (errno.EACCES, "writable")],
)
def test_write_errors_say_how_to_mend_them(number, mend):
    message = str(write_error(Path("/x/lock"), OSError(number, os.strerror(number))))
    assert message.startswith("/x/lock: ")
    assert mend in message.split("Mend")[1]


def test_nonfinite_numbers_become_null_and_are_named():
    value = {"a": 1.0, "b": {"c": float("nan"), "d": [1, float("inf")]}}
    assert nonfinite_to_null(value) == (
        {"a": 1.0, "b": {"c": None, "d": [1, None]}},
        ["b.c", "b.d[1]"],
    )


def test_summary_takes_rates_from_the_metrics_file(tmp_path):
    rates = {0: 0.4375, 10: 0.97, 20: 0.95}
    with open_run(tmp_path) as run:
        with open(run.metrics_file, "w") as file:
            for step, rate in rates.items():
                line = {"step": step, "elapsed_s": 1.0, "eval/solve_rate": rate}
                file.write(json.dumps(line) + "\n")
            file.write('{"step": 21, "elapsed_s": 1.0, "train/solve_rate": 1.0}\n')
        summary = build_summary(
            run, Status.FAILED, wall_s=12.5, peak_memory_bytes=100, error="ValueError: x"
        )
        run.write_summary(summary)
        stored = read_summary(run.path)
    assert stored == summary
    picked = ("first", "best", "best_step", "last")
    assert [stored[f"solve_rate_{key}"] for key in picked] == [0.4375, 0.97, 10, 0.95]
    assert (stored["status"], stored["steps"], stored["error"]) == ("failed", 21, "ValueError: x")
    assert stored["config_hash"] == "a"


def test_summary_of_a_run_without_metrics(tmp_path):
    with open_run(tmp_path) as run:
        summary = build_summary(run, Status.INTERRUPTED, wall_s=1, peak_memory_bytes=0)
    assert (summary["solve_rate_last"], summary["steps"]) == (None, 0)


def test_peak_memory_sees_a_grandchild_and_remembers_it():
    megabytes = 100
    grandchild = f"x = bytearray({megabytes} << 20); print(1, flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with PeakMemory(interval_s=0.02) as memory:
        before = memory.peak_bytes
        process = subprocess.Popen(
            [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        process.stdout.readline()
        grown = memory.peak_bytes - before
        process.communicate(b"\n")
        after = memory.peak_bytes - before
    assert megabytes << 20 <= grown < (megabytes + 60) << 20
    assert after >= grown

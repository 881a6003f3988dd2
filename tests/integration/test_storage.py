"""Storage that fails under a run: files that are cut, a shared directory that goes away, a full
disk. The result of the undisturbed run, or a clear stop from which the same command goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.jobs import Running, assert_same_result, run

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_an_adapter_that_is_cut_before_it_is_loaded_is_written_again(root, calm):
    running = Running(root, "cut")
    weights = running.directory / "adapters/1/adapter_model.safetensors"

    def cut() -> None:
        while not weights.exists():  # it appears whole, by a rename
            time.sleep(0.0005)
        os.truncate(weights, 1000)

    saboteur = threading.Thread(target=cut, daemon=True)
    saboteur.start()
    assert running.end() == 0
    assert not saboteur.is_alive()
    assert "changed or cut after it was published" in running.events
    assert sum(line["faults/publication_retries"] for line in steps(running)) > 0
    assert_same_result(running.directory, calm)


def test_a_shared_directory_that_comes_back_is_waited_for(root, calm):
    shared = root / "shared"
    running = Running(root, "away", f"sync.dir={shared}")
    running.until_line("step 1/2")
    running.until_playing()
    shared.rename(root / "elsewhere")
    running.until(lambda: "tried again for sync.retry_s" in running.events)
    time.sleep(3)
    assert not shared.exists()  # nothing was made in its place
    (root / "elsewhere").rename(shared)
    assert running.end() == 0
    assert_same_result(running.directory, calm, adapters=shared / "away")


def test_a_shared_directory_that_stays_away_ends_the_run(root, calm):
    shared = root / "shared-2"
    extra = f"sync.dir={shared}", "sync.retry_s=3", "checkpoint.interval=1"
    running = Running(root, "gone", *extra)
    running.until_line("step 1/2")
    running.until_playing()
    shared.rename(root / "elsewhere-2")
    assert running.end(120) == 1
    assert f"{shared}/gone: adapters cannot be written there" in running.output
    (root / "elsewhere-2").rename(shared)
    run(root, "gone", *extra)
    assert "resumed at step 1" in running.events
    assert_same_result(running.directory, calm, adapters=shared / "gone")


def test_a_run_directory_that_goes_away_ends_the_run_and_is_not_made_again(tmp_path, calm):
    """As when the file system of `paths.root` is unmounted."""
    root = tmp_path / "root"
    extra = "checkpoint.interval=1", "sync.retry_s=3", "tracking=none"
    running = Running(root, "unmounted", *extra)
    running.until_line("step 1/2")
    running.until_playing()
    root.rename(tmp_path / "elsewhere")
    assert running.end(120) == 1
    assert "No such file or directory" in running.lines[-1]
    assert "Traceback" not in running.output
    assert not root.exists()
    (tmp_path / "elsewhere").rename(root)
    run(root, "unmounted", *extra)
    assert "resumed at step 1" in running.events
    assert_same_result(running.directory, calm)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[tuple[list[str], Path]]:
    """How to start a command that sees a disk of its own, and that disk as this process sees it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=64m tmpfs {disk} && echo ready && exec sleep 1000"
    holder = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if holder.stdout.readline().strip() != "ready":
            pytest.skip(f"no file system can be mounted here: {holder.stderr.read().strip()}")
        inside = ["nsenter", f"--target={holder.pid}", "--user", "--mount", f"--wd={os.getcwd()}"]
        yield [*inside, "--preserve-credentials"], Path(f"/proc/{holder.pid}/root{disk}")
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_a_full_disk_ends_the_run_which_goes_on_when_there_is_room(small_disk, calm, tmp_path):
    prefix, disk = small_disk
    extra = "checkpoint.interval=1", "sync.retry_s=3"
    running = Running(tmp_path / "disk", "full", *extra, prefix=prefix)
    running.directory = disk / "full"
    running.until_line("step 1/2")
    running.until_playing()
    filler = disk / "filler"
    with contextlib.suppress(OSError):  # the run writes as well
        filler.write_bytes(bytes(psutil.disk_usage(str(disk)).free))
    assert running.end(120) == 1
    assert "No space left on device" in running.output
    assert "ree space there" in running.output
    assert "Traceback" not in running.output
    filler.unlink()
    again = Running(tmp_path / "disk", "full", *extra, prefix=prefix)
    assert again.end() == 0
    assert "resumed at step 1" in running.events
    assert running.summary["status"] == "finished"
    assert_same_result(disk / "full", calm)


def steps(running: Running) -> list[dict]:
    lines = (running.directory / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "train/lr" in line]

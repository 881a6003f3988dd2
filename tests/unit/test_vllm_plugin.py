"""What vLLM starts for an engine ends with it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import psutil
import pytest

from wayfinder.rollout import vllm_plugin

# Started as vLLM starts its core process. It says that it is there, and waits.
PARENT = """
import multiprocessing, time
def core(load):
    if load:
        from wayfinder.rollout.vllm_plugin import end_with_parent
        end_with_parent()
    print("there", flush=True)
    time.sleep(600)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=core, args=(LOAD,))
    process.start()
    print(process.pid, flush=True)
    process.join()
"""


def start(tmp_path, load: bool) -> tuple[subprocess.Popen, psutil.Process]:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.replace("LOAD", str(load)))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    core = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "there\n"
    return parent, core


def gone(process: psutil.Process, seconds: float) -> bool:
    return not psutil.wait_procs([process], timeout=seconds)[1]


def test_vllm_finds_it():
    (found,) = entry_points(group="vllm.general_plugins", name="wayfinder")
    assert found.load() is vllm_plugin.end_with_parent


@pytest.mark.parametrize("load", [True, False])
def test_a_core_process_ends_when_its_engine_is_killed(tmp_path, load):
    parent, core = start(tmp_path, load)
    try:
        parent.kill()
        parent.wait()
        assert gone(core, 10 if load else 2) == load  # without it, it stays
    finally:
        if core.is_running():
            core.kill()


def test_it_lives_as_long_as_its_engine(tmp_path):
    parent, core = start(tmp_path, True)
    assert not gone(core, 2)
    parent.kill()
    parent.wait()
    assert gone(core, 10)


def test_a_process_of_its_own_stays(monkeypatch):
    monkeypatch.setattr(vllm_plugin.os, "kill", lambda *_: pytest.fail("it would have ended"))
    vllm_plugin.end_with_parent()

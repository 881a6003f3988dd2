"""A core process that was killed is told from one that cannot start, and both from one that failed
in what it did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from wayfinder.errors import ClusterError, WorkerLostError
from wayfinder.rollout.core_log import core_death, core_failure

LOG = Path("worker.out")
TRACE = """\
(EngineCore pid=7) WARNING 11-30 [cpu.py:9] an earlier one: ValueError: was handled
(EngineCore pid=7) ERROR 11-30 [core.py:1510] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-30 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 [core.py:1510]   File "core.py", line 3, in run
(EngineCore pid=7) ERROR 11-30 [core.py:1510] KeyError: 'first'
(EngineCore pid=7) ERROR 11-30 [core.py:1510] torch.cuda.OutOfMemoryError: 3 GiB of 2 GiB
(EngineCore pid=7) Process EngineCore:
"""
DEATH = """\
(EngineCore pid=7) ERROR 11-30 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-30 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 [core.py:1512] RuntimeError: CPU Generator does not use offset
(MainProcess pid=6) ERROR 11-30 [async_llm.py:906] Traceback (most recent call last):
(MainProcess pid=6) ERROR 11-30 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: \
EngineCore encountered an issue. See stack trace (above) for the root cause.
"""


def test_a_core_that_says_nothing_can_be_made_anew():
    error = core_failure("INFO loading\nWARNING slow\n", LOG)
    assert isinstance(error, WorkerLostError)


def test_what_a_core_says_ends_the_run():
    error = core_failure(TRACE, LOG)
    assert not isinstance(error, WorkerLostError)
    expected = "an engine cannot start: torch.cuda.OutOfMemoryError: 3 GiB of 2 GiB (all of it: "
    assert str(error) == f"{expected}worker.out)"


def test_a_core_that_served_tells_what_it_died_of():
    reason = "RuntimeError: CPU Generator does not use offset (all of it: worker.out)"
    assert str(core_death(DEATH, LOG)) == f"the engine's core process died: {reason}"
    assert str(core_death("INFO serving\n", LOG)) == "the engine's core process died"


@pytest.mark.parametrize("text", ["EngineCore failed to start.", "EngineCore failed to start.\nx"])
def test_words_without_a_reason_are_no_sudden_death(text):
    error = core_failure(text, None)
    assert type(error) is ClusterError
    assert "does not say why" in str(error)


def test_only_what_is_printed_from_now_on_counts(tmp_path):
    code = (
        "import subprocess\nfrom wayfinder.rollout.core_log import Printed\n"
        "print('before', flush=True)\nprinted = Printed()\n"
        "subprocess.run(['sh', '-c', 'echo out; echo err >&2'])\n"
        "open('told', 'w').write(printed.text())"
    )
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=out, stderr=err)
    assert (tmp_path / "told").read_text().split() == ["out", "err"]

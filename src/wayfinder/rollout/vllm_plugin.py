"""A plugin that vLLM loads in each of its processes (`vllm.general_plugins` in pyproject.toml)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """Have this process, if multiprocessing started it, end with the one that did.

    vLLM's core process does not notice that the process of its engine was killed: it would wait for
    requests for ever, and keep its memory and its share of a GPU.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True, name="follow the parent").start()

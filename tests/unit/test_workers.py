"""What the driver makes of the engines' answers, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from wayfinder.errors import AdapterFileError, SyncError
from wayfinder.runtime import workers as module
from wayfinder.runtime.adapter_sync import Publication
from wayfinder.runtime.recovery import Restarts
from wayfinder.runtime.workers import Workers

PUBLISHED = Publication(4, "/shared/4", "b" * 64, 8)


class OneEngine(Workers):
    """Workers of one rank and one engine; `served` is what the engine says after each load."""

    def __init__(self, served: list[tuple[int, str]], retry_s: float) -> None:
        restarts = Restarts(0, lambda text: None)
        probe = SimpleNamespace(ids=(1, 2), frames=(), pixels={}, micro_batch=lambda: None)
        super().__init__(None, Path("/shared"), 2, retry_s, probe, 1e-3, False, restarts)
        self.served = served

    def _on_ranks(self, method: str, *_: object, **__: object) -> list:
        return [PUBLISHED] if method == "publish" else [[-1.0]]

    def _on_engines(self, method: str, *_: object) -> list:
        return [self.served.pop(0)] if method == "load_latest" else [[-1.0]]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    monkeypatch.setattr(module, "retire", lambda *_: None)


OLD, NEW = (3, "a" * 64), (4, "b" * 64)


def test_an_engine_that_sees_a_change_late_is_asked_again():
    """A file system with caches shows another machine the pointer of before for a while."""
    workers = OneEngine([OLD, OLD, NEW], retry_s=60)
    assert workers.publish(4, 7) == {"sync/probe_abs_logprob_diff_max": 0.0}
    assert workers._restarts.publications == 2
    with pytest.raises(AdapterFileError, match="engine 0 still finds adapter version 3 in /shared"):
        OneEngine([OLD], retry_s=0).publish(4, 7)


@pytest.mark.parametrize("served", [(4, "c" * 64), (5, "b" * 64)])
def test_an_engine_that_serves_what_was_not_published_ends_the_run(served):
    with pytest.raises(SyncError, match=r"engine 0 serves adapter version") as raised:
        OneEngine([served], retry_s=60).publish(4, 7)
    assert not isinstance(raised.value, AdapterFileError)

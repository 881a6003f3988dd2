"""A publication that does not get through at once: tried again for a while, and counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from wayfinder.errors import AdapterFileError, SyncError
from wayfinder.runtime import workers as module
from wayfinder.runtime.adapter_sync import Publication
from wayfinder.runtime.recovery import Restarts
from wayfinder.runtime.workers import Probe, Workers

NEW = Publication(3, "3", "new", 2)
OLD, NOW, OTHER = (2, "old"), (3, "new"), (3, "other")
CUT = AdapterFileError("adapter_model.safetensors: cut")


class Question(Probe):
    def micro_batch(self) -> None:
        return None


class Scripted(Workers):
    """Two engines whose answers to `load_latest` are given, one list a call."""

    def __init__(self, root: Path, retry_s: float, loads: list) -> None:
        self.answers = [[-1.0], [-1.0]]
        self.notes: list[str] = []
        self.restarts = Restarts(0, self.notes.append)
        self.loads = list(loads)
        super().__init__(None, root, 2, retry_s, Question((1,), (), {}), 1e-3, False, self.restarts)

    def _on_ranks(self, method: str, *_, **__) -> list:
        return [NEW, None] if method == "publish" else [[-1.0], [-1.0]]

    def _on_engines(self, method: str, *_) -> list:
        if method == "probe":
            return self.answers
        answer = self.loads.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)


@pytest.mark.parametrize("trouble", [CUT, [NOW, OLD]], ids=["damaged", "stale"])
def test_it_is_tried_again_until_every_engine_serves_it(tmp_path, trouble):
    """One node may still see the pointer that another has replaced."""
    workers = Scripted(tmp_path, 30, [trouble, trouble, [NOW, NOW]])
    assert workers.publish(3, 7) == {"sync/probe_abs_logprob_diff_max": 0.0}
    assert workers.restarts.publications == 2
    (note,) = workers.notes
    assert "version 3 is tried again for sync.retry_s" in note


@pytest.mark.parametrize("trouble", [CUT, [NOW, OLD]], ids=["damaged", "stale"])
def test_not_for_ever(tmp_path, trouble):
    workers = Scripted(tmp_path, 0, [trouble])
    with pytest.raises(AdapterFileError):
        workers.publish(3, 7)


@pytest.mark.parametrize("trouble", [SyncError("probe"), [NOW, OTHER], [(4, "new"), NOW]])
def test_what_trying_again_cannot_mend_stops_at_once(tmp_path, trouble):
    workers = Scripted(tmp_path, 30, [trouble])
    with pytest.raises(SyncError) as raised:
        workers.publish(3, 7)
    assert not isinstance(raised.value, AdapterFileError)


@pytest.mark.parametrize("trouble", [CUT, OLD], ids=["damaged", "stale"])
def test_an_engine_made_anew_waits_for_what_is_published(tmp_path, trouble):
    workers = Scripted(tmp_path, 30, [])
    workers.publication = NEW
    answers = [trouble, NOW]

    def ask(reference: str) -> tuple[int, str]:
        assert reference == f"load from {tmp_path}"
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    engine = SimpleNamespace(load_latest=SimpleNamespace(remote="load from {}".format))
    workers._load_into(1, engine, ask)
    assert not answers
    assert workers.restarts.publications == 1
    workers = Scripted(tmp_path, 0, [])
    workers.publication, answers = NEW, [trouble, NOW]
    with pytest.raises(AdapterFileError):
        workers._load_into(1, engine, ask)


@pytest.mark.parametrize("wrong", [-1.002, -0.5, float("nan")])
def test_an_engine_that_answers_the_probe_otherwise_stops_the_run(tmp_path, wrong):
    workers = Scripted(tmp_path, 30, [[NOW, NOW]])
    workers.answers = [[-1.0], [wrong]]
    with pytest.raises(SyncError, match="engine 1 does not serve adapter version 3"):
        workers.publish(3, 7)

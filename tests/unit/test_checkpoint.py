"""Checkpoints: committed whole or passed over, never a silent start from the beginning."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.killed import CONFIG, adapter, commit_forever, kill_while_writing
from wayfinder.errors import CheckpointError
from wayfinder.train.checkpoint import (
    COMMITTED,
    STATE,
    Checkpoint,
    begin,
    commit,
    load_optimizer,
    newest,
    read,
    save_policy,
)

TENSORS = {"q.lora_A.weight": torch.arange(6.0).reshape(2, 3), "q.lora_B.weight": torch.ones(3, 2)}
MOMENTS = {"q.lora_A.weight/exp_avg": torch.full((2, 3), 0.5)}
COUNTS = {"q.lora_A.weight/step": 7.0}
FILES = [
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.safetensors",
    "optimizer.json",
    STATE,
]


def state(step: int) -> dict:
    return {"step": step, "policy_version": step + 1, "best_solve_rate": None, "seed": 2**62 + 1}


def fill(directory: Path) -> None:
    save_policy(directory, TENSORS, CONFIG, MOMENTS, COUNTS)


def put(root: Path, step: int, keep: int = 10, score: float | None = None) -> Path:
    temporary = begin(root, step)
    fill(temporary)
    return commit(temporary, step, state(step), keep, score)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_what_is_committed_is_what_is_read(tmp_path):
    root = tmp_path
    path = put(root, 20)
    assert path == root / "step_20"
    assert newest(root) == (Checkpoint(path, 20, state(20)), [])
    assert read(path) == Checkpoint(path, 20, state(20))
    assert names(path) == sorted([*FILES, COMMITTED])
    weights = load_file(path / "adapter_model.safetensors")
    assert all(torch.equal(weights[name], TENSORS[name]) for name in TENSORS)
    moments, counts = load_optimizer(path)
    assert moments.keys() == MOMENTS.keys()
    assert torch.equal(moments["q.lora_A.weight/exp_avg"], MOMENTS["q.lora_A.weight/exp_avg"])
    assert counts == COUNTS
    assert json.loads((path / "adapter_config.json").read_text()) == CONFIG


def test_the_newest_is_the_one_of_the_highest_step(tmp_path):
    for step in (100, 20, 9):
        put(tmp_path, step)
    found, problems = newest(tmp_path)
    assert (found.step, found.path, problems) == (100, tmp_path / "step_100", [])


def test_a_run_without_checkpoints_starts_afresh(tmp_path):
    assert newest(tmp_path / "nowhere") == (None, [])
    assert newest(tmp_path) == (None, [])


def test_without_the_mark_it_is_no_candidate(tmp_path):
    put(tmp_path, 1)
    put(tmp_path, 2)
    (tmp_path / "step_2" / COMMITTED).unlink()
    found, problems = newest(tmp_path)
    assert (found.step, problems) == (1, [])
    (tmp_path / "step_1" / COMMITTED).unlink()
    assert newest(tmp_path) == (None, [])


@pytest.mark.parametrize("stage", ["nothing", "weights", "optimizer", "before mark", "during mark"])
def test_what_a_killed_writer_leaves_is_passed_over(tmp_path, stage):
    put(tmp_path, 1)
    temporary = begin(tmp_path, 2)
    if stage != "nothing":
        fill(temporary)
    if stage == "weights":
        (temporary / "optimizer.safetensors").unlink()
        (temporary / "optimizer.json").unlink()
    if stage in ("before mark", "during mark"):
        (temporary / STATE).write_text(json.dumps(state(2)))
    if stage == "during mark":
        (temporary / COMMITTED).write_text('{"format": 2, "st')
    found, problems = newest(tmp_path)
    assert (found.step, problems) == (1, [])
    # The repeated step starts from an empty directory and comes out whole.
    again = begin(tmp_path, 2)
    assert names(again) == []
    fill(again)
    commit(again, 2, state(2), 10)
    assert newest(tmp_path)[0].step == 2
    assert names(tmp_path) == ["step_1", "step_2"]


def test_foreign_names_are_ignored(tmp_path):
    put(tmp_path, 1)
    for name in ("step_9x", "step_", "step_-3", "best"):
        shutil.copytree(tmp_path / "step_1", tmp_path / name)
    assert newest(tmp_path)[0].path == tmp_path / "step_1"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_one_is_skipped_and_said_so(tmp_path, name, damage):
    for step in (1, 2, 3):
        put(tmp_path, step)
    path = tmp_path / "step_3" / name
    if damage == "flipped":
        flip(path, path.stat().st_size // 2)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    found, problems = newest(tmp_path)
    assert found == Checkpoint(tmp_path / "step_2", 2, state(2))
    (problem,) = problems
    assert str(path) in problem
    assert ("not readable" if damage == "missing" else "not what was committed") in problem


def test_every_bit_of_the_small_files_counts(tmp_path):
    put(tmp_path, 1)
    expected = read(tmp_path / "step_1")
    for name in (STATE, "optimizer.json"):
        path = tmp_path / "step_1" / name
        for place in range(path.stat().st_size):
            flip(path, place)
            with pytest.raises(CheckpointError, match=name):
                read(tmp_path / "step_1")
            flip(path, place)
    assert read(tmp_path / "step_1") == expected


@pytest.mark.parametrize(
    "mark", [b"", b"[]", b"{", b'{"format": 2}', b'{"format": 2, "step": 1, "sha256": []}']
)
def test_an_unreadable_mark_is_a_problem_not_a_crash(tmp_path, mark):
    put(tmp_path, 1)
    put(tmp_path, 2)
    (tmp_path / "step_2" / COMMITTED).write_bytes(mark)
    found, problems = newest(tmp_path)
    assert found.step == 1
    assert len(problems) == 1
    assert str(tmp_path / "step_2") in problems[0]


def test_a_mark_cannot_point_outside(tmp_path):
    put(tmp_path, 1)
    mark = tmp_path / "step_1" / COMMITTED
    content = json.loads(mark.read_text())
    for name in ("../step_2/state.json", "/etc/hostname", ".hidden"):
        mark.write_text(json.dumps(content | {"sha256": {name: "0"}}))
        with pytest.raises(CheckpointError, match="is not allowed"):
            read(tmp_path / "step_1")


@pytest.mark.parametrize("number", [1, 3, None, "2"])
def test_another_format_is_named(tmp_path, number):
    put(tmp_path, 5)
    mark = tmp_path / "step_5" / COMMITTED
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"format": number}))
    with pytest.raises(CheckpointError, match=rf"step_5: format {number!r}.*reads format 2"):
        read(tmp_path / "step_5")


def test_when_none_is_sound_the_run_stops_and_names_them_all(tmp_path):
    for step in (1, 2):
        put(tmp_path, step)
        flip(tmp_path / f"step_{step}" / STATE, 3)
    with pytest.raises(CheckpointError, match="no checkpoint can be used") as raised:
        newest(tmp_path)
    text = str(raised.value)
    assert text.index("step_2/state.json") < text.index("step_1/state.json")
    assert "run.on_existing=new" in text


def test_only_the_newest_are_kept(tmp_path):
    for step in (8, 9, 10, 11):
        put(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step_10", "step_11"]
    put(tmp_path, 12, keep=1)
    assert names(tmp_path) == ["step_12"]


def test_the_best_is_kept_beside_the_newest(tmp_path):
    scores = {1: 0.2, 2: 0.9, 3: None, 4: 0.5, 5: 0.9, 6: 0.1, 7: 0.3}
    kept = []
    for step, score in scores.items():
        put(tmp_path, step, keep=1, score=score)
        kept.append([int(name.removeprefix("step_")) for name in names(tmp_path)])
    assert kept == [[1], [2], [2, 3], [2, 4], [5], [5, 6], [5, 7]]


def test_an_unreadable_score_is_none(tmp_path):
    put(tmp_path, 1, score=0.9)
    (tmp_path / "step_1" / COMMITTED).write_text('{"score": "1e9"}')
    put(tmp_path, 2, keep=1, score=0.1)
    assert names(tmp_path) == ["step_2"]


def test_a_skipped_later_one_does_not_push_out_sound_ones(tmp_path):
    """A run that went back to step 1 writes step 2 while the broken step 3 still lies there."""
    put(tmp_path, 1)
    flip(put(tmp_path, 3) / STATE, 0)
    put(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step_2", "step_3"]
    found, problems = newest(tmp_path)
    assert (found.step, len(problems)) == (2, 1)
    put(tmp_path, 3, keep=1)
    assert newest(tmp_path) == (Checkpoint(tmp_path / "step_3", 3, state(3)), [])
    assert names(tmp_path) == ["step_3"]


def test_a_writer_that_dies_between_old_and_new_loses_neither(tmp_path):
    put(tmp_path, 1)
    (tmp_path / "step_1").rename(tmp_path / ".replaced-step_1")
    fill(begin(tmp_path, 1))
    assert newest(tmp_path) == (Checkpoint(tmp_path / "step_1", 1, state(1)), [])


def test_what_a_dead_writer_left_is_cleared_by_the_next(tmp_path):
    fill(begin(tmp_path, 7))
    (tmp_path / ".tmp-retired-step_3").mkdir()
    put(tmp_path, 8)
    assert names(tmp_path) == ["step_8"]


def test_a_disk_that_refuses_is_named(tmp_path):
    temporary = begin(tmp_path, 1)
    shutil.rmtree(temporary)  # as a shared directory that vanished
    for write in (lambda: fill(temporary), lambda: commit(temporary, 1, state(1), 2)):
        with pytest.raises(CheckpointError, match=r"step_1: this checkpoint could not be written"):
            write()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        begin(tmp_path / "file", 1)


@pytest.mark.parametrize("name", FILES[:-1])
def test_what_cannot_be_seen_here_is_not_committed_without(tmp_path, name):
    """The old checkpoints would go, and the new one holds no policy."""
    put(tmp_path, 1, keep=1)
    temporary = begin(tmp_path, 2)
    fill(temporary)
    (temporary / name).unlink()
    with pytest.raises(CheckpointError, match=rf"could not be written: .*{name}"):
        commit(temporary, 2, state(2), keep=1)
    assert newest(tmp_path)[0].step == 1


def test_a_repeated_step_takes_the_place_of_the_old_one(tmp_path):
    put(tmp_path, 1)
    flip(put(tmp_path, 2) / STATE, 0)
    temporary = begin(tmp_path, 2)
    fill(temporary)
    commit(temporary, 2, {"step": 2, "again": True}, keep=2)
    assert newest(tmp_path) == (
        Checkpoint(tmp_path / "step_2", 2, {"step": 2, "again": True}),
        [],
    )


def test_a_killed_writer_costs_the_step_that_it_was_writing(tmp_path):
    draw = random.Random(6)
    steps = [0]
    put(tmp_path, 0, keep=2)
    interrupted = 0

    def check() -> None:
        found, problems = newest(tmp_path)
        assert problems == []
        assert found.state == ({"step": found.step} if found.step else state(0))
        steps.append(found.step)

    for _ in range(6):
        first = steps[-1] + 1
        kill_while_writing(
            commit_forever,
            tmp_path,
            first,
            ready=lambda first=first: (tmp_path / f"step_{first}").exists(),
            seconds=draw.uniform(0, 0.06),
            meanwhile=lambda: None,  # nobody reads beside the writer: it deletes what is old
        )
        check()
        assert steps[-1] >= first
        interrupted += any(path.name.startswith(".tmp-") for path in tmp_path.iterdir())
        weights = load_file(tmp_path / f"step_{steps[-1]}" / "adapter_model.safetensors")
        assert torch.equal(
            weights["layer.3.lora_A.weight"], adapter(steps[-1])["layer.3.lora_A.weight"]
        )
    assert steps == sorted(steps)
    assert interrupted > 0, "no kill hit a write: the test shows nothing"

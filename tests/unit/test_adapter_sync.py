"""Adapter versions: whole or not there, verified before they are loaded, never rewritten."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.killed import CONFIG, adapter, kill_while_writing, publish_forever
from wayfinder.errors import AdapterFileError, SyncError
from wayfinder.runtime import adapter_sync
from wayfinder.runtime.adapter_sync import (
    LATEST,
    MANIFEST,
    WEIGHTS,
    Publication,
    forget_after,
    make_root,
    publish,
    read_latest,
    retire,
    verify,
)

TENSORS = {
    "model.layers.1.q_proj.lora_B.weight": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "model.layers.0.q_proj.lora_A.weight": torch.full((2, 5), -1.5),
}


def put(root: Path, version: int, tensors=None, config=None, step: int = 7) -> Publication:
    make_root(root)
    return publish(
        root,
        version,
        TENSORS if tensors is None else tensors,
        config or CONFIG,
        base_model="base",
        step=step,
    )


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_is_published_is_what_is_read(tmp_path):
    root = tmp_path / "not" / "there" / "yet"
    written = put(root, 3)
    assert read_latest(root) == written
    assert written == Publication(3, str(root / "3"), written.digest, 2)
    content = (root / "3" / WEIGHTS).read_bytes()
    assert hashlib.sha256(content).hexdigest() == written.digest
    loaded = load_file(root / "3" / WEIGHTS)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert json.loads((root / "3" / "adapter_config.json").read_text()) == CONFIG
    assert names(root) == ["3", LATEST]
    manifest = json.loads((root / "3" / MANIFEST).read_text())
    assert (manifest["step"], manifest["base_model"], manifest["rank"]) == (7, "base", 4)
    assert {n: f["bytes"] for n, f in manifest["files"].items()} == {
        n: (root / "3" / n).stat().st_size for n in (WEIGHTS, "adapter_config.json")
    }


def test_the_digest_is_of_the_tensors_not_of_their_order(tmp_path):
    first = put(tmp_path / "a", 0)
    again = put(tmp_path / "b", 0, dict(reversed(TENSORS.items())))
    assert first.digest == again.digest


def test_latest_names_the_newest_one_and_moves_with_its_directory(tmp_path):
    for version in (0, 1, 2):
        put(tmp_path / "here", version, adapter(version))
    shutil.move(tmp_path / "here", tmp_path / "there")
    found = read_latest(tmp_path / "there")
    assert (found.version, found.path) == (2, str(tmp_path / "there" / "2"))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "adapter version 5: no adapter tensors to publish"),
        ({"w": torch.tensor([1.0, torch.nan])}, r"adapter version 5: .*not finite in \['w'\]"),
        ({"v": torch.ones(2), "w": torch.tensor(-torch.inf)}, r"not finite in \['w'\]"),
    ],
)
def test_what_is_not_worth_publishing_is_refused(tmp_path, tensors, message):
    put(tmp_path, 4)
    with pytest.raises(SyncError, match=message):
        put(tmp_path, 5, tensors)
    assert names(tmp_path) == ["4", LATEST]
    assert read_latest(tmp_path).version == 4


def test_a_version_is_never_rewritten(tmp_path):
    first = put(tmp_path, 0)
    before = (tmp_path / "0" / WEIGHTS).stat()
    put(tmp_path, 1, adapter(1))
    # The same content again: a resumed run publishes the version that it starts from.
    assert put(tmp_path, 0) == first
    assert (tmp_path / "0" / WEIGHTS).stat().st_mtime_ns == before.st_mtime_ns
    assert (tmp_path / "0" / WEIGHTS).stat().st_ino == before.st_ino
    assert read_latest(tmp_path) == first
    with pytest.raises(SyncError, match=r"0: this version is published with other content"):
        put(tmp_path, 0, adapter(9))
    assert read_latest(tmp_path) == first
    assert names(tmp_path) == ["0", "1", LATEST]


def test_a_file_system_that_refuses_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(AdapterFileError, match=rf"{tmp_path}/file: adapters cannot be written"):
        put(tmp_path / "file", 0)


def test_a_directory_that_went_away_is_not_made_again(tmp_path):
    """What is mounted there may come back, and a directory in its place would hide it."""
    root = tmp_path / "shared" / "adapters"
    put(root, 0)
    (tmp_path / "shared").rename(tmp_path / "away")
    for act in (
        lambda: publish(root, 1, TENSORS, CONFIG, base_model="base", step=8),
        lambda: retire(root, 1, set()),
        lambda: forget_after(root, 0),
        lambda: read_latest(root),
    ):
        with pytest.raises(AdapterFileError, match=str(root)):
            act()
    assert names(tmp_path) == ["away"]


def test_an_attempt_that_fails_leaves_nothing_on_a_full_disk(tmp_path, monkeypatch):
    put(tmp_path, 0)

    def fill_up(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(adapter_sync, "_write", fill_up)
        with pytest.raises(AdapterFileError, match="No space left on device"):
            put(tmp_path, 1, adapter(1))
    assert names(tmp_path) == ["0", LATEST]
    assert put(tmp_path, 1, adapter(1)) == read_latest(tmp_path)


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_config.json", MANIFEST])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_version_is_written_again(tmp_path, name, damage):
    first = put(tmp_path, 0)
    file = tmp_path / "0" / name
    file.write_bytes(file.read_bytes()[:-1])
    if damage == "gone":
        file.unlink()
    with pytest.raises(AdapterFileError, match=name):
        read_latest(tmp_path)
    assert put(tmp_path, 0) == read_latest(tmp_path) == first
    forget_after(tmp_path, 0)  # what was put aside goes too
    assert names(tmp_path) == ["0", LATEST]


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_config.json"])
def test_a_flipped_bit_is_found(tmp_path, name):
    put(tmp_path, 0)
    path = tmp_path / "0" / name
    sound = path.read_bytes()
    for place in {0, len(sound) // 2, len(sound) - 1}:
        damaged = bytearray(sound)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(SyncError, match=f"{name}: {len(sound)} bytes with sha256"):
            read_latest(tmp_path)
    path.write_bytes(sound)
    assert read_latest(tmp_path).version == 0


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_config.json"])
def test_a_cut_or_missing_file_is_named(tmp_path, name):
    put(tmp_path, 0)
    path = tmp_path / "0" / name
    sound = path.read_bytes()
    path.write_bytes(sound[:-1])
    with pytest.raises(SyncError, match=f"{name}: {len(sound) - 1} bytes.*says {len(sound)} bytes"):
        verify(tmp_path / "0")
    path.unlink()
    with pytest.raises(SyncError, match=f"{name}: named by the manifest, but"):
        verify(tmp_path / "0")


def test_a_missing_or_damaged_manifest_is_named(tmp_path):
    put(tmp_path, 0)
    path = tmp_path / "0" / MANIFEST
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SyncError, match=f"{MANIFEST}: not readable"):
        read_latest(tmp_path)
    path.unlink()
    with pytest.raises(SyncError, match=f"{MANIFEST}: not readable"):
        read_latest(tmp_path)


@pytest.mark.parametrize("number", [2, 0, None, "1"])
def test_another_format_is_named(tmp_path, number):
    put(tmp_path, 0)
    edit_json(tmp_path / "0" / MANIFEST, format=number)
    with pytest.raises(SyncError, match=rf"{MANIFEST}: format {number!r}; this version reads 1"):
        read_latest(tmp_path)


@pytest.mark.parametrize("path", ["../elsewhere", "0/../../elsewhere", "/tmp", "", ".", "-1", None])
def test_the_pointer_cannot_leave_the_directory(tmp_path, path):
    put(tmp_path / "root", 0)
    put(tmp_path / "elsewhere", 0)
    shutil.copytree(tmp_path / "elsewhere" / "0", tmp_path / "elsewhere", dirs_exist_ok=True)
    edit_json(tmp_path / "root" / LATEST, path=path)
    with pytest.raises(SyncError, match=rf"{LATEST}: path .* leaves the directory"):
        read_latest(tmp_path / "root")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"7", b'{"path": "0"', b"\xff\xfe"])
def test_an_unreadable_pointer_is_named(tmp_path, content):
    put(tmp_path, 0)
    (tmp_path / LATEST).write_bytes(content)
    with pytest.raises(SyncError, match=f"{LATEST}: not readable as a pointer"):
        read_latest(tmp_path)


def test_without_a_pointer_nothing_is_guessed(tmp_path):
    put(tmp_path, 0)
    (tmp_path / LATEST).unlink()
    with pytest.raises(SyncError, match=f"{LATEST}: not readable"):
        read_latest(tmp_path)
    with pytest.raises(SyncError, match=f"{LATEST}: not readable"):
        read_latest(tmp_path / "nowhere")


def test_a_pointer_to_a_version_that_is_gone(tmp_path):
    put(tmp_path, 0)
    edit_json(tmp_path / LATEST, path="8")
    with pytest.raises(SyncError, match=f"8/{MANIFEST}: not readable"):
        read_latest(tmp_path)


def test_old_versions_go_and_what_is_served_stays(tmp_path):
    for version in range(12):
        put(tmp_path, version, {"w": torch.full((2,), float(version))})
    # A slow engine still serves version 1; numbers, not names, say what is old (2 before 10).
    assert retire(tmp_path, 3, in_use={1}) == [0, 2, 3, 4, 5, 6, 7, 8]
    assert names(tmp_path) == sorted(["1", "9", "10", "11", LATEST])
    assert verify(tmp_path / "1").version == 1
    assert retire(tmp_path, 3, in_use=set()) == [1]
    assert retire(tmp_path, 3, in_use=set()) == []
    assert retire(tmp_path, 9, in_use=set()) == []
    assert read_latest(tmp_path).version == 11


def test_a_resumed_run_forgets_what_came_after(tmp_path):
    for version in range(4):
        put(tmp_path, version, adapter(version))
    (tmp_path / ".tmp-4-abc").mkdir()
    (tmp_path / ".tmp-4-abc" / WEIGHTS).write_bytes(b"half")
    (tmp_path / f".tmp-{LATEST}-abc").write_bytes(b"{")
    (tmp_path / "notes.txt").write_text("kept")
    forget_after(tmp_path, 1)
    assert names(tmp_path) == sorted(["0", "1", LATEST, "notes.txt"])
    # The repeated part may come out differently, under the same numbers.
    put(tmp_path, 1, adapter(1))
    assert put(tmp_path, 2, adapter(70)) == read_latest(tmp_path)
    forget_after(tmp_path, -1)
    assert names(tmp_path) == sorted([LATEST, "notes.txt"])


def test_a_killed_writer_leaves_a_sound_version_behind(tmp_path):
    """The writer is killed at random moments; a reader beside it never meets half a version."""
    draw = random.Random(5)
    versions: list[int] = []
    interrupted = 0
    put(tmp_path, 0, adapter(0))

    def check() -> int:
        found = read_latest(tmp_path)
        weights = load_file(Path(found.path) / WEIGHTS)
        assert torch.equal(
            weights["layer.0.lora_A.weight"], adapter(found.version)["layer.0.lora_A.weight"]
        )
        versions.append(found.version)
        return found.version

    for _ in range(10):
        first = check()
        kill_while_writing(
            publish_forever,
            tmp_path,
            first,
            ready=lambda first=first: (tmp_path / str(first + 1)).exists(),
            seconds=draw.uniform(0, 0.06),
            meanwhile=check,
        )
        last = check()
        interrupted += any(path.name.startswith(".tmp-") for path in tmp_path.iterdir())
        # What was being written can be written again, whatever became of it.
        put(tmp_path, last + 1, adapter(last + 1))
        forget_after(tmp_path, last + 1)
        assert names(tmp_path) == sorted([*map(str, range(last + 2)), LATEST])
    assert versions == sorted(versions)
    assert interrupted > 0, "no kill hit a write: the test shows nothing"


def test_a_manifest_that_was_changed_is_found(tmp_path):
    """Figures in it that no digest covers: the pointer holds the digest of the manifest itself."""
    put(tmp_path, 0)
    edit_json(tmp_path / "0" / MANIFEST, num_tensors=10_000)
    with pytest.raises(SyncError, match=rf"{MANIFEST}: sha256 .* says"):
        read_latest(tmp_path)

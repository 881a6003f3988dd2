"""What of an evaluation and of the adapter reaches the real W&B client, offline."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from support.recorded import make_run, wanderer_moves
from support.wandb_log import all_of, history, only, read_records
from wayfinder.record.episodes import read_episodes
from wayfinder.record.layout import ADAPTERS_DIR, WANDB_DIR
from wayfinder.record.tracking import _group
from wayfinder.record.wandb_tracker import STEP_AXIS, WandbTracker
from wayfinder.runtime.adapter_sync import publish

EVAL = {"eval/all/pass_at_1": 0.8, "eval/solve_rate": 0.8}


def start(run_path: Path, adapters: Path | None = None) -> WandbTracker:
    return WandbTracker(
        run_path,
        mode="offline",
        run_id="fedcba9876543210",
        project="wayfinder",
        entity=None,
        group="maze_easy/kl",
        job_type="train",
        name="seed=3",
        tags=[],
        config={},
        adapters=adapters,
    )


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """A run with two evaluations, whose last adapter was asked for: its path and W&B records."""
    run_path = make_run(tmp_path_factory.mktemp("wandb") / "run")
    (run_path / WANDB_DIR).mkdir()
    adapters = run_path / ADAPTERS_DIR
    adapters.mkdir()
    for version in (1, 2):
        tensors = {"lora_A": torch.full((2, 2), float(version))}
        publish(adapters, version, tensors, {"r": 2}, base_model="tiny", step=version)
    with pytest.MonkeyPatch.context() as patch:
        for key in [key for key in os.environ if key.startswith("WANDB_")]:
            patch.delenv(key)
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        patch.delenv("XDG_DATA_HOME", raising=False)
        tracker = start(run_path, adapters)
        tracker.log(0, EVAL)
        tracker.log(1, {"train/solve_rate": 0.5})
        tracker.log(10, {"greedy/all/pass_at_1": 1.0})
        tracker.log(11, EVAL)  # its episodes were not stored
        tracker.finish({"status": "finished"}, 0)
        assert "WANDB_DATA_DIR" not in os.environ
        assert not list(home.rglob("staging"))
    (log,) = run_path.glob("wandb/offline-run-*/*.wandb")
    return run_path, read_records(log)


def rows_with(records, key: str) -> list[dict]:
    """The history rows in which a media key occurs, with the parts of its value."""
    rows = []
    for row in history(records):
        parts = {k.removeprefix(f"{key}."): v for k, v in row.items() if k.startswith(f"{key}.")}
        value = row.get(key) or parts
        if value:
            rows.append({"step": row[STEP_AXIS], **value})
    return rows


def test_an_evaluation_has_a_table_of_its_episodes(sent):
    run_path, records = sent
    (entry,) = rows_with(records, "eval/episodes")
    assert entry["step"] == 0
    assert entry["_type"] == "table-file"
    (files,) = run_path.glob("wandb/offline-run-*/files")
    table = json.loads((files / entry["path"]).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    episodes = read_episodes(run_path / "episodes" / "eval_step_000000.jsonl")
    assert [row["outcome"] for row in rows] == [str(e.outcome) for e in episodes]
    behind, ahead = ("\u2192\u2191\u2190\u2193"[move] for move in wanderer_moves(1)[:2])
    assert rows[1]["actions"] == f"{behind} {ahead} {ahead} ? {behind} \u25a0"
    assert (rows[1]["turns"], rows[1]["parse_failures"], rows[1]["solved"]) == (6, 1, False)
    assert rows[1]["illegal_moves"] == 1
    assert rows[0]["last_reply"] == episodes[0].turns[-1].text
    assert [row["step"] for row in rows_with(records, "greedy/episodes")] == [10]


def test_an_evaluation_has_replays_of_a_solved_and_a_failed_episode(sent):
    run_path, records = sent
    (files,) = run_path.glob("wandb/offline-run-*/files")
    for key, num_turns in (("eval/solved", 13), ("eval/failed", 6)):
        (entry,) = rows_with(records, key)
        with Image.open(files / entry["path"]) as replay:
            assert replay.format == "GIF"
            assert replay.n_frames == num_turns + 1
    assert len(rows_with(records, "greedy/solved")) == 1
    assert rows_with(records, "greedy/failed") == []


def test_the_last_adapter_is_an_artifact_by_reference(sent):
    run_path, records = sent
    (artifact,) = [found for found in all_of(records, "artifact") if found.type == "model"]
    assert artifact.name == "adapter-fedcba9876543210"
    assert json.loads(artifact.metadata) == {
        "version": 2,
        "step": 2,
        "base_model": "tiny",
        "rank": 2,
    }
    places = {entry.path: entry.local_path for entry in artifact.manifest.contents}
    adapter = run_path / ADAPTERS_DIR / "2"
    assert places == {path.name: str(path) for path in adapter.iterdir()}


def test_no_adapter_is_sent_unasked_or_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "own"))
    for name, adapters in (("unasked", None), ("none", tmp_path / "nothing")):
        run_path = tmp_path / name
        (run_path / WANDB_DIR).mkdir(parents=True)
        tracker = start(run_path, adapters)
        tracker.log(1, {"a": np.float32(1)})
        tracker.finish({"status": "failed"}, 1)
        assert os.environ["WANDB_DATA_DIR"] == str(tmp_path / "own")
        (log,) = run_path.glob("wandb/offline-run-*/*.wandb")
        records = read_records(log)
        assert all_of(records, "artifact") == []
        assert only(records, "exit").exit_code == 1


@pytest.mark.parametrize(
    ("overrides", "group"),
    [
        (["+experiment=maze_easy", "seed=1"], "maze_easy"),
        (["+experiment=maze_easy", "+sweep=kl", "algorithm.kl_coef=0"], "maze_easy/kl"),
    ],
)
def test_runs_of_a_sweep_are_one_group(overrides, group):
    assert _group("maze_easy", overrides) == group

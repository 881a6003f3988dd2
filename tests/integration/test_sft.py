"""The preparation: every stage on a model of a few thousand weights, interruption, exactness."""

import dataclasses
import json

import pytest
import torch

from wayfinder.chat.render import context_ids
from wayfinder.chat.vision import load_processor
from wayfinder.config.sft import MeasureConfig, SftConfig, StageConfig, TinyModelConfig
from wayfinder.envs.maze2d import render
from wayfinder.envs.tasks import evaluation_tasks
from wayfinder.errors import CheckpointError, RunDirError
from wayfinder.train.sft import MODEL_DIR, Preparation, run_sft
from wayfinder.train.sft_data import Situations
from wayfinder.train.sft_stage import StageConsole
from wayfinder.train.sft_text import text_hidden
from wayfinder.train.sft_tower import tower_features


def small_config(**changes) -> SftConfig:
    def stage(**values):
        return StageConfig(batch_size=8, report_every=16, warmup_examples=16, **values)

    config = SftConfig(
        threads=1,
        checkpoint_seconds=0.0,
        model=TinyModelConfig(
            vision_depth=2,
            vision_width=32,
            vision_heads=2,
            vision_mlp=64,
            deepstack_levels=[0],
            text_width=32,
            text_heads=2,
            text_kv_heads=1,
            text_head_dim=16,
            text_mlp=64,
        ),
        vision=stage(examples=48, muon_learning_rate=1e-3),
        clean=stage(examples=44),
        vision_telling_examples=24,
        sloppy=stage(examples=32),
        blend_probes=2,
        probe_repeats=1,
        measure=MeasureConfig(tasks=3, other_tasks=2, max_turns=3, repeats=2),
    )
    return dataclasses.replace(config, **changes)


class Quiet(StageConsole):
    """Keeps the lines; raises at the line that begins with `stop_at`, as an interruption would."""

    def __init__(self, stop_at: str | None = None):
        super().__init__()
        self.lines: list[str] = []
        self._stop_at = stop_at

    def line(self, text: str) -> None:
        self.lines.append(text)
        if self._stop_at and text.startswith(self._stop_at):
            raise KeyboardInterrupt


def weights(out_dir) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(out_dir / MODEL_DIR / "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("sft")
    console = Quiet()
    record = run_sft(small_config(), out_dir, seed=4, console=console, provenance={"commit": "c"})
    return out_dir, record, console


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return Preparation(small_config(), tmp_path_factory.mktemp("prepared"), 4, Quiet())


def test_all_stages_run_and_leave_a_model_that_loads(finished):
    from transformers import Qwen3VLForConditionalGeneration

    out_dir, record, console = finished
    assert [stage["examples"] for stage in record["stages"]] == [48, 44, 32]
    assert all(stage["curve"] for stage in record["stages"])
    assert {row["mazes"] for row in record["solve"]["clean"]} == {"evaluation", "other"}
    assert {row["temperature"] for row in record["solve"]["sloppy"]} == {0.7, 0.2}
    assert record["provenance"] == {"commit": "c"}
    assert json.loads((out_dir / "training_record.json").read_text()) == record
    assert any(line.startswith("sft vision 48/48 loss ") for line in console.lines)
    Qwen3VLForConditionalGeneration.from_pretrained(out_dir / MODEL_DIR)
    load_processor(out_dir / MODEL_DIR)


def test_a_finished_preparation_is_not_run_again(finished):
    out_dir, record, _ = finished
    console = Quiet()
    assert run_sft(small_config(), out_dir, seed=4, console=console) == record
    assert len(console.lines) == 1
    assert "is finished" in console.lines[0]


@pytest.mark.parametrize(
    "line", ["sft vision 32/48", "sft clean 16/44", "sft sloppy 16/32", "sft blend 1.0"]
)
def test_an_interruption_changes_nothing(finished, tmp_path, line):
    out_dir, record, _ = finished
    with pytest.raises(KeyboardInterrupt):
        run_sft(small_config(), tmp_path, seed=4, console=Quiet(stop_at=line))
    assert not (tmp_path / MODEL_DIR).exists()
    again = run_sft(small_config(), tmp_path, seed=4, console=Quiet())
    assert [s["examples"] for s in again["stages"]] == [s["examples"] for s in record["stages"]]
    expected, found = weights(out_dir), weights(tmp_path)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_tower_is_frozen_after_its_stage_and_the_text_model_during_it(finished):
    out_dir, _, _ = finished

    def stage(name):
        return torch.load(out_dir / f"stage_{name}.pt", weights_only=True)["modules"]

    final = weights(out_dir)
    for name, value in stage("vision")["visual"].items():
        assert torch.equal(final[f"model.visual.{name}"], value)
    changed = {
        name: not torch.equal(value, stage("sloppy")["text"][name])
        for name, value in stage("clean")["text"].items()
    }
    assert all(changed[name] for name in changed if ".layers." in name)


def test_without_examples_of_vision_the_tower_learns_by_imitation(tmp_path):
    config = small_config(vision=StageConfig(examples=0))
    record = run_sft(config, tmp_path / "whole", seed=4, console=Quiet())
    assert [stage["examples"] for stage in record["stages"]] == [0, 44, 32]
    for line in ("sft clean 32/44", "sft sloppy 16/32"):
        with pytest.raises(KeyboardInterrupt):
            run_sft(config, tmp_path / "parts", seed=4, console=Quiet(stop_at=line))
    run_sft(config, tmp_path / "parts", seed=4, console=Quiet())
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    random, learnt = (
        torch.load(tmp_path / "whole" / f"stage_{stage}.pt", weights_only=True)["modules"]["visual"]
        for stage in ("vision", "clean")
    )
    for name, value in learnt.items():
        assert torch.equal(expected[f"model.visual.{name}"], value)
        if name.endswith("weight") and ".norm" not in name:
            assert not torch.equal(value, random[name]), name


def test_another_configuration_in_the_same_directory_is_refused_by_key(finished):
    out_dir, _, _ = finished
    other = small_config()
    other.clean.learning_rate = 0.5
    with pytest.raises(RunDirError, match=r"sft\.clean\.learning_rate: stored 0\.001, asked 0\.5"):
        run_sft(other, out_dir, seed=4, console=Quiet())
    with pytest.raises(RunDirError, match="seed: stored 4, asked 5"):
        run_sft(small_config(), out_dir, seed=5, console=Quiet())


def test_a_broken_checkpoint_is_named(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_sft(small_config(), tmp_path, seed=4, console=Quiet(stop_at="sft vision 32/48"))
    checkpoint = tmp_path / "stage_vision.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"stage_vision\.pt"):
        run_sft(small_config(), tmp_path, seed=4, console=Quiet())


def test_the_batched_tower_equals_the_model_s_own(prepared):
    situations = some_situations(6)
    frames = [render(s.maze, s.agent, s.target_left) for s in situations]
    pixels, grids = prepared.vision.patches(frames)
    tower = prepared.model.model.visual
    with torch.no_grad():
        expected = tower(pixels, grid_thw=grids)
        found = tower_features(tower, prepared.table.batch(situations))
    torch.testing.assert_close(found.merged.flatten(0, 1), expected.pooler_output)
    for level, own in zip(found.deepstack, expected.deepstack_features, strict=True):
        torch.testing.assert_close(level.flatten(0, 1), own)


def test_demonstrations_read_like_rollouts_and_score_like_the_model(prepared):
    situations = some_situations(4)
    pairs = [("", 2), ("Moved.", "stop"), ("Wall.", 0), ("Invalid: empty reply.", 3)]
    batch = prepared.text.batch(pairs)
    frames = [render(s.maze, s.agent, s.target_left) for s in situations]
    pixels, grids = prepared.vision.patches(frames)
    with torch.no_grad():
        features = tower_features(prepared.model.model.visual, prepared.table.batch(situations))
        hidden = text_hidden(prepared.model, batch.ids, batch.positions, features)
        logits = prepared.model.lm_head(hidden)
    tokenizer = prepared.processor.tokenizer
    for place, (feedback, action) in enumerate(pairs):
        row = prepared.text.row(feedback, action)
        observation = prepared.renderer.observation(feedback, (81,))
        context = context_ids(prepared.renderer.prefix_ids, (), 0, observation)
        assert tuple(row.ids[: row.context_length].tolist()) == context
        reply = row.ids[row.context_length :].tolist()
        assert reply[-1] == tokenizer.eos_token_id
        text = "('stop', 'stop')" if action == "stop" else f"('move', {action})"
        assert tokenizer.decode(reply[:-1]) == text
        assert batch.ids[place][batch.is_reply[place]].tolist() == reply
        with torch.no_grad():
            own = prepared.model(
                input_ids=row.ids[None],
                pixel_values=pixels[place * 81 : (place + 1) * 81],
                image_grid_thw=grids[place : place + 1],
                mm_token_type_ids=(row.ids[None] == prepared.vision.tokens.image_pad).int(),
            ).logits[0]
        torch.testing.assert_close(logits[place, : len(row.ids)], own, rtol=1e-4, atol=1e-5)


def test_solve_counts_add_up_and_depend_on_the_seed_alone(prepared):
    tasks = evaluation_tasks("maze_2d/easy", 0, 3)
    report = prepared.meter.measure(tasks, temperature=0.7, seed=1, repeats=2)
    assert report == prepared.meter.measure(tasks, temperature=0.7, seed=1, repeats=2)
    assert report.episodes == 6
    assert report.solved + report.wrong_stops + report.timeouts == 6
    assert report.illegal + report.unparsed <= report.turns <= 6 * 3


def some_situations(count):
    config = small_config()
    stream = Situations("maze_2d/easy", 9, "test", frozenset(), config.situations)
    return [stream[index][0] for index in range(count)]

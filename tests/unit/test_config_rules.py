"""Each rule refuses what it is there for and nothing else."""

from __future__ import annotations

import copy
import json
import math
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from support.configs import MODEL_FILES, model_directory, set_keys
from wayfinder.choices import AdvantageKind, GroupFilter, KlKind, KlPlacement, LossKind
from wayfinder.config import bounds, rules, sft_rules
from wayfinder.config.keys import all_keys
from wayfinder.config.load import compose
from wayfinder.config.places import is_hub_id, locate, model_source
from wayfinder.config.schema import Config, Device, EnvKind, TaskKind
from wayfinder.envs.maze2d import SIZES
from wayfinder.errors import ConfigError


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("rules")
    model = model_directory(root / "model")
    return compose(["+experiment=maze_easy", f"model.path={model}", f"paths.root={root}/runs"])


@pytest.fixture
def config(valid: Config) -> Config:
    return copy.deepcopy(valid)


REFUSED = [
    ({"algorithm.group_size": 1}, "algorithm.group_size", "2 or more"),
    ({"algorithm.group_size": 0}, "algorithm.group_size", "1 or more"),
    ({"algorithm.mini_batches": 3}, "algorithm.tasks_per_step", "15 or 18"),
    ({"algorithm.mini_batches": 0}, "algorithm.mini_batches", "1 or more"),
    ({"algorithm.tasks_per_step": 1}, "algorithm.tasks_per_step", "Set algorithm.tasks_per_step=2"),
    ({"algorithm.clip_low": 0.0}, "algorithm.clip_low", "more than 0"),
    ({"algorithm.clip_low": 1.5}, "algorithm.clip_low", "at most 1"),
    ({"algorithm.clip_high": -0.1}, "algorithm.clip_high", "more than 0"),
    ({"algorithm.dual_clip": 1.0}, "algorithm.dual_clip", "more than 1"),
    (
        {"algorithm.dual_clip": 3.0, "algorithm.loss": LossKind.cispo},
        "algorithm.dual_clip",
        "ppo_clip",
    ),
    ({"algorithm.kl_coef": -0.001}, "algorithm.kl_coef", "0 or more"),
    (
        {"algorithm.kl_coef": 0.001, "algorithm.kl_kind": KlKind.k1},
        "algorithm.kl_kind",
        "k3_k2grad",
    ),
    (
        {"algorithm.kl_coef": 0.001, "algorithm.kl_placement": KlPlacement.reward},
        "algorithm.kl_kind",
        "k1",
    ),
    ({"algorithm.entropy_coef": math.nan}, "algorithm.entropy_coef", "finite"),
    ({"algorithm.importance_cap": 0.5}, "algorithm.importance_cap", "1 or more"),
    (
        {"env.history": "full", "algorithm.micro_batch_tokens": 4095},
        "algorithm.micro_batch_tokens",
        "rollout.max_model_len=4096",
    ),
    ({"algorithm.mismatch.stop": 1e-4}, "algorithm.mismatch.stop", "alarm"),
    ({"algorithm.optimizer.lr": -1e-5}, "algorithm.optimizer.lr", "0 or more"),
    ({"algorithm.optimizer.lr": math.nan}, "algorithm.optimizer.lr", "0 or more"),
    ({"algorithm.optimizer.lr": math.inf}, "algorithm.optimizer.lr", "0 or more"),
    ({"algorithm.optimizer.beta2": 1.0}, "algorithm.optimizer.beta2", "less than 1"),
    ({"model.lora.rank": 0}, "model.lora.rank", "1 or more"),
    ({"model.lora.rank": 513}, "model.lora.rank", "512"),
    ({"model.lora.alpha": -32}, "model.lora.alpha", "1 or more"),
    ({"model.lora.targets": []}, "model.lora.targets", "one or more"),
    ({"model.lora.targets": ["q_proj", "q_proj"]}, "model.lora.targets", "once"),
    ({"model.lora.targets": ["q_porj"]}, "model.lora.targets", "Did you mean q_proj?"),
    ({"model.lora.targets": ["visual.qkv"]}, "model.lora.targets", "language model only"),
    ({"model.lora.targets": ["lm_head"]}, "model.lora.targets", "LM head"),
    ({"model.lora.targets": ["all-linear"]}, "model.lora.targets", "vision tower"),
    ({"model.dtype": "bflaot16"}, "model.dtype", "Did you mean bfloat16?"),
    ({"model.attention": "flash_attention_2"}, "model.attention", "cluster.device=cpu"),
    ({"env.id": "maze_2d/esay"}, "env.id", "Did you mean maze_2d/easy?"),
    ({"env.max_turns": 0}, "env.max_turns", "1 or more"),
    ({"env.history": 0}, "env.history", "1 or more"),
    ({"env.history": "ful"}, "env.history", "env.history=full"),
    ({"env.history": True}, "env.history", "full"),
    ({"env.history": 2.5}, "env.history", "full"),
    ({"env.history": None}, "env.history", "full"),
    ({"rollout.temperature": 0.0}, "rollout.temperature", "more than 0"),
    ({"rollout.top_p": 0.9}, "rollout.top_p", "rollout.top_p=1.0"),
    ({"rollout.top_k": 50}, "rollout.top_k", "rollout.top_k=-1"),
    ({"rollout.min_p": 0.05}, "rollout.min_p", "rollout.min_p=0.0"),
    ({"rollout.max_model_len": 100}, "rollout.max_model_len", "rollout.max_tokens=16"),
    ({"rollout.max_num_batched_tokens": 64}, "rollout.max_num_batched_tokens", "max_num_seqs=128"),
    (
        {
            "algorithm.filter": GroupFilter.refill,
            "algorithm.kl_coef": 0.1,
            "algorithm.kl_placement": KlPlacement.reward,
            "algorithm.kl_kind": KlKind.k1,
        },
        "algorithm.filter",
        "every group",
    ),
    ({"algorithm.refill_groups": 0}, "algorithm.refill_groups", "1 or more"),
    ({"cluster.slots": 0}, "cluster.slots", "1 or more"),
    ({"cluster.max_restarts": -1}, "cluster.max_restarts", "0 or more"),
    *(
        ({"cluster.address": address}, "cluster.address", "host:port")
        for address in ("local", "head", "ray://head:10001", "")
    ),
    ({"checkpoint.every_minutes": 0.0}, "checkpoint.every_minutes", "more than 0, or null"),
    ({"checkpoint.grace_s": 0.0}, "checkpoint.grace_s", "more than 0"),
    ({"sync.probe_tolerance": 0.0}, "sync.probe_tolerance", "more than 0"),
    ({"eval.pass_at": [1, 4]}, "eval.pass_at", "eval.samples=4"),
    ({"eval.pass_at": [0]}, "eval.pass_at", "from 1"),
    ({"eval.tasks": 0}, "eval.tasks", "1 or more"),
    ({"eval.first_seed": 2**31}, "eval.first_seed", "0 to 2000000000"),
    ({"eval.stop_at": 1.5}, "eval.stop_at", "or null"),
    ({"eval.unseen_first_seed": 63}, "eval.unseen_first_seed", "0..63"),
    (
        {"eval.first_seed": 1_000_100},
        "eval.unseen_first_seed",
        "eval.unseen_first_seed=1000164",
    ),
    ({"run.name": "a=1"}, "run.name", "letters"),
    ({"run.name": "../elsewhere"}, "run.name", "letters"),
]


@pytest.mark.parametrize(("changes", "key", "words"), REFUSED)
def test_a_broken_rule_is_the_only_complaint(config, changes, key, words):
    found = rules.violations(set_keys(config, changes))
    assert [violation.key for violation in found] == [key]
    assert words in str(found[0])
    assert str(found[0]).startswith(f"{key}=")


ALLOWED = [
    {},
    {"algorithm.group_size": 1, "algorithm.advantage": AdvantageKind.reinforce_pp},
    {"algorithm.mini_batches": 16},
    {"algorithm.clip_low": 1.0, "algorithm.loss": LossKind.cispo},
    {"algorithm.dual_clip": 3.0},
    {"algorithm.kl_coef": 0.001},
    {
        "algorithm.kl_coef": 0.001,
        "algorithm.kl_kind": KlKind.k1,
        "algorithm.kl_placement": KlPlacement.reward,
    },
    {"algorithm.optimizer.lr": 0.0},
    {"env.history": "full"},
    {"env.history": 4},
    {"env.kind": EnvKind.visgym, "env.id": "anything/at_all"},
    {"eval.temperature": 0.0},
    {"eval.unseen_tasks": 0, "eval.unseen_first_seed": 0},
    {"eval.unseen_first_seed": 64},
    {"cluster.slots": 6, "cluster.device": Device.cuda, "cluster.address": "auto"},
    {"cluster.address": "10.0.0.1:6379"},
    {"cluster.address": "head.ray.svc:6379"},
    {"cluster.address": "[fd00::1]:6379"},
    {"model.path": "Qwen/Qwen3-VL-8B-Instruct"},
    {"run.name": "maze_easy/first.try-2"},
]


@pytest.mark.parametrize("changes", ALLOWED)
def test_what_can_run_is_not_refused(config, changes):
    assert rules.violations(set_keys(config, changes)) == []


def test_all_violations_come_in_one_error_each_with_its_mend(config):
    set_keys(
        config,
        {
            "algorithm.group_size": 1,
            "algorithm.mini_batches": 3,
            "model.lora.rank": 0,
            "model.path": "./nowhere",
            "env.max_turns": 0,
            "rollout.top_p": 0.9,
        },
    )
    with pytest.raises(ConfigError) as error:
        rules.check(config)
    lines = str(error.value).splitlines()
    assert lines[0] == "The configuration cannot run, 6 problems:"
    assert [line.split("=")[0].removeprefix("  - ") for line in lines[1:]] == [
        "env.max_turns",
        "model.lora.rank",
        "algorithm.group_size",
        "algorithm.tasks_per_step",
        "model.path",
        "rollout.top_p",
    ]
    assert all(": expected " in line and "et " in line for line in lines[1:])


def test_every_bound_names_a_key_and_proposes_a_value_that_it_accepts(config):
    for bound in bounds.ALWAYS + bounds.TRAIN + bounds.EVALUATE + sft_rules.BOUNDS:
        assert bound.key in all_keys()
        default = reduce(getattr, bound.key.split("."), config)
        assert bound.optional if bound.instead == "null" else bound.holds(bound.instead)
        assert default is None if bound.optional else bound.holds(default)
        assert not bound.holds(math.nan)
        assert not bound.holds(math.inf)


def test_a_relation_says_nothing_about_a_key_that_is_out_of_range(config):
    set_keys(config, {"eval.unseen_first_seed": -1, "eval.unseen_tasks": 10})
    assert [violation.key for violation in rules.violations(config)] == ["eval.unseen_first_seed"]


def test_the_known_mazes_are_those_of_the_environment():
    assert sft_rules.CELLS == SIZES


@pytest.mark.parametrize("missing", MODEL_FILES)
def test_an_incomplete_model_directory_is_refused(config, tmp_path, missing):
    model = model_directory(tmp_path / "model")
    (model / missing).unlink()
    config.model.path = str(model)
    (violation,) = rules.violations(config)
    assert violation.key == "model.path"
    assert missing.partition(".")[2] in violation.expected


def test_a_missing_model_is_a_directory_or_a_hub_id_by_how_it_looks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_hub_id("org/name")
    assert model_source("org/name") == "org/name"
    for directory in ("./org/name", "/org/name", "org", "org/name/deep", "models/name", "../name"):
        assert not is_hub_id(directory), directory
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert model_source("org/name") == str(tmp_path / "org" / "name")


def test_a_relative_path_is_found_from_the_repository_root_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate("conf/config.yaml").is_file()
    assert locate("nowhere") == tmp_path / "nowhere"


WIDTH = 128


def _adapter(directory: Path, **changes: object) -> str:
    directory.mkdir()
    saved = {
        "r": 16,
        "lora_alpha": 32,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": [
            f"model.language_model.layers.0.{place}"
            for place in ("self_attn.q_proj", "mlp.up_proj")
        ],
    }
    (directory / "adapter_config.json").write_text(json.dumps(saved | changes))
    a = np.zeros((16, WIDTH), np.float32)
    tensors = {"model.language_model.layers.0.self_attn.q_proj.lora_A.weight": a}
    save_file(tensors, directory / "adapter_model.safetensors")
    return str(directory)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, []),
        ({"target_modules": ["up_proj", "q_proj"]}, []),
        ({"r": 8}, ["model.lora.rank"]),
        ({"lora_alpha": 16}, ["model.lora.alpha"]),
        ({"use_rslora": True}, ["model.lora.rslora"]),
        ({"target_modules": ["q_proj"]}, ["model.lora.targets"]),
        ({"target_modules": ["q_proj", 1]}, ["model.lora.targets"]),
        ({"target_modules": "all-linear"}, ["model.adapter"]),
        ({"use_dora": True}, ["model.adapter"]),
        ({"r": 8, "lora_alpha": 16}, ["model.lora.rank", "model.lora.alpha"]),
    ],
)
def test_a_starting_adapter_must_have_the_lora_settings(config, tmp_path, changes, keys):
    config.model.adapter = _adapter(tmp_path / "adapter", **changes)
    config.model.lora.targets = ["q_proj", "up_proj"]
    assert [violation.key for violation in rules.violations(config)] == keys


def test_a_starting_adapter_must_be_there_and_readable(config, tmp_path):
    config.model.adapter = str(tmp_path)
    (violation,) = rules.violations(config)
    assert "adapter_config.json" in str(violation)
    for content in ("{", "[]"):
        (tmp_path / "adapter_config.json").write_text(content)
        (violation,) = rules.violations(config)
        assert violation.key == "model.adapter"
        assert "adapter_config.json" in violation.mend


def test_a_cut_starting_adapter_is_refused(config, tmp_path):
    config.model.adapter = _adapter(tmp_path / "adapter")
    config.model.lora.targets = ["q_proj", "up_proj"]
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    (violation,) = rules.violations(config)
    assert violation.key == "model.adapter"
    assert str(file) in violation.mend


def _says_of_its_text(config, **values: object) -> None:
    Path(config.model.path, "config.json").write_text(json.dumps({"text_config": values}))


def test_an_adapter_of_another_model_is_refused(config, tmp_path):
    config.model.path = str(model_directory(tmp_path / "model"))
    config.model.adapter = _adapter(tmp_path / "adapter")
    config.model.lora.targets = ["q_proj", "up_proj"]
    _says_of_its_text(config, hidden_size=WIDTH)
    assert rules.violations(config) == []
    _says_of_its_text(config, hidden_size=2 * WIDTH)
    (violation,) = rules.violations(config)
    assert violation.key == "model.adapter"
    assert f"hidden size is {2 * WIDTH}" in violation.expected
    assert f"is for {WIDTH}" in violation.mend


def test_a_prompt_is_no_longer_than_the_model_has_positions(config, tmp_path):
    config.model.path = str(model_directory(tmp_path / "model"))
    _says_of_its_text(config, max_position_embeddings=config.rollout.max_model_len)
    assert rules.violations(config) == []
    _says_of_its_text(config, max_position_embeddings=config.rollout.max_model_len - 1)
    assert [v.key for v in rules.violations(config)] == ["rollout.max_model_len"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_cut_file_of_a_model_is_named(config, tmp_path, name):
    config.model.path = str(model_directory(tmp_path / "model"))
    Path(config.model.path, name).write_text("{")
    (violation,) = rules.violations(config)
    assert violation.key == "model.path"
    assert f"model/{name}: " in violation.mend


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("outputs/maze_hard_sft/seed-9/model", "+experiment=maze_hard_sft`"),
        ("./runs/maze_hard_sft/seed-0/model", "+experiment=maze_hard_sft paths.root=./runs`"),
        ("/nowhere/8b", None),
    ],
)
def test_a_start_that_is_not_made_yet_says_what_makes_it(config, path, command):
    config.model.path = path
    (violation,) = rules.violations(config)
    assert violation.key == "model.path"
    assert ("python run.py" in violation.mend) == (command is not None)
    assert command is None or command in violation.mend


@pytest.mark.parametrize("key", ["paths.root", "sync.dir"])
def test_a_directory_that_cannot_be_made_is_refused(config, tmp_path, key):
    (tmp_path / "file").touch()
    set_keys(config, {key: str(tmp_path / "file" / "below")})
    (violation,) = rules.violations(config)
    assert violation.key == key
    assert str(tmp_path / "file") in violation.mend
    set_keys(config, {key: ""})
    assert [v.key for v in rules.violations(config)] == [key]


def test_the_probe_of_a_directory_leaves_nothing_behind(config, tmp_path):
    set_keys(config, {"paths.root": str(tmp_path / "new" / "runs")})
    assert rules.violations(config) == []
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_is_needed_only_where_it_is_asked_for_on_this_machine(config):
    here = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    set_keys(config, {"cluster.device": Device.cuda})
    assert [v.key for v in rules.violations(config)] == ([] if here else ["cluster.device"])


def test_an_evaluation_ignores_the_settings_of_training_and_may_be_greedy(config):
    config.task = TaskKind.evaluate
    set_keys(config, {"algorithm.group_size": 1, "rollout.temperature": 0.0})
    assert rules.violations(config) == []
    set_keys(config, {"rollout.top_p": 0.9})
    assert [violation.key for violation in rules.violations(config)] == ["rollout.top_p"]


def test_a_report_needs_only_a_directory_that_it_can_write_into(config, tmp_path):
    config.task = TaskKind.report
    set_keys(config, {"model.path": "./nowhere", "eval.tasks": 0, "root": str(tmp_path)})
    assert rules.violations(config) == []
    config.root = ""
    assert [violation.key for violation in rules.violations(config)] == ["root"]
    config.root = None
    config.paths.root = str(tmp_path / "nowhere")
    (violation,) = rules.violations(config)
    assert (violation.key, violation.given) == ("paths.root", str(tmp_path / "nowhere"))
    config.root = str(tmp_path / "neither")
    assert [violation.key for violation in rules.violations(config)] == ["root"]
    config.root = "/proc/self"
    (violation,) = rules.violations(config)
    assert "cannot be written" in violation.mend


def test_playing_ignores_the_settings_of_training_and_has_its_own(config):
    config.task = TaskKind.play
    set_keys(config, {"algorithm.group_size": 1, "rollout.temperature": 0.0})
    assert rules.violations(config) == []
    set_keys(config, {"play.seed": -1, "play.delay_s": float("nan")})
    assert [violation.key for violation in rules.violations(config)] == [
        "play.seed",
        "play.delay_s",
    ]


@pytest.fixture
def preparation(config: Config) -> Config:
    config.task = TaskKind.sft
    return config


def test_the_preparation_needs_no_model_and_no_training_settings(preparation):
    set_keys(preparation, {"model.path": "./nowhere", "algorithm.group_size": 1})
    assert rules.violations(preparation) == []


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"sft.env_id": "maze_2d/esay"}, "sft.env_id", "Did you mean maze_2d/easy?"),
        ({"sft.action_format": "tupel"}, "sft.action_format", "Did you mean tuple?"),
        ({"sft.prompt_role": "assistant"}, "sft.prompt_role", "system"),
        ({"sft.env_id": "maze_2d/hard"}, "sft.model.image_side", "sft.model.image_side=176"),
        ({"sft.model.vision_heads": 5}, "sft.model.vision_width", "sft.model.vision_width=130"),
        ({"sft.model.text_kv_heads": 3}, "sft.model.text_heads", "text_kv_heads=3"),
        ({"sft.model.deepstack_levels": [6]}, "sft.model.deepstack_levels", "0..5"),
        ({"sft.model.deepstack_levels": [1, 2, 3]}, "sft.model.deepstack_levels", "at most"),
        ({"sft.noise.step_back": 0.6}, "sft.noise.step_back", "together 1.19"),
        ({"sft.situations.at_target": 0.95}, "sft.situations.at_target", "shares of one draw"),
        ({"sft.situations.refused": 0.9}, "sft.situations.refused", "shares of one draw"),
        ({"sft.measure.other_first_seed": 63}, "sft.measure.other_first_seed", "0..63"),
        ({"sft.blend_probes": 0}, "sft.blend_probes", "1 or more"),
        ({"sft.vision.examples": -1}, "sft.vision.examples", "0 or more"),
        ({"sft.clean.examples": 0}, "sft.clean.examples", "1 or more"),
        ({"sft.clean.learning_rate": 0.0}, "sft.clean.learning_rate", "more than 0"),
        ({"sft.target_solve_rate": 0.0}, "sft.target_solve_rate", "at most 1"),
        ({"paths.root": "/dev/null/runs"}, "paths.root", "/dev/null"),
        ({"seed": -1}, "seed", "0 to 4294967295"),
    ],
)
def test_a_broken_rule_of_the_preparation_is_the_only_complaint(preparation, changes, key, words):
    (violation,) = rules.violations(set_keys(preparation, changes))
    assert violation.key == key
    assert words in str(violation)

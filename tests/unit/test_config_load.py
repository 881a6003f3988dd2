"""Composition, types, and what identifies a run."""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from support.configs import model_directory, set_keys
from wayfinder.choices import LossKind
from wayfinder.config import identity, load
from wayfinder.config.identity import (
    config_diff,
    config_hash,
    determining,
    determining_diff,
    run_name,
    to_dict,
)
from wayfinder.config.keys import all_keys
from wayfinder.config.load import (
    check_command,
    compose,
    compose_unchecked,
    from_dict,
    load_config,
)
from wayfinder.config.schema import Config, TaskKind
from wayfinder.errors import ConfigError


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("load")
    model = model_directory(root / "model")
    return compose(["+experiment=maze_easy", f"model.path={model}", f"paths.root={root}/runs"])


@pytest.fixture
def config(valid: Config) -> Config:
    return copy.deepcopy(valid)


def _loaded(overrides: list[str], tmp_path: Path) -> Config:
    return compose([*overrides, f"model.path={model_directory(tmp_path / 'model')}"])


def test_a_composed_config_is_plain_typed_objects(config):
    assert type(config) is Config
    assert config.algorithm.loss is LossKind.ppo_clip
    assert type(config.model.lora.targets) is list
    assert (config.episodes_per_step, config.history) == (128, 1)


@pytest.mark.parametrize(
    ("text", "value", "turns"), [("full", "full", None), ("4", 4, 4), ("'4'", 4, 4), ("1", 1, 1)]
)
def test_history_is_full_or_a_number_however_it_is_quoted(tmp_path, text, value, turns):
    config = _loaded([f"env.history={text}"], tmp_path)
    assert (config.env.history, config.history) == (value, turns)
    assert type(config.env.history) is type(value)


NOTATIONS = {
    "lr": "1e-5",
    "beta1": "1.0e-5",
    "beta2": "0.00001",
    "eps": "'1e-5'",
    "weight_decay": "1E-5",
    "max_grad_norm": "+1e-05",
}


def test_a_number_is_the_same_from_the_command_line_and_from_a_file(tmp_path):
    (tmp_path / "experiment").mkdir()
    lines = [f"    {name}: {text}" for name, text in NOTATIONS.items()]
    (tmp_path / "experiment" / "notations.yaml").write_text(
        "\n".join(["# @package _global_", "algorithm:", "  optimizer:", *lines])
    )
    for overrides in (
        [f"algorithm.optimizer.{name}={text}" for name, text in NOTATIONS.items()],
        ["+experiment=notations", f"hydra.searchpath=[file://{tmp_path}]"],
    ):
        optimizer = compose_unchecked(overrides).algorithm.optimizer
        for name in NOTATIONS:
            assert type(optimizer[name]) is float
            assert optimizer[name] == 1e-5, (name, overrides)


def test_values_that_are_missing_are_named_all_at_once():
    cfg = compose_unchecked([])
    OmegaConf.update(cfg, "model.path", "???")
    OmegaConf.update(cfg, "seed", "???")
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*model\.path=.*seed="):
        load_config(cfg)


@pytest.mark.parametrize("value", ["${nope}/x", "${oc.env:WAYFINDER_IS_NOT_SET}/x"])
def test_what_refers_to_nothing_is_named(value):
    cfg = compose_unchecked([])
    OmegaConf.update(cfg, "paths.root", value)
    with pytest.raises(ConfigError) as error:
        load_config(cfg)
    assert f"paths.root={value}: expected a value" in str(error.value)
    assert "nope" in str(error.value) or "WAYFINDER_IS_NOT_SET" in str(error.value)


def test_every_key_has_a_value_in_the_yaml_files():
    assert OmegaConf.missing_keys(compose_unchecked([])) == set()


# --- the command line


WRONG = [
    ("algorithm.grup_size=4", "Did you mean algorithm.group_size?"),
    ("+algorithm.clip_hihg=4", "Did you mean algorithm.clip_high?"),
    ("lr=1e-4", "schema.py"),
    ("model.lora.use_dora=true", "cannot serve DoRA"),
    ("algorithm.group_size=many", "expected a whole number"),
    ("algorithm.tasks_per_step=4.5", "expected a whole number"),
    ("algorithm.mini_batches=null", "expected a whole number"),
    ("algorithm.optimizer.lr=fast", "expected a number"),
    ("algorithm.dual_clip=x", "expected a number or null"),
    ("algorithm.loss=ppo", "Set algorithm.loss to one of ppo_clip"),
    ("algorithm.advantage=gpro", "Did you mean grpo?"),
    ("algorithm.mismatch={alarm:1e-3,halt:1}", "keys of its own"),
    ("model.lora.targets=q_proj", "a list"),
    ("algorithm=grppo", "Did you mean grpo?"),
    ("+rollout=vllm", "Write rollout=vllm"),
    ("+debug=smoek", "Did you mean smoke?"),
    ("experiment=maze_easy", "Write +experiment=maze_easy"),
    # Relations, of the overrides that can be composed.
    ("env.max_turns=0", "expected 1 or more"),
    ("rollout.top_p=0.9", "Set rollout.top_p=1.0"),
]


@pytest.fixture(scope="module")
def refusal() -> str:
    with pytest.raises(ConfigError) as error:
        check_command([override for override, _ in WRONG])
    return str(error.value)


@pytest.mark.parametrize(("override", "words"), WRONG)
def test_every_wrong_override_is_refused_at_once_with_its_mend(refusal, override, words):
    key = override.lstrip("+").partition("=")[0]
    lines = [line for line in refusal.splitlines() if line.startswith(f"  - {key}=")]
    assert words in "".join(lines), refusal


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-m", "algorithm.group_size=4,many,8"], "algorithm.group_size=many: expected a whole"),
        (["seed=1", "steps=3", "seed=2"], "seed=1 and 2: expected one value. Give seed once."),
        (["+debug=smoke", "+experiment=maze_easy"], "debug=smoke: expected it behind"),
        (["-m", "+sweep=kl,history"], "sweep=kl,history: expected one sweep"),
        (["-m", "algorithm=glob(zz*)"], r"algorithm=glob\(zz\*\): expected one of cispo"),
        (["-m", "algorithm.kl_coef=interval(0, 1)"], "expected values to try one by one"),
        (["~seed"], "seed=.*expected a value"),
        (["~model"], "model=.*Leave ~model out"),
        (["algorithm.group_size=[4"], r"expected what Hydra reads.*'algorithm.group_size=\"\[4\"'"),
        (["paths.root=a=b"], r"paths\.root=a=b: expected what Hydra reads"),
        (["seed"], "seed=: .*Write key=value"),
    ],
)
def test_what_is_wrong_with_a_whole_command_is_refused(arguments, line):
    with pytest.raises(ConfigError, match=line):
        check_command(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["+experiment=maze_easy", "+debug=smoke"],
        [
            "-m",
            "+experiment=maze_easy",
            "algorithm.group_size=4,8,16",
            "model.lora.rank=8,32",
            "algorithm.kl_coef=0,0.001",
        ],
        ["-m", "+experiment=maze_easy", "+sweep=kl", "seed=range(3)"],
        ["-m", "algorithm=glob(*)", "hydra.sweeper.max_batch_size=1"],
        ["algorithm.optimizer={lr:1e-4,beta1:0.8}", "model.lora.targets=[q_proj]"],
        ["paths.root=/somewhere/else", "model.adapter=null", "env.history=4"],
        ["--cfg", "job", "algorithm.grup_size=4"],
        ["-sc", "query=python run.py algorithm.grup"],
    ],
)
def test_what_hydra_can_compose_or_explain_itself_is_left_to_it(arguments):
    check_command(arguments)


@pytest.mark.parametrize("override", ["+sweep=optuna", "hydra/sweeper=optuna"])
def test_a_sweeper_that_is_not_installed_is_named_with_its_requirements(override, monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"=optuna: .*requirements-sweeps\.txt"):
        check_command(["-m", "+experiment=maze_easy", override])
    monkeypatch.setattr(load, "find_spec", lambda name: name)
    check_command(["-m", "+experiment=maze_easy", override, "algorithm.kl_coef=interval(0, 1)"])


# --- records


def test_a_config_survives_json(config):
    record = json.loads(json.dumps(to_dict(config)))
    assert record == to_dict(config)
    assert type(to_dict(config)["algorithm"]["loss"]) is str
    assert from_dict(record) == config


def test_a_record_of_another_version_is_refused(config):
    record = to_dict(config)
    record["algorithm"]["retired_key"] = 1
    with pytest.raises(ConfigError, match="retired_key"):
        from_dict(record)
    del record["algorithm"]["retired_key"], record["algorithm"]["loss"]
    with pytest.raises(ConfigError, match=r"algorithm\.loss"):
        from_dict(record)
    record["algorithm"]["loss"] = "retired_loss"
    with pytest.raises(ConfigError, match="retired_loss"):
        from_dict(record)


def test_a_diff_names_every_key_that_differs():
    assert config_diff(
        {"a": {"b": 1, "c": [1, 2]}, "same": "x", "gone": None},
        {"a": {"b": 2, "c": [1]}, "same": "x", "new": True},
    ) == [
        "a.b: 1 -> 2",
        "a.c: [1, 2] -> [1]",
        "gone: null -> (absent)",
        "new: (absent) -> true",
    ]


# --- what makes two runs the same


def test_the_tables_of_keys_name_keys_that_exist():
    unused = itertools.chain.from_iterable(identity._UNUSED.values())
    names = {*identity.NOT_IN_HASH, *identity.NOT_IN_NAME, *unused} - {"sweep", "hydra"}
    assert names - set(all_keys()) == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1),
        ("steps", 21),
        ("model.path", "org/other"),
        ("model.lora.rank", 8),
        ("env.history", "full"),
        ("algorithm.group_size", 4),
        ("algorithm.optimizer.lr", 1e-4),
        ("algorithm.filter", "keep"),
        ("rollout.temperature", 1.0),
        ("rollout.schedule", "free"),
        ("eval.tasks", 32),
    ],
)
def test_a_key_that_determines_the_result_changes_the_hash(config, key, value):
    before = copy.deepcopy(config)
    set_keys(config, {key: value})
    assert config_hash(config) != config_hash(before)
    assert [line.split(":")[0] for line in determining_diff(to_dict(before), to_dict(config))] == [
        key
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("paths.root", "/elsewhere"),
        ("run.on_existing", "fail"),
        ("run.name", "mine"),
        ("tracking.wandb.mode", "disabled"),
        ("tracking.console", False),
        ("sync.dir", "/elsewhere"),
        ("checkpoint.interval", 5),
        ("cluster.slots", 2),
        ("cluster.step_timeout_s", 1.0),
        ("cluster.max_restarts", 9),
        ("checkpoint.every_minutes", 5.0),
        ("algorithm.mismatch.stop", 1.0),
        ("algorithm.micro_batch_tokens", 1),
        ("model.name", "other"),
        ("experiment", "other"),
        ("sft.env_id", "maze_2d/hard"),
        ("root", "/elsewhere"),
        ("report.compare", ["a", "b"]),
        ("play.seed", 1),
    ],
)
def test_a_key_that_does_not_leaves_the_hash_alone(config, key, value):
    before = config_hash(config)
    assert config_hash(set_keys(config, {key: value})) == before


def test_a_start_below_the_records_moves_with_them(config):
    hashes = set()
    for root in ("outputs", "/data/runs"):
        set_keys(config, {"paths.root": root, "model.path": f"{root}/maze_hard_sft/seed-0/model"})
        hashes.add(config_hash(config))
    assert len(hashes) == 1
    set_keys(config, {"model.path": "/data/runs/maze_hard_sft/seed-1/model"})
    assert config_hash(config) not in hashes


def test_the_hash_of_a_task_covers_what_that_task_uses(config):
    config.task = TaskKind.sft
    keys = set(determining(to_dict(config)))
    assert {key.split(".")[0] for key in keys} == {"task", "seed", "sft"}
    config.task = TaskKind.evaluate
    keys = {key.split(".")[0] for key in determining(to_dict(config))}
    assert keys == {"task", "seed", "model", "env", "rollout", "eval"}


# --- names of run directories

PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


def _check(name: str) -> str:
    parts = name.split("/")
    assert len(parts) == 2
    assert all(PART.fullmatch(part) for part in parts), name
    return name


def test_a_run_is_named_by_experiment_swept_keys_and_seed():
    overrides = ["+experiment=maze_easy", "model.lora.rank=8", "algorithm.group_size=4", "seed=0"]
    assert run_name("maze_easy", overrides, 0) == (
        "maze_easy/algorithm.group_size-4_model.lora.rank-8_seed-0"
    )
    assert run_name("maze_easy", overrides[::-1], 0) == run_name("maze_easy", overrides, 0)
    assert run_name("maze_easy", ["+experiment=maze_easy"], 3) == "maze_easy/seed-3"


def test_one_value_has_one_name():
    names = {run_name("e", [f"algorithm.optimizer.lr={text}"], 0) for text in ("1e-3", "0.001")}
    assert names == {"e/algorithm.optimizer.lr-0.001_seed-0"}
    assert run_name("e", ["rollout.top_k=-1"], 0) == "e/rollout.top_k--1_seed-0"
    assert run_name("e", ["model=qwen3_vl_8b"], 0) == "e/model-qwen3_vl_8b_seed-0"


def test_where_records_go_does_not_name_a_run_but_a_debug_mode_does():
    elsewhere = ["paths.root=/a b", "run.on_existing=fail", "tracking=none", "sync.dir=/c"]
    assert run_name("e", [*elsewhere, "+sweep=kl", "hydra.verbose=true"], 0) == "e/seed-0"
    assert run_name("e", ["+debug=smoke"], 0) == "e/debug-smoke_seed-0"


def test_every_job_of_a_grid_has_a_name_of_its_own():
    grid = itertools.product((4, 8, 16), (8, 32), ("0", "0.001"), (0, 1))
    names = {
        _check(
            run_name(
                "maze_easy",
                [
                    "+experiment=maze_easy",
                    f"algorithm.group_size={size}",
                    f"model.lora.rank={rank}",
                    f"algorithm.kl_coef={kl}",
                    f"seed={seed}",
                    "model.lora.targets=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]",
                    "rollout.max_num_batched_tokens=8192",
                ],
                seed,
            )
        )
        for size, rank, kl, seed in grid
    }
    assert len(names) == 24


TEXTS = st.text(
    st.sampled_from("ab01._-/=,:[]{}%|#'\"+ \t") | st.characters(codec="utf-8"), max_size=60
).map(lambda text: text.replace("\0", ""))


@given(st.lists(TEXTS, min_size=1, max_size=8), st.integers(0, 10**9))
def test_a_name_never_needs_quoting_whatever_the_values_are(values, seed):
    overrides = [f"group.key_{index}={value}" for index, value in enumerate(values)]
    name = _check(run_name("maze_easy", overrides, seed))
    assert name.endswith(f"seed-{seed}")


@given(
    st.lists(TEXTS, min_size=2, max_size=2),
    st.lists(TEXTS, min_size=2, max_size=2),
)
@example(["x_c-y", "z"], ["x", "y_c-z"])
@example(["a/b", "1"], ["a b", "1"])
def test_two_values_of_the_same_keys_have_two_names(one, two):
    def meaning(values):
        return [identity._canonical(value) for value in values]

    names = [run_name("e", [f"a_b={x}", f"c={y}"], 0) for x, y in (one, two)]
    assert (names[0] == names[1]) == (meaning(one) == meaning(two))

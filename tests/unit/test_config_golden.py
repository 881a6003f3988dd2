"""The files of `conf/`: what they compose to, and what they may contain.

After a change that is meant: `make golden`, and read the diff.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from support.configs import model_directory
from wayfinder.config.identity import run_name
from wayfinder.config.keys import all_keys
from wayfinder.config.load import ADDED_GROUPS, CONF_DIR, compose_unchecked, load_config

GOLDEN = Path(__file__).parents[1] / "golden" / "configs"
HYDRA_FILES = CONF_DIR / "hydra"


def _options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml"))


PLAIN_GROUPS = sorted(
    folder.name
    for folder in CONF_DIR.iterdir()
    if folder.is_dir() and folder != HYDRA_FILES and folder.name not in ADDED_GROUPS
)
# The sweep of the Optuna plugin searches; the others are grids.
GRIDS = [option for option in _options("sweep") if option != "optuna"]
ADDED = [(g, o) for g in ("experiment", "debug") for o in _options(g)]


@cache
def _composed(*overrides: str) -> DictConfig:
    return compose_unchecked(overrides)


def _values(group: str, option: str) -> dict[str, Any]:
    return yaml.safe_load((CONF_DIR / group / f"{option}.yaml").read_text()) or {}


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _group_choices(group: str, option: str) -> list[tuple[str, str]]:
    """The `override /group: option` entries of a file's defaults list."""
    entries = _values(group, option).get("defaults", [])
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return [(key.removeprefix("override /"), choice) for key, choice in pairs]


@pytest.mark.parametrize("experiment", _options("experiment"))
def test_an_experiment_composes_to_its_golden_file(experiment, update_golden):
    cfg = _composed(f"+experiment={experiment}")
    used = [key for key in cfg if key not in ("sft", "play") or str(cfg.task) == key]
    composed = OmegaConf.to_yaml(OmegaConf.masked_copy(cfg, used), resolve=True)
    file = GOLDEN / f"{experiment}.yaml"
    if update_golden:
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(composed)
    assert file.exists(), f"{file} is missing: run `make golden`"
    assert composed == file.read_text(), "conf/ has changed: run `make golden`, read the diff"


def test_there_is_no_golden_file_without_an_experiment():
    assert sorted(file.stem for file in GOLDEN.glob("*.yaml")) == _options("experiment")


# One composition takes options of many groups: as many rows as the largest group has options.
ROWS = [
    [choice for choice in row if choice]
    for row in itertools.zip_longest(
        *([f"{group}={option}" for option in _options(group)] for group in PLAIN_GROUPS)
    )
]


@pytest.mark.parametrize("overrides", [*ROWS, *([f"+{g}={o}"] for g, o in ADDED)], ids=" ".join)
def test_every_option_can_run_where_its_directories_and_devices_are(overrides, tmp_path):
    cfg = _composed(*overrides).copy()
    cfg.model.path = str(model_directory(tmp_path / "model"))
    cfg.paths.root = str(tmp_path)
    cfg.sync.dir = None
    cfg.cluster.address = "auto"
    load_config(cfg)


@pytest.mark.parametrize(("group", "option"), ADDED)
def test_a_file_holds_only_its_difference(group, option):
    # Experiments differ from the base, debug modes from the main job.
    ground = [] if group == "experiment" else ["+experiment=maze_easy"]
    choices = _group_choices(group, option)
    for chosen, choice in choices:
        assert choice != _default_of(chosen), f"override /{chosen}: {choice} is the default"
    before = _composed(*ground, *(f"{chosen}={choice}" for chosen, choice in choices))
    after = _composed(*ground, f"+{group}={option}")
    values = {key: value for key, value in _values(group, option).items() if key != "defaults"}
    for key, value in _leaves(values):
        value = OmegaConf.create({"paths": {"root": after.paths.root}, "own": value}).own
        given = OmegaConf.select(after, key)
        assert given == value, f"{key}={value} has no effect"
        assert given != OmegaConf.select(before, key), f"{key}={value} is the value already"


def _default_of(group: str) -> str | None:
    entries = yaml.safe_load((CONF_DIR / "config.yaml").read_text())["defaults"]
    return next((e[group] for e in entries if isinstance(e, dict) and group in e), None)


@pytest.mark.parametrize(("group", "option"), ADDED)
def test_a_file_leaves_hydra_alone(group, option):
    # A launcher, sweeper or logging choice inside a swept experiment is ignored in silence.
    text = (CONF_DIR / group / f"{option}.yaml").read_text()
    assert "override /hydra" not in text
    assert "override hydra" not in text
    assert "hydra" not in _values(group, option)


@pytest.mark.parametrize("group", ADDED_GROUPS)
def test_a_file_says_how_it_is_run_and_what_it_asks(group):
    for option in _options(group):
        lines = (CONF_DIR / group / f"{option}.yaml").read_text().splitlines()
        assert lines[0] == "# @package _global_"
        assert lines[1].startswith("# python run.py ")
        assert f"+{group}={option}" in lines[1].split()
        assert "?" in lines[2]


@pytest.mark.parametrize("option", _options("experiment"))
def test_an_experiment_is_labelled_by_its_own_name(option):
    assert _values("experiment", option)["experiment"] == option


@pytest.mark.parametrize("option", GRIDS)
def test_a_sweep_holds_parameters_alone_and_names_each_job(option):
    values = _values("sweep", option)
    assert list(values) == ["hydra"]
    assert set(values["hydra"]) == {"mode", "sweeper"}
    assert set(values["hydra"]["sweeper"]) == {"params"}
    params = values["hydra"]["sweeper"]["params"]
    assert set(params) <= set(all_keys())
    parser = OverridesParser.create()
    grid = itertools.product(
        *(parser.parse_override(f"{k}={v}").sweep_string_iterator() for k, v in params.items())
    )
    jobs = [[f"{k}={v}" for k, v in zip(params, row, strict=True)] for row in grid]
    seeds = [int(dict(j.split("=") for j in job).get("seed", 0)) for job in jobs]
    names = {run_name("e", job, seed) for job, seed in zip(jobs, seeds, strict=True)}
    assert len(names) == len(jobs) > 1


@pytest.mark.parametrize("option", GRIDS)
def test_each_value_of_a_sweep_can_run(option, tmp_path):
    given = [f"model.path={model_directory(tmp_path / 'model')}", f"paths.root={tmp_path}"]
    params = _values("sweep", option)["hydra"]["sweeper"]["params"]
    for key, values in params.items():
        for value in values.split(","):
            load_config(_composed("+experiment=maze_easy", f"{key}={value}", *given))


def test_the_search_space_can_run_and_the_search_repeats_itself(tmp_path):
    values = _values("sweep", "optuna")
    sweeper = values["hydra"]["sweeper"]
    assert values["defaults"] == [{"override /hydra/sweeper": "optuna"}]
    assert set(values["hydra"]) == {"mode", "sweeper"}
    assert sweeper["direction"] == "maximize"
    assert isinstance(sweeper["sampler"]["seed"], int)
    given = [f"model.path={model_directory(tmp_path / 'model')}", f"paths.root={tmp_path}"]
    assert set(sweeper["params"]) <= set(all_keys())
    for key, value in sweeper["params"].items():
        override = OverridesParser.create().parse_override(f"{key}={value}")
        space = override.value()
        ends = (
            override.sweep_string_iterator()
            if override.is_discrete_sweep()
            else (space.start, space.end)
        )
        for end in ends:
            load_config(_composed("+experiment=maze_easy", f"{key}={end}", *given))


def test_the_launcher_is_composed_by_its_short_name():
    done = _values("hydra/launcher", "side_by_side")
    assert done["_target_"] == "hydra_plugins.wayfinder_launcher.SideBySideLauncher"
    assert done["n_jobs"] > 1


def test_yaml_comments_stand_on_lines_of_their_own():
    for file in CONF_DIR.rglob("*.yaml"):
        if file.is_relative_to(HYDRA_FILES):
            continue
        for line in file.read_text().splitlines():
            assert not re.search(r"\S\s+#", line) or line.startswith(("#", " #")), (file, line)


def test_the_three_published_spellings_compose():
    assert _composed("+experiment=maze_easy").model.name == "tiny"
    grid = ["algorithm.group_size=4", "model.lora.rank=8", "algorithm.kl_coef=0.001"]
    swept = _composed("+experiment=maze_easy", *grid)
    assert (swept.algorithm.group_size, swept.model.lora.rank) == (4, 8)
    reference = _composed("+experiment=maze_easy_hyperpod")
    assert reference.algorithm.tasks_per_step % reference.cluster.slots == 0

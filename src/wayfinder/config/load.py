"""From the command line and `conf/` to the typed, checked `Config`.

The only module besides `run.py` and the launcher that imports Hydra and OmegaConf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from wayfinder.config import rules
from wayfinder.config.identity import config_diff, config_hash, run_name, to_dict
from wayfinder.config.keys import Key, all_keys
from wayfinder.config.places import REPOSITORY
from wayfinder.config.schema import Config
from wayfinder.config.violation import Violation, closest, report
from wayfinder.errors import ConfigError

__all__ = [
    "check_command",
    "compose",
    "compose_unchecked",
    "config_diff",
    "config_hash",
    "from_dict",
    "load_config",
    "register_schema",
    "run_name",
    "to_dict",
]

CONF_DIR = REPOSITORY / "conf"
ADDED_GROUPS = ("experiment", "debug", "sweep")
"""Groups without an entry in the defaults list: the command line adds them with a plus sign."""

# Flags that leave the command a run; any other one shows or completes something.
_RUN_FLAGS = ("-m", "--multirun", "-r", "--run")
_OPTUNA = "hydra_plugins.hydra_optuna_sweeper"
_REFUSED = {
    "model.lora.use_dora": "the engine cannot serve DoRA",
    "model.lora.dropout": "the engine samples without dropout, so the trainer may not use it",
}


def register_schema() -> None:
    """Make `Config` known to Hydra as `schema`, the first entry of every composition."""
    ConfigStore.instance().store(name="schema", node=Config)


def load_config(cfg: DictConfig) -> Config:
    """The typed configuration; raises one `ConfigError` that lists everything that is wrong."""
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        if missing:
            raise ConfigError(
                report(Violation(key, "a value", "???", f"Set {key}=<value>") for key in missing)
            )
        config = _typed(cfg)
    except InterpolationResolutionError as error:
        key, reason = error.full_key, str(error).splitlines()[0]
        given = OmegaConf.to_container(cfg, resolve=False)
        for part in str(key).split("."):
            given = given.get(part) if isinstance(given, dict) else None
        mend = f"{reason}: set {key} to a value, or define what it refers to"
        raise ConfigError(report([Violation(key, "a value", given, mend)])) from error
    rules.check(config)
    return config


def compose(overrides: Sequence[str]) -> Config:
    """The checked configuration that `python run.py <overrides>` would have."""
    return load_config(compose_unchecked(overrides))


def compose_unchecked(overrides: Sequence[str]) -> DictConfig:
    """The same before its rules are checked: also for values that cannot run on this machine."""
    register_schema()
    with initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        return hydra_compose(config_name="config", overrides=list(overrides))


def from_dict(data: Mapping[str, Any]) -> Config:
    """The configuration that `to_dict` wrote. Raises `ConfigError` if it does not fit the schema,
    as with a record of another version. Rules are not checked: its paths may be gone."""
    try:
        cfg = OmegaConf.merge(OmegaConf.structured(Config), dict(data))
        missing = sorted(OmegaConf.missing_keys(cfg))
        if missing:
            raise ConfigError(f"the recorded configuration lacks {', '.join(missing)}")
        return _typed(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the recorded configuration does not fit this version: {str(error).splitlines()[0]}"
        ) from error


def check_command(arguments: Sequence[str]) -> None:
    """Refuse overrides that Hydra could not compose, all of them at once and each with its mend,
    together with the rules that the rest of the command breaks.

    Hydra itself would stop at the first. Says nothing for commands that do not run anything.
    """
    texts = [text for text in arguments if not text.startswith("-")]
    if any(text.startswith("-") and text not in _RUN_FLAGS for text in arguments):
        return
    overrides, found = _parsed(texts)
    groups = _group_options(CONF_DIR)
    good: list[str] = []
    for override in overrides:
        bad = list(_bad_override(override, groups))
        found += bad
        if not bad:
            good.append(override.input_line)
    found += _missing_plugin(overrides)
    found += _intervals_are_searched(overrides)
    found += _repeated(overrides)
    found += _debug_before_experiment(overrides)
    if found:
        raise ConfigError(report(found + _broken_rules(good)))


def _parsed(texts: Sequence[str]) -> tuple[list[Override], list[Violation]]:
    parser, overrides, found = OverridesParser.create(), [], []
    for text in texts:
        try:
            overrides.append(parser.parse_override(text))
        except HydraException:
            name, _, value = text.partition("=")
            mend = f"Quote it for Hydra and the shell: '{name}=\"{value}\"'"
            if not value:
                mend = "Write key=value"
            found.append(Violation(name, "what Hydra reads as key=value", value, mend))
    return overrides, found


def _typed(cfg: DictConfig) -> Config:
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Config), "the composition did not start from the schema"
    history = config.env.history
    if isinstance(history, str) and history.isdecimal():
        config.env.history = int(history)
    return config


def _broken_rules(overrides: list[str]) -> list[Violation]:
    """The rules that a command breaks besides the overrides that were taken out of it."""
    try:
        cfg = compose_unchecked(overrides)
    except HydraException:
        # A sweep, or a mistake that only Hydra sees: reported once the others are mended.
        return []
    return [] if OmegaConf.missing_keys(cfg) else rules.violations(_typed(cfg))


def _group_options(directory: Path) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for file in sorted(directory.glob("*/*.yaml")):
        groups.setdefault(file.parent.name, []).append(file.stem)
    return groups


def _bad_override(override: Override, groups: Mapping[str, list[str]]) -> Iterator[Violation]:
    name, given = override.key_or_group, _given(override)
    if name.startswith(("hydra.", "hydra/")):
        return
    if override.is_delete():
        yield Violation(name, "a value, as every key has one", "(none)", f"Leave ~{name} out")
    elif name in groups:
        options = groups[name]
        expected = f"one of {', '.join(options)}"
        if name == "sweep" and override.is_sweep_override():
            yield Violation(name, "one sweep", given, "Run one after the other")
        is_glob = override.value_type == ValueType.GLOB_CHOICE_SWEEP
        if is_glob and not override.value().filter(options):
            yield Violation(name, expected, given, f"Use {expected}")
        if (name in ADDED_GROUPS) != override.is_add():
            right = f"{'+' if name in ADDED_GROUPS else ''}{name}={given}"
            yield Violation(name, f"it to be written {right}", given, f"Write {right}")
        for value in _values(override):
            if value not in options:
                yield Violation(name, expected, value, closest(value, options, f"Use {expected}"))
    elif name in (keys := all_keys()):
        expected, names = keys[name].expected, keys[name].names
        for value in _values(override):
            if not _fits(keys[name], value):
                mend = closest(value, names, f"Set {name} to {expected}")
                yield Violation(name, expected, value, mend)
    else:
        mend = closest(name, list(keys), "See src/wayfinder/config/schema.py for all keys")
        if name in _REFUSED:
            mend = f"Leave it out: {_REFUSED[name]}"
        yield Violation(name, "a key of the configuration", given, mend)


def _given(override: Override) -> str:
    return str(override.input_line).partition("=")[2]


def _values(override: Override) -> list[Any]:
    if not override.is_sweep_override():
        return [override.value()]
    # A glob over options, and sweeps without a list of values, are Hydra's and the sweeper's.
    listed = override.is_discrete_sweep() and override.value_type != ValueType.GLOB_CHOICE_SWEEP
    return list(override.sweep_iterator()) if listed else []


def _fits(key: Key, value: Any) -> bool:
    """Whether OmegaConf would take the value for this key of the schema."""
    try:
        if key.is_group:
            OmegaConf.merge(OmegaConf.structured(key.type), value)
        else:
            OmegaConf.structured(key.owner)[key.name] = value
    except (OmegaConfBaseException, ValueError):
        return False
    return True


def _repeated(overrides: Sequence[Override]) -> Iterator[Violation]:
    """In a run Hydra merges two values of one key, in a multirun the second replaces the first."""
    given: dict[str, list[str]] = {}
    for override in overrides:
        given.setdefault(override.key_or_group, []).append(_given(override))
    for name, values in given.items():
        if len(values) > 1:
            yield Violation(name, "one value", " and ".join(values), f"Give {name} once")


def _missing_plugin(overrides: Sequence[Override]) -> Iterator[Violation]:
    for override in overrides:
        name, given = override.key_or_group, _given(override)
        if name in ("sweep", "hydra/sweeper") and given == "optuna" and not find_spec(_OPTUNA):
            yield Violation(
                name,
                "hydra-optuna-sweeper to be installed",
                given,
                "Install it: pip install -r requirements-sweeps.txt",
            )


def _intervals_are_searched(overrides: Sequence[Override]) -> Iterator[Violation]:
    if any(_given(override) == "optuna" for override in overrides):
        return
    for override in overrides:
        name = override.key_or_group
        if override.is_interval_sweep() and not name.startswith("hydra"):
            mend = "List the values, or search with +sweep=optuna"
            yield Violation(name, "values to try one by one", _given(override), mend)


def _debug_before_experiment(overrides: Sequence[Override]) -> Iterator[Violation]:
    names = [override.key_or_group for override in overrides]
    if "debug" in names and "experiment" in names[names.index("debug") :]:
        debug = _given(overrides[names.index("debug")])
        yield Violation(
            "debug",
            "it behind the experiment, whose values win otherwise",
            debug,
            f"Write +experiment=... +debug={debug}",
        )

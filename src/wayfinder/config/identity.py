"""What identifies a run: its configuration as plain values, their hash, and its directory name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

from wayfinder.config.schema import Config, TaskKind

LABELS = ("experiment", "model.name", "algorithm.name")
"""Names for people: they are recorded and change nothing."""

PLACES = (
    "paths",
    "run",
    "tracking",
    "sync.dir",
    "sync.keep",
    "checkpoint",
    "cluster.address",
    "root",
    "report",
)
"""Where files and figures go or come from, and how many of them are kept."""

LIMITS = (
    "algorithm.mismatch",
    "sync.probe_tolerance",
    "sync.retry_s",
    "env.step_timeout_s",
    "rollout.request_timeout_s",
    "cluster.start_timeout_s",
    "cluster.step_timeout_s",
    "cluster.max_restarts",
)
"""When a run gives up. They decide whether it goes on, not what it computes."""

RESOURCES = (
    "cluster",
    "rollout.gpu_memory_utilization",
    "rollout.kv_cache_gib",
    "algorithm.micro_batch_tokens",
)
"""On what it runs: results are equal up to the order of sums, and a run may go on elsewhere."""

NOT_IN_HASH = LABELS + PLACES + LIMITS + RESOURCES
NOT_IN_NAME = ("experiment", "sweep", "seed", "hydra", *PLACES, *LIMITS)

# What the result of a task does not depend on, beyond the tables above.
_UNUSED: dict[TaskKind, tuple[str, ...]] = {
    TaskKind.train: ("sft", "play"),
    TaskKind.evaluate: ("sft", "play", "algorithm", "steps"),
    TaskKind.sft: ("model", "env", "algorithm", "rollout", "sync", "eval", "play", "steps"),
    TaskKind.play: ("sft", "algorithm", "steps"),
    TaskKind.report: (
        *("model", "env", "algorithm", "rollout", "sync", "eval", "play", "steps", "sft"),
    ),
}
_LONGEST_NAME = 120
_LONGEST_VALUE = 40
_PLAIN = re.compile(r"[A-Za-z0-9._-]+")
_TWO_FIELDS = re.compile(r"_.*-")


def to_dict(config: Config) -> dict[str, Any]:
    """Plain values that JSON can hold; `from_dict` reads them back."""
    return _plain(asdict(config))


def determining(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `to_dict` that determines the result of the task, as flat dotted keys."""
    excluded = NOT_IN_HASH + _UNUSED[TaskKind(record["task"])]
    values = {key: value for key, value in _flat(record) if not _is_below(key, excluded)}
    # A start that was made below the records is the same one wherever they lie.
    root, path = record.get("paths", {}).get("root"), values.get("model.path", "")
    if path.startswith(f"{root}/"):
        values["model.path"] = "${paths.root}" + path[len(root) :]
    return values


def config_hash(config: Config) -> str:
    """SHA-256 over `determining`: a repeated command finds its run, another one is refused."""
    values = determining(to_dict(config))
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def config_diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for every dotted key in which two (nested or flat) records differ."""
    old, new = dict(_flat(a)), dict(_flat(b))
    return [
        f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if key not in old or key not in new or old[key] != new[key]
    ]


def determining_diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """`config_diff` of the keys that make two records of `to_dict` different runs."""
    return config_diff(determining(a), determining(b))


def run_name(experiment: str, overrides: Sequence[str], seed: int) -> str:
    """`<experiment>/<key-value>_..._seed-<n>`: where a run lies below `paths.root`.

    The same overrides in another order give the same name, and values are written in one form
    (1e-3 is 0.001). Keys of `NOT_IN_NAME` do not appear: a command repeated with another place
    for its records goes on with the same run. Both parts hold letters, digits, '.', '_' and '-'
    alone and at most 120 characters, so a name never needs quoting; what does not fit is hashed.
    """
    fields = sorted(
        f"{_safe(key)}-{_safe(value)}" for key, value in changed_values(overrides).items()
    )
    label = "_".join([*fields, f"seed-{seed}"])
    if len(label) > _LONGEST_NAME:
        shown = "_".join(fields)[: _LONGEST_NAME - 40]
        label = f"{shown}.{_digest('_'.join(fields))}_seed-{seed}"
    return f"{_safe(experiment)}/{label}"


def changed_values(overrides: Sequence[str]) -> dict[str, str]:
    """Keys (or groups) and values of the overrides that make a run another one than its experiment:
    all but the seed and those of `NOT_IN_NAME`. Values are written in one form."""
    pairs = (override.partition("=") for override in overrides)
    values = {key.lstrip("+~"): _canonical(value) for key, _, value in pairs}
    return {key: value for key, value in values.items() if not _is_below(key, NOT_IN_NAME)}


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a nested record by their dotted keys."""
    return dict(_flat(record))


def _plain(value: Any) -> Any:
    """Enumerations as their values, containers copied: what a round trip through JSON gives."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_below(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _shown(record: Mapping[str, Any], key: str) -> str:
    return json.dumps(record[key]) if key in record else "(absent)"


def _canonical(value: str) -> str:
    text = re.sub(r"\s", "", value).strip("'\"")
    for number in (int, float):
        try:
            return repr(number(text))
        except ValueError:
            continue
    return text


def _safe(text: str) -> str:
    """`text` itself where it needs no quoting and cannot be read as two fields, else a digest."""
    if _PLAIN.fullmatch(text) and len(text) <= _LONGEST_VALUE and not _TWO_FIELDS.search(text):
        return text
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', text)[:20].strip('-')}.{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]

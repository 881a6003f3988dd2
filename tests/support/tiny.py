"""A random tiny Qwen3-VL: every file of a real model directory, weights that know nothing."""

from __future__ import annotations

from pathlib import Path

from wayfinder.config.sft import TinyModelConfig
from wayfinder.train.sft import tokenizer_corpus
from wayfinder.train.tiny import create_random_model

ENV_ID = "maze_2d/easy"


def make_tiny_model(path: Path) -> Path:
    """Writes the model to `path`: the shipped shape with a shallower tower."""
    config = TinyModelConfig(vision_depth=2, deepstack_levels=[1])
    create_random_model(path, config, tokenizer_corpus(ENV_ID), seed=11)
    return path

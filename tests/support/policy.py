"""The policy of the tests: a small adapter on every text linear, at the temperature of training."""

from __future__ import annotations

import torch

from wayfinder.train.model import PolicySpec, adapter_tensors, load_policy
from wayfinder.train.step import OptimizerSpec

TEMPERATURE = 0.7
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPTIMIZER = OptimizerSpec(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0)


def policy_spec(model: str, **changes) -> PolicySpec:
    values = {
        "model": model,
        "dtype": "float32",
        "attention": "sdpa",
        "gradient_checkpointing": False,
        "packing": False,
        "lora_rank": 4,
        "lora_alpha": 8,
        "rslora": False,
        "lora_targets": TARGETS,
        "adapter": None,
        "temperature": TEMPERATURE,
        "seed": 3,
    }
    return PolicySpec(**values | changes)


def nonzero_adapter(model: str, **changes) -> dict[str, torch.Tensor]:
    """Adapter tensors without the zeros that PEFT starts from, which would hide any mistake."""
    policy = load_policy(policy_spec(model, **changes), ())
    shapes = adapter_tensors(dict(policy.named_parameters()))
    generator = torch.Generator().manual_seed(11)
    return {
        name: 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in shapes.items()
    }

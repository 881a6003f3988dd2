"""Muon: momentum whose matrix updates are orthogonalised (Jordan et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

# Quintic Newton-Schulz iteration of the Muon write-up: fast toward 1, exact value not needed.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised in fp32, for the matrices inside blocks.

    An update has a root mean square of 0.2, about that of AdamW (Liu et al., 2025, arXiv
    2502.16982), so learning rates compare. `torch.optim.Muon` iterates in bfloat16, which
    processors without bf16 instructions only emulate.
    """

    def __init__(self, params: Iterable[torch.Tensor], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                update = orthogonalize(parameter.grad + group["momentum"] * momentum)
                scale = 0.2 * math.sqrt(max(parameter.shape))
                parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest (semi-)orthogonal matrix to `matrix` [rows, columns], roughly.

    Singular values end between about 0.7 and 1.2.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def hidden_matrices(named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[torch.nn.Parameter]:
    """The weights Muon is for: matrices of transformer blocks, no embeddings and no heads."""
    return [p for name, p in named if p.ndim == 2 and (".blocks." in name or ".layers." in name)]

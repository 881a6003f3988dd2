"""Log-probabilities of chosen tokens under the distribution that the engine sampled from."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from wayfinder.chat.vision import BANNED_BIAS


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, banned: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [N] of `targets` and entropies [N] under softmax((logits + bias) / temperature).

    `logits` [N, vocab] in any float type are read in float32. The bias takes the vision tokens out
    of the distribution exactly as the engine does. Raises ValueError on unequal lengths: gathering
    from the longer one would read the wrong rows in silence.
    """
    if logits.shape[0] != targets.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {targets.shape[0]} targets")
    logits = logits.float()
    if banned.numel():
        bias = torch.zeros(logits.shape[-1], device=logits.device)
        bias[banned] = BANNED_BIAS
        logits = logits + bias
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def chunked_logprobs(
    hidden: torch.Tensor,
    head: torch.nn.Module,
    targets: torch.Tensor,
    temperature: float,
    banned: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` of `head(hidden)`, `chunk` rows at a time; the backward computes them again.

    With a vocabulary of 150 thousand the logits of one micro-batch would not fit beside the model.
    """

    def part(rows: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(head(rows), wanted, temperature, banned)

    if hidden.shape[0] != targets.shape[0]:
        raise ValueError(f"{hidden.shape[0]} rows of hidden states for {targets.shape[0]} targets")
    if hidden.shape[0] <= chunk:
        return part(hidden, targets)
    pieces = [
        checkpoint(part, rows, wanted, use_reentrant=False)
        for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])

"""Per-token policy terms.

All tensors are [num_tokens]. With `r = exp(logprobs - old_logprobs)`, advantage `A` and
`clip(r) = clip(r, 1 - low, 1 + high)`:

    ppo_clip    -min(r A, clip(r) A); with dual clip c and A < 0: min(that, -c A)
                PPO, arXiv:1707.06347; low and high apart: DAPO, arXiv:2503.14476;
                dual clip: Ye et al., arXiv:1912.09729
    gspo        ppo_clip with the sequence's geometric mean ratio in place of r: arXiv:2507.18071
    cispo       -stop_gradient(clip(r)) A logprobs: MiniMax-M1, arXiv:2506.13585
    reinforce   -A logprobs: Williams 1992

A ratio beyond exp(+-20) is cut there and has no gradient, so that one token cannot make a NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wayfinder.algo.kl import exp_log_ratio


class TokenLoss(NamedTuple):
    loss: Tensor  # [num_tokens], differentiable
    ratio: Tensor  # [num_tokens], detached, before clipping
    clipped: Tensor  # bool [num_tokens]: the bound decides the token's loss


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Clipped surrogate on token ratios. `clipped` marks tokens whose gradient is cut off."""
    ratio = exp_log_ratio(logprobs - old_logprobs.detach())
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Tensor, advantages: Tensor, sequence_log_ratio: Tensor, low: float, high: float
) -> TokenLoss:
    """Clipped surrogate on the sequence ratio s = exp(mean over the sequence of the log ratios).

    `sequence_log_ratio` is that mean at each token, for the current `logprobs`; it is detached, and
    each token carries the gradient s * grad logprobs (the paper's token form). Summed with one
    weight per sequence that is the gradient of s itself, so a sequence may be split as long as the
    given mean is that of the whole. Importance weights of single tokens scale each its own token.
    """
    per_token = logprobs - logprobs.detach() + sequence_log_ratio.detach()
    return _clipped_surrogate(exp_log_ratio(per_token), advantages, low, high, None)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """Clipped ratio as a constant weight, so clipped tokens keep a gradient.

    With `clip_low=1` the weight has no floor, as published.
    """
    ratio = exp_log_ratio((logprobs - old_logprobs).detach())
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-bounded * advantages * logprobs, ratio, ratio != bounded)


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """Plain score function; `old_logprobs` only serve the reported ratio."""
    ratio = exp_log_ratio((logprobs - old_logprobs).detach())
    return TokenLoss(-advantages * logprobs, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None
) -> TokenLoss:
    bounded = ratio.clamp(1 - low, 1 + high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    gain, harm = advantages > 0, advantages < 0
    plain = ratio.detach()
    clipped = (gain & (plain > 1 + high)) | (harm & (plain < 1 - low))
    if dual_clip is not None:
        beyond = harm & (plain > dual_clip)
        loss = torch.where(beyond, -dual_clip * advantages, loss)
        clipped = clipped | beyond
    return TokenLoss(loss, plain, clipped)

"""KL divergence from the policy to the reference, estimated at sampled tokens.

With `d = log pi(a) - log ref(a)` at a token `a` sampled from the policy `pi` (J. Schulman,
"Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html):

    kind         value             gradient of the value        its expectation on policy
    k1           d                 grad log pi                  0: as a loss it does nothing
    k2           d^2 / 2           d * grad log pi              grad KL(pi || ref), exactly
    k3           exp(-d) - 1 + d   (1 - exp(-d)) * grad log pi  grad KL(ref || pi): forward KL
    k3_k2grad    value of k3       gradient of k2               grad KL(pi || ref), exactly

k1 and k3 are unbiased estimates of the value KL(pi || ref) and k3 is never negative; k2 is biased.
So `k3_k2grad` reports a good value and follows the gradient that is meant. The gradients hold where
tokens come from the current policy; no importance ratio is applied to them.

In the reward the value is a constant of the update and acts through the policy gradient:

    k1           E[k1 * grad log pi] = grad KL(pi || ref), exactly
    k2           E[k2 * grad log pi]: none of the two KL gradients
    k3           E[k3 * grad log pi] = grad KL(pi || ref) - grad KL(ref || pi)

so k1 is the kind to use there. A baseline that does not depend on the episode changes none of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wayfinder.algo.reduce import sequence_sums
from wayfinder.choices import KlKind

# exp(20) is about 5e8: whatever the true ratio, training is broken, and beyond 88 float32 would
# turn one bad token into a NaN of every gradient.
LOG_RATIO_LIMIT = 20.0


def exp_log_ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log ratio cut to +-LOG_RATIO_LIMIT; outside of it the gradient is zero."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def kl_values(logprobs: Tensor, reference_logprobs: Tensor, kind: KlKind | str) -> Tensor:
    """Per-token estimates [num_tokens] with the gradient of the table; the reference is constant.

    Raises `ValueError` if the lengths differ.
    """
    kind = KlKind(kind)
    if logprobs.shape != reference_logprobs.shape:
        raise ValueError(
            f"logprobs and reference_logprobs must have one length, not "
            f"{tuple(logprobs.shape)} and {tuple(reference_logprobs.shape)}"
        )
    difference = logprobs - reference_logprobs.detach()
    match kind:
        case KlKind.k1:
            return difference
        case KlKind.k2:
            return difference.square() / 2
        case KlKind.k3:
            return _k3(difference)
        case KlKind.k3_k2grad:
            k2 = difference.square() / 2
            return _k3(difference).detach() + (k2 - k2.detach())


def kl_in_reward(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    kl_coef: float,
    kind: KlKind | str = KlKind.k1,
) -> Tensor:
    """Penalty of each sequence, float64 [num_sequences]: subtract it from the episode's reward.

    `kl_coef` times the sum over the sequence's loss tokens, at the log-probs of the policy that
    sampled them. Of a part of the tokens it is the part of the penalty: add up.
    """
    values = kl_values(logprobs.detach(), reference_logprobs, kind)
    return kl_coef * sequence_sums(values, sequence_index, num_sequences)


def _k3(difference: Tensor) -> Tensor:
    # expm1, because exp(-d) - 1 rounds the value away where policy and reference nearly agree.
    bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-bounded) + bounded

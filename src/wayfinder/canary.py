"""What a step with learning rate 0 proves."""

from __future__ import annotations

from wayfinder.errors import InvariantError
from wayfinder.runtime.adapter_sync import Publication

# Two passes over the same tokens may add up in another order.
_CANARY_RATIO = 1e-4


def check_nothing_learnt(
    step: int, metrics: dict[str, float], before: Publication, after: Publication
) -> None:
    """With learning rate 0 every ratio is 1 and the adapter keeps its digest, or something between
    sampling and publishing works on other tokens, weights or images than it says."""
    ratio = metrics.get("train/ratio_mean", 1.0)
    if not abs(ratio - 1) <= _CANARY_RATIO or before.digest != after.digest:
        raise InvariantError(
            f"step {step} had learning rate 0, but the mean ratio is {ratio:.8f} (not 1 within "
            f"{_CANARY_RATIO}) and the adapter went from digest {before.digest[:12]} to "
            f"{after.digest[:12]} (expected no change)"
        )

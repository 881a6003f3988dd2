"""How far apart engine and trainer are on the tokens that were sampled: measured in every step."""

from __future__ import annotations

import torch
from torch import Tensor

# Turns further back than this share the last bin.
TURN_BINS = 64


class MismatchSums:
    """Sums over tokens that add up over micro-batches and ranks; maxima are kept beside them.

    Split into the first token after an image and the rest, because an error in the treatment of
    images shows on the former; and by turn, because an error in the history grows with it.
    """

    def __init__(self) -> None:
        self.count = torch.zeros(2, dtype=torch.float64)
        self.absolute = torch.zeros(2, dtype=torch.float64)
        self.ratio = torch.zeros(2, dtype=torch.float64)
        self.maximum = torch.zeros(2, dtype=torch.float64)
        self.turn_count = torch.zeros(TURN_BINS, dtype=torch.float64)
        self.turn_absolute = torch.zeros(TURN_BINS, dtype=torch.float64)

    def add(self, trainer: Tensor, engine: Tensor, after_image: Tensor, turn: Tensor) -> None:
        """All [N]: log-probs of trainer (before the update) and engine, and where they stand."""
        difference = (trainer.detach().double() - engine.double()).cpu()
        kind = after_image.cpu().long()
        absolute = difference.abs()
        self.count.index_add_(0, kind, torch.ones_like(absolute))
        self.absolute.index_add_(0, kind, absolute)
        self.ratio.index_add_(0, kind, difference.exp())
        self.maximum.scatter_reduce_(0, kind, absolute, "amax")
        bins = turn.cpu().long().clamp(0, TURN_BINS - 1)
        self.turn_count.index_add_(0, bins, torch.ones_like(absolute))
        self.turn_absolute.index_add_(0, bins, absolute)

    def merge(self, other: MismatchSums) -> None:
        for name in ("count", "absolute", "ratio", "turn_count", "turn_absolute"):
            getattr(self, name).add_(getattr(other, name))
        torch.maximum(self.maximum, other.maximum, out=self.maximum)

    def metrics(self) -> dict[str, float]:
        """Metrics under `mismatch/`; empty without any token."""
        total = float(self.count.sum())
        if not total:
            return {}
        metrics = {
            "mismatch/ratio_mean": float(self.ratio.sum()) / total,
            "mismatch/abs_logprob_diff_mean": float(self.absolute.sum()) / total,
            "mismatch/abs_logprob_diff_max": float(self.maximum.max()),
        }
        for kind, name in enumerate(("rest", "after_image")):
            if self.count[kind]:
                mean = float(self.absolute[kind] / self.count[kind])
                metrics[f"mismatch/{name}/abs_logprob_diff_mean"] = mean
                metrics[f"mismatch/{name}/abs_logprob_diff_max"] = float(self.maximum[kind])
        turns = self.turn_count.nonzero()[:, 0]
        means = self.turn_absolute[turns] / self.turn_count[turns]
        metrics["mismatch/first_turn/abs_logprob_diff_mean"] = float(means[0])
        metrics["mismatch/last_turn/abs_logprob_diff_mean"] = float(means[-1])
        return metrics

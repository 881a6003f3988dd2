"""Figures of one rollout."""

from __future__ import annotations

import numpy as np

from wayfinder.types import Episode, Outcome


def rollout_metrics(episodes: list[Episode], seconds: float) -> dict[str, float]:
    valid = [e for e in episodes if not e.outcome.is_failure]
    turns = [turn for e in episodes for turn in e.turns]
    tokens = sum(e.num_sampled_tokens for e in episodes)
    outcomes = [e.outcome for e in episodes]
    metrics = {
        "train/reward_mean": float(np.mean([e.reward for e in valid])) if valid else 0.0,
        "train/solve_rate": float(np.mean([e.success for e in valid])) if valid else 0.0,
        "train/mean_turns": len(turns) / max(1, len(episodes)),
        "train/parse_failures": float(sum(t.action is None for t in turns)),
        "throughput/episodes_per_s": len(episodes) / seconds,
        "throughput/turns_per_s": len(turns) / seconds,
        "throughput/sampled_tokens_per_s": tokens / seconds,
        "rollout/cached_tokens_per_turn": sum(t.cached_tokens for t in turns) / max(1, len(turns)),
    }
    return metrics | {f"train/outcome/{o}": float(outcomes.count(o)) for o in Outcome}

"""What evaluations can and cannot say: pass@k, confidence intervals, paired comparisons.

The unit is the task (maze), never the episode: episodes of one maze are alike, so an interval over
episodes would be too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased estimate, from n samples of one task of which c are solved, of the chance that at
    least one of k is: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Raises `ValueError` unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= num_solved <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_samples} samples, {num_solved} solved, is not defined")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def interval_of_mean(
    values: Sequence[float], seed: int = 0, level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over tasks (Efron 1979).

    Where all values are equal the bootstrap sees no spread and would claim certainty; for rates
    the Wilson interval of that many tasks stands in (values of 0 or 1 only), else the point itself.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError("an interval needs one or more values")
    if np.ptp(array) == 0:
        value = float(array[0])
        if value not in (0.0, 1.0):
            return value, value
        return wilson_interval(value * len(array), len(array))
    means = _resampled_means(array, seed, resamples)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def wilson_interval(solved: float, num: float) -> tuple[float, float]:
    """95% score interval of a rate of `num` independent trials (Wilson 1927). None: (0, 1)."""
    if num <= 0:
        return 0.0, 1.0
    rate, z = solved / num, 1.959963984540054
    scale = 1 + z * z / num
    centre = rate + z * z / (2 * num)
    half = z * math.sqrt(rate * (1 - rate) / num + z * z / (4 * num * num))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def paired_difference(
    first: Sequence[float], second: Sequence[float], seed: int = 0
) -> tuple[float, float, float]:
    """Mean of `second - first` over the same tasks in the same order, with its 95% interval.

    The tasks are resampled, both values of a task together: what makes a maze hard is hard for
    both policies and cancels.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values: not the same tasks")
    difference = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    if not len(difference):
        raise ValueError("a comparison needs one or more tasks")
    mean = float(difference.mean())
    if np.ptp(difference) == 0:
        return mean, mean, mean
    low, high = np.quantile(_resampled_means(difference, seed, RESAMPLES), [0.025, 0.975])
    return mean, float(low), float(high)


def _resampled_means(values: np.ndarray, seed: int, resamples: int) -> np.ndarray:
    chosen = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    return values[chosen].mean(axis=1)

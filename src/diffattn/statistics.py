"""Intervals for the figures: a share, a mean over samples, a mean over seeds. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """An estimate with a confidence interval; NaN where there is nothing to estimate from."""

    value: float
    low: float
    high: float
    n: int


def wilson_interval(successes: int, n: int, *, confidence: float = 0.95) -> Interval:
    """A share with its Wilson score interval (Wilson 1927).

    Args:
        successes: 0..n.
        n: number of trials; 0 gives NaN.
        confidence: coverage in (0, 1).

    Raises:
        ValueError: if the counts or the coverage are out of range.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be in 0..n; got {successes} of {n}")
    _check_confidence(confidence)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    from scipy.special import ndtri

    z = float(ndtri(0.5 + confidence / 2))
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half), n)


def mean_interval(values: Sequence[float] | np.ndarray, *, confidence: float = 0.95) -> Interval:
    """A mean with Student's t interval: the one for a handful of seeds.

    One value has no interval (NaN bounds); non-finite values are an error, not left out.
    """
    _check_confidence(confidence)
    data = _finite(values)
    if data.size == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = float(data.mean())
    if data.size == 1:
        return Interval(mean, math.nan, math.nan, 1)
    from scipy.stats import t

    half = float(t.ppf(0.5 + confidence / 2, data.size - 1) * data.std(ddof=1) / math.sqrt(data.size))
    return Interval(mean, mean - half, mean + half, int(data.size))


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, *, seed: int = 0, resamples: int = 2000, confidence: float = 0.95
) -> Interval:
    """A mean over samples with a percentile bootstrap interval (Efron and Tibshirani 1993, chapter 13)."""
    _check_confidence(confidence)
    data = _finite(values)
    if data.size == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    generator = np.random.default_rng(seed)
    draws = generator.integers(data.size, size=(resamples, data.size))
    means = data[draws].mean(axis=1)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(float(data.mean()), float(low), float(high), int(data.size))


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1); got {confidence}")


def _finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    data = np.asarray(values, dtype=np.float64).ravel()
    if not np.isfinite(data).all():
        bad = int((~np.isfinite(data)).sum())
        raise ValueError(f"values must be finite; got {bad} of {data.size} that are not")
    return data

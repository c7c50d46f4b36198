"""Intervals against closed forms, published values and their own coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from diffattn.statistics import bootstrap_interval, mean_interval, wilson_interval


def test_wilson_by_hand() -> None:
    """8 of 10: the closed form with z = 1.959964."""
    z = 1.959963984540054
    centre = (0.8 + z**2 / 20) / (1 + z**2 / 10)
    half = z / (1 + z**2 / 10) * math.sqrt(0.8 * 0.2 / 10 + z**2 / 400)
    found = wilson_interval(8, 10)
    assert found.value == 0.8
    assert found.low == pytest.approx(centre - half, abs=1e-9)
    assert found.high == pytest.approx(centre + half, abs=1e-9)


@pytest.mark.parametrize("successes", [0, 1, 50, 99, 100])
def test_wilson_agrees_with_scipy(successes: int) -> None:
    from scipy.stats import binomtest

    peer = binomtest(successes, 100).proportion_ci(0.9, method="wilson")
    found = wilson_interval(successes, 100, confidence=0.9)
    assert (found.low, found.high) == pytest.approx((peer.low, peer.high), abs=1e-9)


def test_wilson_at_the_ends_stays_inside_and_is_not_empty() -> None:
    none, every = wilson_interval(0, 20), wilson_interval(20, 20)
    assert none.low == 0
    assert 0.1 < none.high < 0.2
    assert every.high == 1
    assert 0.8 < every.low < 0.9


def test_nothing_to_estimate_from_is_nan() -> None:
    for found in (wilson_interval(0, 0), mean_interval([]), bootstrap_interval([])):
        assert math.isnan(found.value)
        assert math.isnan(found.low)
        assert found.n == 0


def test_t_interval_by_hand() -> None:
    """Three seeds: t with two degrees of freedom is 4.302653."""
    found = mean_interval([1.0, 2.0, 6.0])
    half = 4.302652729911275 * math.sqrt(7.0) / math.sqrt(3)
    assert found.value == 3.0
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half))
    assert math.isnan(mean_interval([2.0]).low)


def test_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        found = bootstrap_interval(generator.exponential(size=60), seed=trial, resamples=400)
        hits += found.low <= 1.0 <= found.high
    assert 175 <= hits <= 198


def test_bootstrap_is_seeded() -> None:
    values = np.arange(20.0)
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wilson_interval(3, 2), "successes must be in 0..n; got 3 of 2"),
        (lambda: wilson_interval(-1, 2), "successes must be in 0..n; got -1 of 2"),
        (lambda: wilson_interval(1, 2, confidence=1.0), r"confidence must be in \(0, 1\); got 1.0"),
        (lambda: mean_interval([1.0, math.nan]), "values must be finite; got 1 of 2 that are not"),
        (lambda: bootstrap_interval([math.inf, 1.0]), "values must be finite; got 1 of 2 that are not"),
    ],
)
def test_bad_values_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

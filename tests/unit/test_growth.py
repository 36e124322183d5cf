"""Slopes of what grows, and of what does not (tests/growth.py)."""

from __future__ import annotations

import numpy as np

from tests.growth import LEAST_POINTS, growth

TIMES = np.arange(0.0, 3600.0, 10.0)


def noise(seed: int) -> np.ndarray:
    """Steps of memory that last for a while: each value has 0.8 of the one before."""
    drawn = np.random.default_rng(seed).normal(size=len(TIMES))
    for i in range(1, len(drawn)):
        drawn[i] += 0.8 * drawn[i - 1]
    return drawn


def test_a_slope_that_two_processes_share_is_found() -> None:
    series = [(TIMES, 100 * k + 20 * TIMES / 3600 + noise(k)) for k in (1, 2)]
    fit = growth(series)
    assert fit is not None and not fit.is_noise and fit.series == 2
    assert abs(fit.per_hour - 20) < fit.noise


def test_noise_is_seldom_taken_for_growth() -> None:
    fits = [growth([(TIMES, 100 + noise(seed))]) for seed in range(200)]
    assert sum(not fit.is_noise for fit in fits if fit is not None) <= 14


def test_what_never_changes_does_not_grow() -> None:
    fit = growth([(TIMES, np.full(len(TIMES), 7.0))])
    assert fit is not None and fit.is_noise and fit.level == 7.0


def test_short_series_say_nothing() -> None:
    assert growth([(TIMES[: LEAST_POINTS - 1], TIMES[: LEAST_POINTS - 1])]) is None

"""Whether what was measured of processes grows: a slope, and how much of it is noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_POINTS = 8
"""Of a series; shorter ones say nothing of a slope."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A slope that several series have in common."""

    per_hour: float
    noise: float
    """Half of the 95 % interval of the slope."""
    points: int
    series: int
    level: float
    """Mean value."""

    @property
    def is_noise(self) -> bool:
        """Whether there need be no growth."""
        return self.per_hour <= self.noise


def growth(series: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Growth | None:
    """Fit one slope to series that begin at levels of their own, by least squares.

    What is beside the line at one moment is so at the next one, too: with the correlation r of
    neighbours the variance of the slope is (1 + r) / (1 - r) times that of independent points.

    Args:
        series: Seconds and values of each one.

    Returns:
        None, if no series has `LEAST_POINTS` points.
    """
    long = [(np.asarray(t, float), np.asarray(v, float)) for t, v in series]
    long = [(t, v) for t, v in long if len(t) >= LEAST_POINTS]
    if not long:
        return None
    times = [t - t.mean() for t, _ in long]
    values = [v - v.mean() for _, v in long]
    spread = sum(float(t @ t) for t in times)
    slope = sum(float(t @ v) for t, v in zip(times, values, strict=True)) / spread
    rest = [v - slope * t for t, v in zip(times, values, strict=True)]
    num = sum(map(len, rest))
    squares = sum(float(r @ r) for r in rest)
    neighbours = sum(float(r[1:] @ r[:-1]) for r in rest)
    r = min(0.99, max(0.0, neighbours / squares)) if squares else 0.0
    variance = squares / max(1, num - len(long) - 1) / spread * (1 + r) / (1 - r)
    return Growth(
        per_hour=slope * 3600,
        noise=1.96 * math.sqrt(variance) * 3600,
        points=num,
        series=len(long),
        level=float(np.concatenate([v for _, v in long]).mean()),
    )

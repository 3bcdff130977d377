"""Means of repeated measurements with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean, and the limits of its confidence interval; they are None with one measurement."""

    mean: float
    low: float | None
    high: float | None

    @property
    def limits(self) -> list[float] | None:
        """Return ``[low, high]`` for JSON."""
        return None if self.low is None or self.high is None else [self.low, self.high]

    def inverse(self) -> Estimate:
        """Return the estimate of 1 / x of a positive x."""
        low, high = self.low, self.high
        return Estimate(
            1 / self.mean, None if high is None else 1 / high, None if low is None else 1 / low
        )

    def complement(self) -> Estimate:
        """Return the estimate of 1 - x."""
        low, high = self.low, self.high
        return Estimate(
            1 - self.mean, None if high is None else 1 - high, None if low is None else 1 - low
        )


def estimate(values: Sequence[float], trim: float = 0.0) -> Estimate:
    """Return the mean of measurements that are independent of each other, with the interval of
    Student's t distribution (Student, "The probable error of a mean", 1908).

    Args:
        trim: share of the smallest and of the largest values that are left out of the mean, for
            measurements with outliers. The interval follows Tukey and McLaughlin ("Less
            vulnerable confidence and significance procedures for location based on a single
            sample", 1963), with the winsorized variance.
    """
    from scipy.special import stdtrit

    ordered = sorted(values)
    cut = int(trim * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    count, mean = len(kept), sum(kept) / len(kept)
    if count < 2:
        return Estimate(mean, None, None)
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    center = sum(winsorized) / len(winsorized)
    squares = sum((value - center) ** 2 for value in winsorized)
    quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    margin = quantile * math.sqrt(squares / (count * (count - 1)))
    return Estimate(mean, mean - margin, mean + margin)


def geometric_estimate(values: Sequence[float], trim: float = 0.0) -> Estimate:
    """Return the geometric mean of positive values with its interval. Both limits are positive, and
    a ratio and its inverse give the same result. ``trim`` is as in :func:`estimate`."""
    logs = estimate([math.log(value) for value in values], trim)
    if logs.low is None or logs.high is None:
        return Estimate(math.exp(logs.mean), None, None)
    return Estimate(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))

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


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of measurements that are independent of each other, with the interval of
    Student's t distribution (Student, "The probable error of a mean", 1908)."""
    from scipy.special import stdtrit

    count, mean = len(values), sum(values) / len(values)
    if count < 2:
        return Estimate(mean, None, None)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    margin = quantile * math.sqrt(variance / count)
    return Estimate(mean, mean - margin, mean + margin)


def estimate_ratio(ratios: Sequence[float]) -> Estimate:
    """Return the geometric mean of positive ratios with its interval, so that a ratio and its
    inverse give the same result."""
    logs = estimate([math.log(ratio) for ratio in ratios])
    if logs.low is None or logs.high is None:
        return Estimate(math.exp(logs.mean), None, None)
    return Estimate(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))

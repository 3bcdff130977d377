"""The axes of charts: round ticks with labels, and the positions of values."""

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar


def ticks(low: float, high: float, about: int = 5, integers: bool = False) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten) between ``low`` and ``high``."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if integers:
        step = max(1.0, round(step))
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_label(value: float, step: float) -> str:
    """Return a label such as ``0``, ``0.25``, ``12k`` or ``1e-4``."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    if max(size, step) < 1e-2:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits.removesuffix('.0')}e{int(exponent)}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 2
    return f"{value:,.{min(decimals, 6)}f}"


class LogChart:
    """A chart of 520 × 300 pixels with an axis of base 2, for the templates of `paceline bench`.

    Attributes:
        left, right: edges of the plot area.
        amounts: values on the horizontal axis, in ascending order.
    """

    width, height, right = 520, 300, 504
    left: ClassVar[int]
    _top, _bottom = 14, 34

    def __init__(self, amounts: Sequence[float]) -> None:
        self.amounts = amounts
        self._first, self._last = math.log2(amounts[0]), math.log2(amounts[-1])

    def x(self, amount: float) -> float:
        span = self._last - self._first
        share = (math.log2(amount) - self._first) / span if span > 0 else 0.5
        return self.left + share * (self.right - self.left)

    def y_at(self, share: float) -> float:
        """Return the position of a share of the height; values beyond the chart are at its edge."""
        share = min(1.0, max(0.0, share))
        return self._top + (1 - share) * (self.height - self._top - self._bottom)

    def y(self, value: float) -> float:
        raise NotImplementedError

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """Return the path through (amount, value); empty without points."""
        placed = [f"{self.x(amount):.1f} {self.y(value):.1f}" for amount, value in points]
        return f"M{'L'.join(placed)}" if placed else ""

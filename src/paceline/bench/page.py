"""The page of `paceline bench collectives`: charts and tables in one HTML file that works
offline."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from paceline.bench.collectives import CostModel, Timing, groups_of, native_ratio
from paceline.core.files import human_bytes

_COLORS = {"native": "c1", "ring": "c2", "tree": "c3", "halving": "c4", "naive": "c5"}
_WIDTH, _HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 14, 14, 34


def render(timings: list[Timing], models: list[CostModel]) -> str:
    """Return the page. ``models``: from :func:`paceline.bench.collectives.fits`."""
    from paceline.observe.report.html import template

    groups = []
    for group in groups_of(timings):
        cases = [
            timing for timing in timings if (timing["collective"], timing["world_size"]) == group
        ]
        fitted = [model for model in models if (model.collective, model.world_size) == group]
        rows = [
            (
                case["algorithm"],
                human_bytes(case["bytes"]),
                _time_text(case["latency_s"]),
                f"{human_bytes(case['bus_bandwidth_bytes_s'])}/s",
                native_ratio(case, timings),
            )
            for case in cases
        ]
        charts = [
            Chart("Time by size", cases, "latency_s", _time_text, fitted),
            Chart("Bus bandwidth by size", cases, "bus_bandwidth_bytes_s", _rate_text, []),
        ]
        groups.append({"name": group, "charts": charts, "rows": rows, "models": fitted})
    page = template("page.html.jinja", Path(__file__).parent)
    return str(page.render(groups=groups, colors=_COLORS, human_bytes=human_bytes))


@dataclass(frozen=True)
class Chart:
    """A chart of the cases by size, on logarithmic axes."""

    title: str
    cases: list[Timing]
    key: Literal["latency_s", "bus_bandwidth_bytes_s"]
    label: Callable[[float], str]
    models: list[CostModel]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _WIDTH - _RIGHT

    @property
    def sizes(self) -> list[int]:
        return sorted({case["bytes"] for case in self.cases})

    @property
    def powers(self) -> range:
        """The powers of ten with grid lines."""
        values = [case[self.key] for case in self.cases]
        low = math.floor(math.log10(min(values)))
        return range(low, max(math.ceil(math.log10(max(values))), low + 1) + 1)

    def x(self, size_bytes: float) -> float:
        first, last = math.log2(self.sizes[0]), math.log2(self.sizes[-1])
        share = (math.log2(size_bytes) - first) / (last - first) if last > first else 0.5
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.powers[0], self.powers[-1]
        share = min(1.0, max(0.0, (math.log10(value) - low) / (high - low)))
        return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)

    def size_labels(self) -> list[tuple[float, str, str]]:
        """Return position, anchor and text of each size label that fits."""
        sizes = self.sizes
        shown = [size for before, size in pairwise(sizes) if self.x(size) - self.x(before) > 50]
        return [
            (
                self.x(size),
                "end" if size == sizes[-1] and len(sizes) > 1 else "middle",
                human_bytes(size),
            )
            for size in [sizes[0], *shown]
        ]

    def algorithms(self) -> dict[str, list[Timing]]:
        """Return the cases of each algorithm."""
        cases: dict[str, list[Timing]] = {}
        for case in self.cases:
            cases.setdefault(case["algorithm"], []).append(case)
        return cases

    def line(self, cases: list[Timing]) -> str:
        """Return the path through the cases."""
        return self._path([(case["bytes"], case[self.key]) for case in cases])

    def curve(self, model: CostModel) -> str:
        """Return the path of a model over all sizes."""
        first, last = math.log2(self.sizes[0]), math.log2(self.sizes[-1])
        sizes = [2 ** (first + (last - first) * step / 40) for step in range(41)]
        return self._path([(size, max(1e-9, model.time_s(int(size)))) for size in sizes])

    def _path(self, points: list[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(size):.1f} {self.y(value):.1f}" for size, value in points)


def _time_text(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _rate_text(rate: float) -> str:
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if rate >= scale:
            return f"{rate / scale:.3g} {unit}"
    return f"{rate:.3g} B/s"

"""The page of `paceline bench collectives`: charts and tables in one HTML file that works
offline."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Literal

from paceline.bench.collectives import CostModel, Timing, groups_of, native_ratio
from paceline.core.files import human_bytes
from paceline.observe.report.axes import LogChart
from paceline.observe.report.html import template

_COLORS = {"native": "c1", "ring": "c2", "tree": "c3", "halving": "c4", "naive": "c5"}


def render(timings: list[Timing], models: list[CostModel]) -> str:
    """Return the page. ``models``: from :func:`paceline.bench.collectives.fits`."""
    groups = []
    for group, cases in groups_of(timings).items():
        fitted = [model for model in models if (model.collective, model.world_size) == group]
        rows = [
            (
                case["algorithm"],
                human_bytes(case["bytes"]),
                _time_text(case["latency_s"]),
                f"{human_bytes(case['bus_bandwidth_bytes_s'])}/s",
                native_ratio(case, cases),
            )
            for case in cases
        ]
        charts = [
            SizeChart("Time by size", cases, "latency_s", _time_text, fitted),
            SizeChart("Bus bandwidth by size", cases, "bus_bandwidth_bytes_s", _rate_text, []),
        ]
        groups.append({"name": group, "charts": charts, "rows": rows, "models": fitted})
    page = template("page.html.jinja", Path(__file__).parent)
    return str(page.render(groups=groups, colors=_COLORS, human_bytes=human_bytes))


class SizeChart(LogChart):
    """A chart of the cases by size, on logarithmic axes."""

    left, right = 84, 506

    def __init__(
        self,
        title: str,
        cases: list[Timing],
        key: Literal["latency_s", "bus_bandwidth_bytes_s"],
        label: Callable[[float], str],
        models: list[CostModel],
    ) -> None:
        super().__init__(sorted({case["bytes"] for case in cases}))
        self.title, self.key, self.label, self.models = title, key, label, models
        #: The cases of each algorithm.
        self.algorithms: dict[str, list[Timing]] = {}
        for case in cases:
            self.algorithms.setdefault(case["algorithm"], []).append(case)
        values = [case[key] for case in cases]
        low = math.floor(math.log10(min(values)))
        #: The powers of ten with grid lines.
        self.powers = range(low, max(math.ceil(math.log10(max(values))), low + 1) + 1)

    def y(self, value: float) -> float:
        low, high = self.powers[0], self.powers[-1]
        return self.y_at((math.log10(value) - low) / (high - low))

    def size_labels(self) -> list[tuple[float, str, str]]:
        """Return position, anchor and text of each size label that fits."""
        first, *others = self.amounts
        shown = [
            size for before, size in pairwise(self.amounts) if self.x(size) - self.x(before) > 50
        ]
        return [
            (
                self.x(size),
                "end" if others and size == others[-1] else "middle",
                human_bytes(size),
            )
            for size in [first, *shown]
        ]

    def line(self, cases: list[Timing]) -> str:
        """Return the path through the cases."""
        return self.path((case["bytes"], case[self.key]) for case in cases)

    def curve(self, model: CostModel) -> str:
        """Return the path of a model over all sizes."""
        first, last = math.log2(self.amounts[0]), math.log2(self.amounts[-1])
        sizes = [2 ** (first + (last - first) * step / 40) for step in range(41)]
        return self.path((size, max(1e-9, model.time_s(int(size)))) for size in sizes)


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

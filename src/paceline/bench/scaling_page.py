"""The page of `paceline bench scaling`: charts and tables in one HTML file that works offline."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from paceline.bench.scaling import PredictedRow, ScalingReport, ScalingRow
from paceline.bench.scaling_fit import Scaling
from paceline.bench.scaling_text import PARTS, fit_notes, interval_text, notes, shares_of
from paceline.core import formatting
from paceline.observe.report.charts import ticks

_COLORS = {"weak": "c1", "strong": "c2"}
_PART_COLORS = ("c1", "c2", "c4", "soft")
_WIDTH, _HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 14, 34


def render(report: ScalingReport) -> str:
    """Return the page."""
    from paceline.observe.report.html import template

    fit = report["fit"]
    predictions = fit["predictions"] if fit is not None else []
    page = template("scaling.html.jinja", Path(__file__).parent)
    return str(
        page.render(
            report=report,
            charts=[_efficiency_chart(report), _speedup_chart(report)],
            bars=[bar for row in report["rows"] if (bar := _bar(row)) is not None],
            parts=list(zip(PARTS, _PART_COLORS, strict=True)),
            rows=[_cells(row) for row in report["rows"]],
            predictions=[_predicted_cells(row) for row in predictions],
            terms=[] if fit is None else [_term(*item) for item in fit["terms"].items()],
            notes=notes(report),
            fit_notes=fit_notes(report),
        )
    )


@dataclass(frozen=True)
class Dot:
    """A measured or predicted value. ``is_hollow``: it is oversubscribed or predicted."""

    ranks: int
    value: float
    text: str
    is_hollow: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """The values of one kind of scaling."""

    name: Scaling
    color: str
    measured: list[Dot]
    predicted: list[Dot]


@dataclass(frozen=True)
class RankChart:
    """A chart by number of ranks, on an axis of base 2, with the ideal as a thin line."""

    title: str
    lines: list[Line]
    ideal: dict[int, float]
    is_share: bool
    width: int = field(default=_WIDTH, init=False)
    height: int = field(default=_HEIGHT, init=False)
    left: int = field(default=_LEFT, init=False)
    right: int = field(default=_WIDTH - _RIGHT, init=False)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.ideal)

    @property
    def highest(self) -> float:
        dots = [dot for line in self.lines for dot in (*line.measured, *line.predicted)]
        values = [max(dot.value, dot.high or 0.0) for dot in dots]
        return 1.05 * max([*values, *self.ideal.values()])

    def y_ticks(self) -> list[tuple[float, str]]:
        """Return position and label of each grid line."""
        return [
            (self.y(value), f"{100 * value:.0f} %" if self.is_share else f"{value:g}")
            for value in ticks(0.0, self.highest)
        ]

    def x(self, ranks: int) -> float:
        first, last = math.log2(self.ranks[0]), math.log2(self.ranks[-1])
        share = (math.log2(ranks) - first) / (last - first) if last > first else 0.5
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        share = min(1.0, max(0.0, value / self.highest))
        return _TOP + (1 - share) * (_HEIGHT - _TOP - _BOTTOM)

    def path(self, dots: list[Dot]) -> str:
        """Return the path through the values."""
        return self._path([(dot.ranks, dot.value) for dot in dots])

    def ideal_path(self) -> str:
        return self._path([(ranks, self.ideal[ranks]) for ranks in self.ranks])

    def _path(self, points: list[tuple[int, float]]) -> str:
        placed = [f"{self.x(ranks):.1f} {self.y(value):.1f}" for ranks, value in points]
        return f"M{'L'.join(placed)}" if placed else ""


def _efficiency_chart(report: ScalingReport) -> RankChart:
    lines = []
    for kind in _kinds(report):
        measured = [
            Dot(
                row["ranks"],
                row["efficiency"],
                f"{kind}, {_ranks(row)}: {formatting.percent(row['efficiency'])}",
                row["oversubscribed"],
                *(row["efficiency_interval"] or (None, None)),
            )
            for row in report["rows"]
            if row["scaling"] == kind and row["efficiency"] is not None
        ]
        predicted = [
            Dot(
                row["ranks"],
                row["efficiency"],
                f"{kind}, {row['ranks']} ranks, predicted: {formatting.percent(row['efficiency'])}",
                True,
                *(row["efficiency_interval"] or (None, None)),
            )
            for row in _predictions(report, kind)
        ]
        lines.append(Line(kind, _COLORS[kind], measured, _joined(measured, predicted)))
    ideal = dict.fromkeys(_all_ranks(report), 1.0)
    return RankChart("Efficiency by number of ranks", lines, ideal, is_share=True)


def _speedup_chart(report: ScalingReport) -> RankChart:
    lines = []
    for kind in _kinds(report):
        measured = [
            Dot(
                row["ranks"],
                row["speedup"],
                f"{kind}, {_ranks(row)}: {row['speedup']:.2f} ×",
                row["oversubscribed"],
            )
            for row in report["rows"]
            if row["scaling"] == kind and row["speedup"] is not None
        ]
        predicted = [
            Dot(
                row["ranks"],
                row["speedup"],
                f"{kind}, {row['ranks']} ranks, predicted: {row['speedup']:.2f} ×",
                True,
            )
            for row in _predictions(report, kind)
        ]
        lines.append(Line(kind, _COLORS[kind], measured, _joined(measured, predicted)))
    first = min(row["ranks"] for row in report["rows"])
    ideal = {ranks: ranks / first for ranks in _all_ranks(report)}
    return RankChart(f"Throughput relative to {formatting.ranks(first)}", lines, ideal, False)


def _joined(measured: list[Dot], predicted: list[Dot]) -> list[Dot]:
    """Return the predictions after the last value that they follow from."""
    fitted = [dot for dot in measured if not dot.is_hollow]
    return [*fitted[-1:], *predicted] if predicted else []


def _kinds(report: ScalingReport) -> list[Scaling]:
    return list(dict.fromkeys(row["scaling"] for row in report["rows"]))


def _predictions(report: ScalingReport, kind: Scaling) -> list[PredictedRow]:
    fit = report["fit"]
    rows = [] if fit is None else fit["predictions"]
    return [row for row in rows if row["scaling"] == kind]


def _all_ranks(report: ScalingReport) -> list[int]:
    fit = report["fit"]
    predicted = [] if fit is None else [row["ranks"] for row in fit["predictions"]]
    return sorted({*(row["ranks"] for row in report["rows"]), *predicted})


@dataclass(frozen=True)
class Bar:
    """The parts of a step as shares of it: (label, color, share, text)."""

    label: str
    parts: list[tuple[str, str, float, str]]


def _bar(row: ScalingRow) -> Bar | None:
    parts = []
    shares = shares_of(row["parts"])
    for name, color, share in zip(PARTS, _PART_COLORS, shares, strict=True):
        if share is None:
            return None
        parts.append((name, color, share, formatting.percent(share)))
    return Bar(f"{row['scaling']}, {_ranks(row)}", parts)


def _ranks(row: ScalingRow) -> str:
    return f"{formatting.ranks(row['ranks'])}{' *' if row['oversubscribed'] else ''}"


def _cells(row: ScalingRow) -> list[str]:
    shares = shares_of(row["parts"])
    return [
        row["scaling"],
        _ranks(row),
        formatting.short_duration(row["step_time_s"]),
        formatting.short_count(row["work_per_second"]),
        formatting.UNKNOWN if row["speedup"] is None else f"{row['speedup']:.2f}",
        f"{row['ideal_speedup']:g}",
        formatting.percent(row["efficiency"]),
        interval_text(row["efficiency_interval"]),
        *(formatting.percent(share) for share in shares),
        formatting.size(row["peak_memory_bytes"]),
    ]


def _predicted_cells(row: PredictedRow) -> list[str]:
    return [
        row["scaling"],
        formatting.ranks(row["ranks"]),
        formatting.short_duration(row["step_time_s"]),
        f"{row['speedup']:.2f}",
        formatting.percent(row["efficiency"]),
        interval_text(row["efficiency_interval"]),
    ]


_TERMS = {
    "micro_batch_s": ("each micro-batch", "micro-batches of a rank"),
    "transfer_s": ("sending the gradients once", "2(n − 1)/n"),
    "update_s": ("each update", "1"),
    "rank_s": ("each further rank", "n − 1"),
}


def _term(name: str, seconds: float) -> tuple[str, str, str]:
    label, factor = _TERMS[name]
    return label, factor, formatting.short_duration(seconds)

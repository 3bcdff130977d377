"""The page of `paceline bench scaling`: charts and tables in one HTML file that works offline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.bench.scaling import PredictedRow, ScalingReport, ScalingRow
from paceline.bench.scaling_fit import Scaling
from paceline.bench.scaling_text import PARTS, fit_notes, interval_text, notes, shares_of
from paceline.core import formatting
from paceline.messages.pages import PageText
from paceline.observe.report.axes import LogChart, ticks
from paceline.observe.report.html import template

_COLORS = {"weak": "c1", "strong": "c2"}
_PART_COLORS = ("c1", "c2", "c4", "soft")

ScalingFigure = Literal["efficiency", "speedup"]
ValueText = Callable[[float], str]


def render(report: ScalingReport) -> str:
    """Return the page."""
    fit = report["fit"]
    page = template("scaling.html.jinja", Path(__file__).parent)
    return str(
        page.render(
            report=report,
            charts=_charts(report),
            bars=[bar for row in report["rows"] if (bar := _bar(row)) is not None],
            parts=list(zip(PARTS, _PART_COLORS, strict=True)),
            rows=[_cells(row) for row in report["rows"]],
            predictions=[_predicted_cells(row) for row in _predictions(report)],
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


class RankChart(LogChart):
    """A chart by number of ranks, with the ideal as a thin line."""

    left = 56

    def __init__(
        self, title: str, lines: list[Line], ideal: dict[int, float], value_text: ValueText
    ) -> None:
        super().__init__(list(ideal))
        self.title, self.lines, self._value_text = title, lines, value_text
        dots = [dot for line in lines for dot in (*line.measured, *line.predicted)]
        values = [max(dot.value, dot.high or 0.0) for dot in dots]
        self._highest = 1.05 * max([*values, *ideal.values()])
        self.ideal_path = self.path(ideal.items())

    def y_ticks(self) -> list[tuple[float, str]]:
        """Return position and label of each grid line."""
        return [(self.y(value), self._value_text(value)) for value in ticks(0.0, self._highest)]

    def y(self, value: float) -> float:
        return self.y_at(value / self._highest)

    def line(self, dots: list[Dot]) -> str:
        """Return the path through the values."""
        return self.path((dot.ranks, dot.value) for dot in dots)


def _charts(report: ScalingReport) -> list[RankChart]:
    first = min(row["ranks"] for row in report["rows"])
    rows: list[ScalingRow | PredictedRow] = [*report["rows"], *_predictions(report)]
    ranks = sorted({row["ranks"] for row in rows})
    return [
        RankChart(
            "Efficiency by number of ranks",
            _lines(report, "efficiency", formatting.percent),
            dict.fromkeys(ranks, 1.0),
            lambda share: f"{100 * share:.0f} %",
        ),
        RankChart(
            PageText("Throughput relative to {ranks:rank}", ranks=first),
            _lines(report, "speedup", lambda speedup: f"{speedup:.2f} ×"),
            {count: count / first for count in ranks},
            lambda speedup: f"{speedup:g}",
        ),
    ]


def _lines(report: ScalingReport, key: ScalingFigure, value_text: ValueText) -> list[Line]:
    """Return a line for each kind of scaling. The predictions follow the last value that they are
    fitted to."""
    lines = []
    for kind in dict.fromkeys(row["scaling"] for row in report["rows"]):
        measured = [
            _dot(row, key, value, row["oversubscribed"], "{scaling}, {ranks}: {value}", value_text)
            for row in report["rows"]
            if row["scaling"] == kind and (value := row[key]) is not None
        ]
        predicted = [
            _dot(row, key, row[key], True, "{scaling}, {ranks}, predicted: {value}", value_text)
            for row in _predictions(report)
            if row["scaling"] == kind
        ]
        fitted = [dot for dot in measured if not dot.is_hollow]
        joined = [*fitted[-1:], *predicted] if predicted else []
        lines.append(Line(kind, _COLORS[kind], measured, joined))
    return lines


def _dot(
    row: ScalingRow | PredictedRow,
    key: ScalingFigure,
    value: float,
    is_hollow: bool,
    template: str,
    value_text: ValueText,
) -> Dot:
    text = PageText(template, scaling=row["scaling"], ranks=_ranks(row), value=value_text(value))
    limits = row["efficiency_interval"] if key == "efficiency" else None
    low, high = limits or (None, None)
    return Dot(row["ranks"], value, text, is_hollow, low, high)


def _predictions(report: ScalingReport) -> list[PredictedRow]:
    return [] if report["fit"] is None else report["fit"]["predictions"]


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
    label = PageText("{scaling}, {ranks}", scaling=row["scaling"], ranks=_ranks(row))
    return Bar(label, parts)


def _ranks(row: ScalingRow | PredictedRow) -> str:
    mark = " *" if row.get("oversubscribed") else ""
    return PageText("{ranks:rank}{mark}", ranks=row["ranks"], mark=mark)


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
        _ranks(row),
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

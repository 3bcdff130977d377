"""Draw predicted against published figures as an SVG, without a plotting library."""

import math
from collections.abc import Sequence
from html import escape

Point = tuple[str, float, float]  # project, published, predicted

_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"),
    *("#56b4e9", "#5b4b8a", "#8c564b", "#7f7f7f", "#bcbd22"),
)
_SIDE, _MARGIN, _GAP = 420, 60, 90


def scatter(left: Sequence[Point], left_name: str, right: Sequence[Point], right_name: str) -> str:
    """Return two plots with logarithmic axes: published values across, predicted ones up, and lines
    at equality and at ± 25 %."""
    projects = sorted({project for project, _, _ in (*left, *right)})
    colors = {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(projects)}
    width = 2 * _SIDE + _GAP + 2 * _MARGIN
    height = _SIDE + 2 * _MARGIN + 22 * math.ceil(len(projects) / 5)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_plot(left, left_name, _MARGIN, colors),
        *_plot(right, right_name, _MARGIN + _SIDE + _GAP, colors),
    ]
    for number, name in enumerate(projects):
        x, y = _MARGIN + 185 * (number % 5), _SIDE + _MARGIN + 60 + 22 * (number // 5)
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colors[name]}"/>')
        parts.append(f'<text x="{x + 9}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _plot(points: Sequence[Point], name: str, at: int, colors: dict[str, str]) -> list[str]:
    values = [value for _, *pair in points for value in pair]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1

    def place(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * _SIDE

    bottom = _MARGIN + _SIDE
    parts = [
        f'<rect x="{at}" y="{_MARGIN}" width="{_SIDE}" height="{_SIDE}" fill="none"'
        ' stroke="#888"/>',
        f'<text x="{at + _SIDE / 2}" y="{_MARGIN - 14}" text-anchor="middle">{escape(name)}:'
        " predicted (up) against published (across)</text>",
    ]
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        offset, label = place(10.0**exponent), f"{10.0**exponent:,.6g}"
        parts += [
            f'<line x1="{at + offset:.1f}" y1="{_MARGIN}" x2="{at + offset:.1f}" y2="{bottom}"'
            ' stroke="#ddd"/>',
            f'<line x1="{at}" y1="{bottom - offset:.1f}" x2="{at + _SIDE}"'
            f' y2="{bottom - offset:.1f}" stroke="#ddd"/>',
            f'<text x="{at + offset:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>',
            f'<text x="{at - 5}" y="{bottom - offset + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    for factor, dash in ((1.0, ""), (1.25, "4 4"), (0.8, "4 4")):
        shift = math.log10(factor) / (high - low) * _SIDE
        start, end = max(0.0, -shift), min(_SIDE, _SIDE - shift)
        parts.append(
            f'<line x1="{at + start:.1f}" y1="{bottom - start - shift:.1f}" x2="{at + end:.1f}"'
            f' y2="{bottom - end - shift:.1f}" stroke="#444" stroke-dasharray="{dash}"/>'
        )
    parts += [
        f'<circle cx="{at + place(published):.1f}" cy="{bottom - place(predicted):.1f}" r="3"'
        f' fill="{colors[project]}" fill-opacity="0.6"/>'
        for project, published, predicted in points
    ]
    return parts

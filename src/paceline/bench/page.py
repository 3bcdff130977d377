"""The page of `paceline bench collectives`: plots and tables in one HTML file that opens
offline."""

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.core.files import human_bytes

_COLOURS = {"native": "c1", "ring": "c2", "tree": "c3", "halving": "c4", "naive": "c5"}
_WIDTH, _HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 14, 14, 34

_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def render(results: list[dict[str, Any]], models: list[dict[str, Any]]) -> str:
    """The whole page. ``models``: as :func:`paceline.bench.measure.fits` gives them."""
    parts = []
    groups = list(dict.fromkeys((one["collective"], one["world_size"]) for one in results))
    for collective, ranks in groups:
        mine = [
            one for one in results if (one["collective"], one["world_size"]) == (collective, ranks)
        ]
        fitted = [
            one for one in models if (one["collective"], one["world_size"]) == (collective, ranks)
        ]
        parts.append(f"<h2>{escape(collective.capitalize())}, {ranks} ranks</h2>")
        time_plot = _plot("Time by size", mine, "latency_s", _time_text, fitted)
        rate_plot = _plot("Bus bandwidth by size", mine, "bus_bandwidth_bytes_s", _rate_text, [])
        parts.append(f'<div class="plots">{time_plot}{rate_plot}</div>')
        parts.append(_table(mine, fitted))
    about = (
        "Measured on this machine between local ranks; the median of the slowest rank's times."
        " Dashed: t = α · messages + β · bytes, fitted by least squares; messages and bytes are"
        " those of the rank that sends most, the backend's own counted as a ring."
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>Collectives · Paceline</title>'
    )
    body = (
        '<main><div class="eyebrow">paceline'
        f" bench</div><h1>Collectives</h1><p>{about}</p>{''.join(parts)}</main>"
    )
    page = f'<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>'
    return f"<!DOCTYPE html>\n{page}\n"


def _plot(
    title: str, results: list[dict[str, Any]], key: str, label: Any, models: list[dict[str, Any]]
) -> str:
    from paceline.bench.measure import load

    sizes = sorted({one["bytes"] for one in results})
    low = math.floor(math.log10(min(one[key] for one in results)))
    high = max(math.ceil(math.log10(max(one[key] for one in results))), low + 1)
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])

    def x(size: float) -> float:
        share = (math.log2(size) - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (math.log10(value) - low) / (high - low)
        return _TOP + (1 - min(1.0, max(0.0, share))) * (_HEIGHT - _TOP - _BOTTOM)

    def line(points: list[tuple[float, float]], style: str, colour: str) -> str:
        path = "M" + "L".join(f"{x(size):.1f} {y(value):.1f}" for size, value in points)
        return f'<path class="{style}" stroke="var(--{colour})" d="{path}"/>'

    drawn = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        drawn.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        drawn.append(
            f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label(10.0**power)}</text>'
        )
    shown = [sizes[0], *(one for before, one in pairwise(sizes) if x(one) - x(before) > 50)]
    for size in shown:
        anchor = "end" if size == sizes[-1] and len(sizes) > 1 else "middle"
        drawn.append(
            f'<text x="{x(size):.1f}" y="{_HEIGHT - 12}"'
            f' text-anchor="{anchor}">{human_bytes(size)}</text>'
        )
    legend = []
    for name in dict.fromkeys(one["algorithm"] for one in results):
        colour = _COLOURS[name]
        points = [(one["bytes"], one[key]) for one in results if one["algorithm"] == name]
        drawn.append(line(points, "mean", colour))
        for size, value in points:
            tip = escape(f"{name}, {human_bytes(size)}: {label(value)}")
            drawn.append(
                f'<circle cx="{x(size):.1f}" cy="{y(value):.1f}" r="3.5"'
                f' fill="var(--{colour})"><title>{tip}</title></circle>'
            )
        legend.append(f'<span><i style="background:var(--{colour})"></i>{name}</span>')
    for model in models:
        curve = []
        for at in range(41):
            size = 2 ** (first + (last - first) * at / 40)
            messages, moved = load(
                model["collective"], model["algorithm"], model["world_size"], int(size)
            )
            curve.append(
                (size, max(1e-9, model["alpha_s"] * messages + model["beta_s_per_byte"] * moved))
            )
        drawn.append(line(curve, "model", _COLOURS[model["algorithm"]]))
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="{escape(title)}">{"".join(drawn)}</svg>'
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{picture}<div"
        f' class="legend">{"".join(legend)}</div></figure>'
    )


def _table(results: list[dict[str, Any]], models: list[dict[str, Any]]) -> str:
    native = {one["bytes"]: one["latency_s"] for one in results if one["algorithm"] == "native"}
    rows = []
    for one in results:
        beside = f"{native[one['bytes']] / one['latency_s']:.2f}" if native else ""
        rate = f"{human_bytes(one['bus_bandwidth_bytes_s'])}/s"
        rows.append(
            (
                one["algorithm"],
                human_bytes(one["bytes"]),
                _time_text(one["latency_s"]),
                rate,
                beside,
            )
        )
    tables = [_rows(("Algorithm", "Size", "Time", "Bus bandwidth", "× native"), rows)]
    if models:
        fitted = [(one["algorithm"], *model_words(one)) for one in models]
        tables.append(_rows(("Algorithm", "α", "1/β", "Residual"), fitted))
    return "".join(f'<div class="table" style="margin-top:18px">{one}</div>' for one in tables)


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f"<th>{escape(one)}</th>" for one in head)
    rest = "".join(
        "<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{first}</tr>{rest}</table>"


def model_words(one: dict[str, Any]) -> tuple[str, str, str]:
    """α, 1/β and the residual of a model, as they are shown: ``35.0 µs``, ``1.2 GiB/s``, ``8
    %``."""
    rate = (
        f"{human_bytes(1 / one['beta_s_per_byte'])}/s"
        if one["beta_s_per_byte"]
        else "no limit seen"
    )
    return f"{1e6 * one['alpha_s']:.1f} µs", rate, f"{100 * one['residual']:.0f} %"


def _time_text(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _rate_text(rate: float) -> str:
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if rate >= scale:
            return f"{rate / scale:.3g} {unit}"
    return f"{rate:.3g} B/s"

"""The report's plots: series of figures to scaled SVG paths, ticks and the data of the read-out.

The drawing area is a stretched SVG (lines keep their width), the labels beside it are HTML, so that
text has the same size on a phone as on a large screen. Everything is visible without JavaScript.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypedDict

from paceline.core import formatting
from paceline.core.events import EvalEvent, RunStartEvent, StepEvent

MAX_POINTS = 1500  # of all series of a plot together
WIDTH, HEIGHT = 1000.0, 400.0  # of the SVG's own coordinates

Point = tuple[float, float | None]


@dataclass
class Series:
    """One line (or row of dots, or layer of a stack): ``points`` are (step, value); None is a
    gap."""

    name: str
    points: list[Point]
    colour: str = "c1"
    kind: str = "line"  # line | faint | dots | area


@dataclass
class Plot:
    """What is drawn in one figure. ``unit`` stands at the axis and in the read-out; ``log_labels``
    writes 1e-4."""

    title: str
    unit: str
    series: list[Series]
    from_zero: bool = False
    wide: bool = False
    notes: list[str] = field(default_factory=list)


def downsample(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` (≥ 5) of the points: of each bucket of steps the lowest and the highest,
    and whether it has a gap.

    The first and the last point stay.
    """
    if len(points) <= limit:
        return list(points)
    buckets = max(1, (limit - 2) // 3)
    inner = points[1:-1]
    kept = [points[0]]
    for index in range(buckets):
        bucket = inner[index * len(inner) // buckets : (index + 1) * len(inner) // buckets]
        values = [(y, place) for place, (_, y) in enumerate(bucket) if y is not None]
        places = {min(values)[1], max(values)[1]} if values else set()
        gap = next((place for place, (_, y) in enumerate(bucket) if y is None), None)
        kept += [bucket[place] for place in sorted(places | ({gap} if gap is not None else set()))]
    return [*kept, points[-1]]


def bucket_means(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` points, each the mean of its bucket: for layers of a stack, which must add
    up."""
    if len(points) <= limit:
        return list(points)
    means: list[Point] = []
    for index in range(limit):
        bucket = points[index * len(points) // limit : (index + 1) * len(points) // limit]
        values = [y for _, y in bucket if y is not None]
        means.append((bucket[-1][0], sum(values) / len(values) if values else None))
    return means


def smooth(points: Sequence[Point]) -> list[Point]:
    """Centred moving average over about a thirtieth of the run; it does not lag behind. Gaps stay
    gaps.

    Towards the ends the window shrinks on both sides alike, so that a falling curve keeps its ends.
    """
    reach = max(1, len(points) // 60)
    sums, counts = [0.0], [0]
    for _, y in points:
        sums.append(sums[-1] + (y or 0.0))
        counts.append(counts[-1] + (y is not None))
    smoothed: list[Point] = []
    for index, (x, y) in enumerate(points):
        near = max(min(reach, index, len(points) - 1 - index), reach // 5)
        low, high = max(0, index - near), min(len(points), index + near + 1)
        smoothed.append(
            (x, (sums[high] - sums[low]) / (counts[high] - counts[low]) if y is not None else None)
        )
    return smoothed


def raw_and_smooth(name: str, points: list[Point], colour: str, from_count: int) -> list[Series]:
    """One line; from ``from_count`` points on, each step faintly and a smoothed line over it."""
    if len(points) < from_count:
        return [Series(name, points, colour)]
    return [
        Series("each step", points, colour, "faint"),
        Series("smoothed", smooth(points), colour),
    ]


def ticks(low: float, high: float, about: int = 5, whole: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) between ``low`` and ``high``."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_label(value: float, step: float) -> str:
    """``0``, ``0.25``, ``12k``, ``1e-4``."""
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


class Mark(NamedTuple):
    """A tick or marker: ``svg`` in the SVG's coordinates, ``at`` in per cent of the area."""

    svg: str
    at: str
    text: str


class ReadOut(TypedDict):
    """The figures of a series, for the script that shows them."""

    name: str
    colour: str
    x: list[float]
    y: list[float | None]


class Shape(NamedTuple):
    """A series as an SVG path ``d``."""

    name: str
    colour: str
    kind: str
    d: str


class DrawnPlot(TypedDict):
    """What the template shows of a plot."""

    title: str
    unit: str
    wide: bool
    notes: list[str]
    shapes: list[Shape]
    y_ticks: list[Mark]
    x_ticks: list[Mark]
    markers: list[Mark]
    x_range: tuple[float, float]
    series: list[ReadOut]


def draw(
    plot: Plot, x_range: tuple[float, float], markers: Sequence[tuple[float, str]]
) -> DrawnPlot:
    """All that the template needs of a plot: paths, ticks in per cent of the area, and the
    read-out's data."""
    x_low, x_high = x_range if x_range[1] > x_range[0] else (x_range[0] - 1, x_range[0] + 1)
    # a noisy line needs the most points
    weights = [3 if one.kind == "faint" else 1 for one in plot.series]
    stacked = any(one.kind == "area" for one in plot.series)
    reduce = bucket_means if stacked else downsample
    series = [
        Series(
            one.name,
            reduce(one.points, max(5, MAX_POINTS * weight // sum(weights))),
            one.colour,
            one.kind,
        )
        for one, weight in zip(plot.series, weights, strict=True)
    ]
    tops = _stack(series) if stacked else [one.points for one in series]
    y_low, y_high = _y_range(
        [y for points in tops for _, y in points if y is not None], plot.from_zero or stacked
    )

    def place(x: float, y: float) -> tuple[float, float]:
        return (x - x_low) / (x_high - x_low) * WIDTH, (1 - (y - y_low) / (y_high - y_low)) * HEIGHT

    y_ticks, x_ticks = ticks(y_low, y_high), ticks(x_low, x_high, whole=True)
    y_step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else abs(y_ticks[0] if y_ticks else 1.0)
    x_step = x_ticks[1] - x_ticks[0] if len(x_ticks) > 1 else 1.0
    bottoms = (
        [[(x, 0.0 if y is not None else None) for x, y in tops[0]], *tops[:-1]]
        if stacked and tops
        else []
    )
    shapes = []
    for index, one in enumerate(series):
        d = (
            _area(bottoms[index], tops[index], place)
            if one.kind == "area"
            else _path(one.points, place, one.kind == "dots")
        )
        shapes.append(Shape(one.name, one.colour, one.kind, d))
    x_marks = [(x, text) for x, text in markers if x_low <= x <= x_high]
    return {
        "title": plot.title,
        "unit": plot.unit,
        "wide": plot.wide,
        "notes": plot.notes,
        "shapes": shapes,
        "y_ticks": [_mark(place(x_low, y)[1], HEIGHT, tick_label(y, y_step)) for y in y_ticks],
        "x_ticks": [_mark(place(x, y_low)[0], WIDTH, tick_label(x, x_step)) for x in x_ticks],
        "markers": [_mark(place(x, y_low)[0], WIDTH, text) for x, text in x_marks],
        "x_range": (x_low, x_high),
        "series": [_read_out(one) for one in series],
    }


def _mark(at: float, whole: float, text: str) -> Mark:
    return Mark(f"{at:.1f}", f"{100 * at / whole:.2f}", text)


def _read_out(one: Series) -> ReadOut:
    values = [None if y is None else float(f"{y:.6g}") for _, y in one.points]
    return {"name": one.name, "colour": one.colour, "x": [x for x, _ in one.points], "y": values}


def _y_range(values: list[float], from_zero: bool) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if from_zero:
        low = min(0.0, low)
    if high <= low:
        pad = abs(high) * 0.1 or 1.0
        return (low, high + pad) if from_zero else (low - pad, high + pad)
    pad = (high - low) * 0.06
    return (low if from_zero else low - pad), high + pad


def _stack(series: list[Series]) -> list[list[Point]]:
    """The upper edge of each layer; a gap in one layer is a gap in all above it."""
    edges: list[list[Point]] = []
    for one in series:
        below = edges[-1] if edges else [(x, 0.0) for x, _ in one.points]
        edges.append(
            [(x, y + under if y is not None and under is not None else None)
             for (x, y), (_, under) in zip(one.points, below, strict=True)]
        )  # fmt: skip
    return edges


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The stretches between gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is not None:
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(points: Sequence[Point], place: Any, dots: bool) -> str:
    parts = []
    for run in _runs(points):
        placed = [place(x, y) for x, y in run]
        if dots or len(placed) == 1:  # a stroke of no length with round ends is a dot
            parts += [f"M{x:.1f} {y:.1f}h0" for x, y in placed]
        else:
            parts.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed))
    return "".join(parts)


def _area(bottom: Sequence[Point], top: Sequence[Point], place: Any) -> str:
    under = dict(bottom)
    parts = []
    for run in _runs(top):
        edge = [place(x, y) for x, y in run]
        back = [place(x, under.get(x) or 0.0) for x, _ in reversed(run)]
        if len(edge) == 1:  # a single step: a narrow bar
            (x, y), (_, foot) = edge[0], back[0]
            edge, back = [(x - 6, y), (x + 6, y)], [(x + 6, foot), (x - 6, foot)]
        parts.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*edge, *back]) + "Z")
    return "".join(parts)


_RANK_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")


def draw_plots(
    steps: list[StepEvent],
    evals: list[EvalEvent],
    start: RunStartEvent,
    resumed_from: Sequence[int],
) -> list[DrawnPlot]:
    """The plots of a run. ``resumed_from``: steps from which it was resumed."""
    if not steps:
        return []
    batch = (start.get("derived") or {}).get("global_batch_size")
    made = [
        _loss_plot(steps, evals),
        _rate_plot(steps),
        _throughput_plot(steps, batch),
        _time_plot(steps),
        _memory_plot(steps),
        _norm_plot(steps),
    ]
    markers = [(step, f"resumed at step {step:,}") for step in resumed_from]
    x_all = [event["step"] for event in (*steps, *evals)]
    x_range = (min(x_all), max(x_all))
    return [draw(plot, x_range, markers) for plot in made if plot.notes or _has_figures(plot)]


def _has_figures(plot: Plot) -> bool:
    return any(y is not None for one in plot.series for _, y in one.points)


def _points(events: Sequence[StepEvent | EvalEvent], key: str, scale: float = 1.0) -> list[Point]:
    return [
        (event["step"], None if (y := formatting.finite(event.get(key))) is None else y / scale)
        for event in events
    ]


def _broken(events: list[StepEvent], key: str, what: str) -> list[str]:
    many = sum(
        1
        for one in events
        if formatting.number(one.get(key)) is not None and formatting.finite(one.get(key)) is None
    )
    return (
        [
            f"{many:,} of {len(events):,} logged steps have a {what} that is not a finite number:"
            " the gaps."
        ]
        if many
        else []
    )


def _loss_plot(steps: list[StepEvent], evals: list[EvalEvent]) -> Plot:
    raw = _points(steps, "loss")
    series = raw_and_smooth("loss", raw, "c1", 10)
    if evals:
        series.append(Series("evaluation", _points(evals, "loss"), "c2", "dots"))
    return Plot("Training loss", "", series, wide=True, notes=_broken(steps, "loss", "loss"))


def _rate_plot(steps: list[StepEvent]) -> Plot:
    return Plot(
        "Learning rate",
        "",
        [Series("learning rate", _points(steps, "learning_rate"), "c3")],
        from_zero=True,
    )


def _norm_plot(steps: list[StepEvent]) -> Plot:
    notes = _broken(steps, "grad_norm", "gradient norm")
    series = raw_and_smooth("gradient norm", _points(steps, "grad_norm"), "c4", 100)
    return Plot("Gradient norm", "", series, from_zero=True, notes=notes)


def _throughput_plot(steps: list[StepEvent], batch: Any) -> Plot:
    found = [formatting.throughput(step, batch) for step in steps]
    unit = found[-1][1]
    points: list[Point] = [
        (step["step"], y if u == unit else None) for step, (y, u) in zip(steps, found, strict=True)
    ]
    return Plot("Throughput", unit, raw_and_smooth("throughput", points, "c5", 100), from_zero=True)


def _memory_plot(steps: list[StepEvent]) -> Plot:
    rows = [(step["step"], _as_list(step.get("memory_bytes"))) for step in steps]
    world = max((len(values) for _, values in rows), default=0)
    top = max(
        (
            figure
            for _, values in rows
            for value in values
            if (figure := formatting.finite(value)) is not None
        ),
        default=0.0,
    )
    scale, unit = next(
        ((s, u) for s, u in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")) if top >= s),
        (1.0, "B"),
    )

    def of(pick: Any) -> list[Point]:
        return [
            (x, None if (y := formatting.finite(pick(values))) is None else y / scale)
            for x, values in rows
        ]

    if world <= len(_RANK_COLOURS):
        series = [
            Series(f"rank {rank}", of(partial(_at_rank, rank)), _RANK_COLOURS[rank])
            for rank in range(world)
        ]
        return Plot("Memory of each rank", unit, series, from_zero=True)
    series = [
        Series("fullest rank", of(formatting.fullest)),
        Series("emptiest rank", of(_emptiest), "c2"),
    ]
    return Plot(f"Memory, {world} ranks", unit, series, from_zero=True)


def _at_rank(rank: int, values: list[Any]) -> Any:
    return values[rank] if rank < len(values) else None


def _emptiest(values: list[Any]) -> float | None:
    return min(
        (figure for value in values if (figure := formatting.finite(value)) is not None),
        default=None,
    )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _time_plot(steps: list[StepEvent]) -> Plot:
    """Where a step's time goes. What is not measured stays in the first layer, which is named after
    it."""
    total = [formatting.finite(step.get("step_time_s")) for step in steps]
    top = max((seconds for seconds in total if seconds is not None), default=0.0)
    scale, unit = (1.0, "s") if top >= 1 else (1e-3, "ms")
    waits = [(key, name, colour) for key, name, colour in
             (("data_wait_s", "data wait", "c2"), ("comm_wait_s", "communication wait", "c4"))
             if any(formatting.finite(step.get(key)) is not None for step in steps)]  # fmt: skip
    rest: list[Point] = []
    layers: dict[str, list[Point]] = {key: [] for key, *_ in waits}
    for step, seconds in zip(steps, total, strict=True):
        spent = {key: formatting.finite(step.get(key)) or 0.0 for key in layers}
        rest.append(
            (
                step["step"],
                None if seconds is None else max(0.0, seconds - sum(spent.values())) / scale,
            )
        )
        for key, value in spent.items():
            layers[key].append((step["step"], None if seconds is None else value / scale))
    alone = (
        len({rank for step in steps for rank in range(len(_as_list(step.get("memory_bytes"))))})
        == 1
    )
    rest_name = "compute"
    if "data_wait_s" not in layers:
        rest_name += " and data wait"
    if "comm_wait_s" not in layers and not alone:
        rest_name += " and communication"
    stack = [Series(rest_name, rest, "c1", "area")]
    stack += [Series(text, layers[key], colour, "area") for key, text, colour in waits]
    return Plot("Time of a step", unit, stack, from_zero=True)

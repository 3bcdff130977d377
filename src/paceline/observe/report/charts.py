"""Draw the plots of the report as scaled SVG paths, with ticks and data for tooltips.

The plot area is a stretched SVG whose lines keep their width. Labels are HTML, so that text has the
same size on a phone and on a large screen. Plots are complete without JavaScript.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict

from paceline.core import formatting
from paceline.core.event_log import throughput
from paceline.core.events import EvalEvent, RunStartEvent, StepEvent
from paceline.messages.pages import PageText
from paceline.observe.report.axes import tick_label, ticks

MAX_POINTS = 1500  # total over all series of a plot
WIDTH, HEIGHT = 1000.0, 400.0  # of the SVG's coordinates

Point = tuple[float, float | None]


@dataclass
class Series:
    """A line, a row of dots, or a layer of a stack. ``points`` are (step, value); a value of None
    is a gap."""

    name: str
    points: list[Point]
    colour: str = "c1"
    kind: str = "line"  # line | faint | dots | area


@dataclass
class Plot:
    """A plot. ``unit`` is shown at the axis and in the tooltip."""

    title: str
    unit: str
    series: list[Series]
    from_zero: bool = False
    wide: bool = False
    notes: list[str] = field(default_factory=list)

    def has_values(self) -> bool:
        return any(y is not None for series in self.series for _, y in series.points)


def downsample(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most ``limit`` (≥ 5) of the points: the first, the last, and for each bucket of
    steps in between the minimum, the maximum, and a gap if there is one."""
    if len(points) <= limit:
        return list(points)
    selected = [points[0]]
    for bucket in _split(points[1:-1], max(1, (limit - 2) // 3)):
        values = [(y, index) for index, (_, y) in enumerate(bucket) if y is not None]
        gaps = [index for index, (_, y) in enumerate(bucket) if y is None]
        extremes = {min(values)[1], max(values)[1]} if values else set()
        selected += [bucket[index] for index in sorted(extremes.union(gaps[:1]))]
    return [*selected, points[-1]]


def bucket_means(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most ``limit`` points, each the mean of a bucket. Used for the layers of a stack,
    which must add up."""
    if len(points) <= limit:
        return list(points)
    means: list[Point] = []
    for bucket in _split(points, limit):
        values = [y for _, y in bucket if y is not None]
        means.append((bucket[-1][0], sum(values) / len(values) if values else None))
    return means


def _split(points: Sequence[Point], count: int) -> list[Sequence[Point]]:
    edges = [index * len(points) // count for index in range(count + 1)]
    return [points[begin:end] for begin, end in pairwise(edges)]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return a centered moving average over about a thirtieth of the run. Gaps stay gaps.

    Near the ends the window shrinks on both sides, so that a falling curve keeps its end values.
    """
    reach = max(1, len(points) // 60)
    sums, counts = [0.0], [0]
    for _, y in points:
        sums.append(sums[-1] + (y or 0.0))
        counts.append(counts[-1] + (y is not None))
    smoothed: list[Point] = []
    for index, (x, y) in enumerate(points):
        half = max(min(reach, index, len(points) - 1 - index), reach // 5)
        low, high = max(0, index - half), min(len(points), index + half + 1)
        mean = None if y is None else (sums[high] - sums[low]) / (counts[high] - counts[low])
        smoothed.append((x, mean))
    return smoothed


def raw_and_smooth(name: str, points: list[Point], colour: str, min_points: int) -> list[Series]:
    """Return one line or, for at least ``min_points`` points, a faint line of all steps and a
    smoothed line on top of it."""
    if len(points) < min_points:
        return [Series(name, points, colour)]
    return [
        Series("each step", points, colour, "faint"),
        Series("smoothed", smooth(points), colour),
    ]


class Mark(NamedTuple):
    """A tick or a marker. ``svg`` is its coordinate in the SVG, ``at`` its position in percent of
    the plot area."""

    svg: str
    at: str
    text: str


class ReadOut(TypedDict):
    """The figures of a series for the tooltip."""

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
    """A plot for the template."""

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
    """Draw a plot.

    Args:
        plot: the plot.
        x_range: the first and the last step shown.
        markers: (step, text) of each vertical line.
    """
    x_low, x_high = x_range if x_range[1] > x_range[0] else (x_range[0] - 1, x_range[0] + 1)
    # A noisy line needs the most points.
    weights = [3 if series.kind == "faint" else 1 for series in plot.series]
    is_stacked = any(series.kind == "area" for series in plot.series)
    reduce = bucket_means if is_stacked else downsample
    reduced = [
        Series(
            series.name,
            reduce(series.points, max(5, MAX_POINTS * weight // sum(weights))),
            series.colour,
            series.kind,
        )
        for series, weight in zip(plot.series, weights, strict=True)
    ]
    tops = _stack(reduced) if is_stacked else [series.points for series in reduced]
    y_low, y_high = _y_range(
        [y for points in tops for _, y in points if y is not None], plot.from_zero or is_stacked
    )

    def place(x: float, y: float) -> tuple[float, float]:
        return (x - x_low) / (x_high - x_low) * WIDTH, (1 - (y - y_low) / (y_high - y_low)) * HEIGHT

    y_ticks, x_ticks = ticks(y_low, y_high), ticks(x_low, x_high, integers=True)
    y_step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else abs(y_ticks[0] if y_ticks else 1.0)
    x_step = x_ticks[1] - x_ticks[0] if len(x_ticks) > 1 else 1.0
    shapes = []
    bottom: list[Point] = [(x, 0.0) for x, _ in tops[0]] if tops else []
    for series, top in zip(reduced, tops, strict=True):
        if series.kind == "area":
            path, bottom = _area(bottom, top, place), top
        else:
            path = _path(series.points, place, series.kind == "dots")
        shapes.append(Shape(series.name, series.colour, series.kind, path))
    return {
        "title": plot.title,
        "unit": plot.unit,
        "wide": plot.wide,
        "notes": plot.notes,
        "shapes": shapes,
        "y_ticks": [_mark(place(x_low, y)[1], HEIGHT, tick_label(y, y_step)) for y in y_ticks],
        "x_ticks": [_mark(place(x, y_low)[0], WIDTH, tick_label(x, x_step)) for x in x_ticks],
        "markers": [
            _mark(place(x, y_low)[0], WIDTH, text) for x, text in markers if x_low <= x <= x_high
        ],
        "x_range": (x_low, x_high),
        "series": [
            {
                "name": series.name,
                "colour": series.colour,
                "x": [x for x, _ in series.points],
                "y": [None if y is None else float(f"{y:.6g}") for _, y in series.points],
            }
            for series in reduced
        ],
    }


def _mark(position: float, length: float, text: str) -> Mark:
    return Mark(f"{position:.1f}", f"{100 * position / length:.2f}", text)


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


def _stack(layers: list[Series]) -> list[list[Point]]:
    """Return the upper edge of each layer. A gap in a layer is a gap in all layers above it."""
    edges: list[list[Point]] = []
    for layer in layers:
        below = edges[-1] if edges else [(x, 0.0) for x, _ in layer.points]
        edges.append(
            [(x, y + base if y is not None and base is not None else None)
             for (x, y), (_, base) in zip(layer.points, below, strict=True)]
        )  # fmt: skip
    return edges


def _segments(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """Split points into segments at the gaps."""
    segments: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is not None:
            segments[-1].append((x, y))
        elif segments[-1]:
            segments.append([])
    return [segment for segment in segments if segment]


def _path(points: Sequence[Point], place: Any, dots: bool) -> str:
    parts = []
    for segment in _segments(points):
        placed = [place(x, y) for x, y in segment]
        if dots or len(placed) == 1:  # a stroke of length zero with round caps is a dot
            parts += [f"M{x:.1f} {y:.1f}h0" for x, y in placed]
        else:
            parts.append("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed))
    return "".join(parts)


def _area(bottom: Sequence[Point], top: Sequence[Point], place: Any) -> str:
    base = dict(bottom)
    parts = []
    for segment in _segments(top):
        edge = [place(x, y) for x, y in segment]
        back = [place(x, base.get(x) or 0.0) for x, _ in reversed(segment)]
        if len(edge) == 1:  # a single step is drawn as a narrow bar
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
    """Draw the plots of a run.

    Args:
        steps: the ``step`` events.
        evals: the ``eval`` events.
        start: the last ``run_start`` event.
        resumed_from: the steps from which the run was resumed.
    """
    if not steps:
        return []
    grad_norm = raw_and_smooth("gradient norm", _points(steps, "grad_norm"), "c4", 100)
    norm_notes = _gap_notes(steps, "grad_norm", "gradient norm")
    rate = Series("learning rate", _points(steps, "learning_rate"), "c3")
    plots = [
        _loss_plot(steps, evals),
        Plot("Learning rate", "", [rate], from_zero=True),
        _throughput_plot(steps, (start.get("derived") or {}).get("global_batch_size")),
        _time_plot(steps),
        _memory_plot(steps),
        Plot("Gradient norm", "", grad_norm, from_zero=True, notes=norm_notes),
        *_expert_plots(steps),
        *_rollout_plots(steps),
    ]
    markers: list[tuple[int, str]] = [
        (step, PageText("resumed at step {step}", step=f"{step:,}")) for step in resumed_from
    ]
    all_steps = [event["step"] for event in (*steps, *evals)]
    x_range = (min(all_steps), max(all_steps))
    return [draw(plot, x_range, markers) for plot in plots if plot.notes or plot.has_values()]


def _points(events: Sequence[StepEvent | EvalEvent], key: str) -> list[Point]:
    return [(event["step"], formatting.finite(event.get(key))) for event in events]


def _gap_notes(events: list[StepEvent], key: str, name: str) -> list[str]:
    """Return a note if a plot has gaps because of values that are not finite."""
    numbers = [formatting.number(event.get(key)) for event in events]
    count = sum(number is not None and not math.isfinite(number) for number in numbers)
    if not count:
        return []
    return [
        PageText(
            "Gaps: the {name} of {count} of {total} logged steps is not finite.",
            name=name,
            count=f"{count:,}",
            total=f"{len(events):,}",
        )
    ]


def _loss_plot(steps: list[StepEvent], evals: list[EvalEvent]) -> Plot:
    series = raw_and_smooth("loss", _points(steps, "loss"), "c1", 10)
    if evals:
        series.append(Series("evaluation", _points(evals, "loss"), "c2", "dots"))
    return Plot("Training loss", "", series, wide=True, notes=_gap_notes(steps, "loss", "loss"))


def _throughput_plot(steps: list[StepEvent], batch_size: Any) -> Plot:
    rates = [throughput(step, batch_size) for step in steps]
    last_unit = rates[-1][1]
    points: list[Point] = [
        (step["step"], rate if unit == last_unit else None)
        for step, (rate, unit) in zip(steps, rates, strict=True)
    ]
    series = raw_and_smooth("throughput", points, "c5", 100)
    return Plot("Throughput", last_unit, series, from_zero=True)


def _memory_plot(steps: list[StepEvent]) -> Plot:
    rows = [
        (step["step"], [formatting.finite(size) for size in _as_list(step.get("memory_bytes"))])
        for step in steps
    ]
    known = [[size for size in sizes if size is not None] for _, sizes in rows]
    world_size = max((len(sizes) for _, sizes in rows), default=0)
    top = max((size for sizes in known for size in sizes), default=0.0)
    scale, unit = 1.0, "B"
    for power, name in ((10, "KiB"), (20, "MiB"), (30, "GiB")):
        if top >= 2.0**power:
            scale, unit = 2.0**power, name

    def points(values: Sequence[float | None]) -> list[Point]:
        return [
            (step, None if value is None else value / scale)
            for (step, _), value in zip(rows, values, strict=True)
        ]

    if world_size <= len(_RANK_COLOURS):
        series = [
            Series(
                PageText("rank {rank}", rank=rank),
                points([sizes[rank] if rank < len(sizes) else None for _, sizes in rows]),
                _RANK_COLOURS[rank],
            )
            for rank in range(world_size)
        ]
        return Plot("Memory of each rank", unit, series, from_zero=True)
    series = [
        Series("maximum", points([max(sizes, default=None) for sizes in known])),
        Series("minimum", points([min(sizes, default=None) for sizes in known]), "c2"),
    ]
    return Plot(PageText("Memory, {ranks} ranks", ranks=world_size), unit, series, from_zero=True)


def _expert_plots(steps: list[StepEvent]) -> list[Plot]:
    """Plot the load of the experts and their auxiliary loss. A model without experts has
    neither."""
    load: list[Point] = []
    loss: list[Point] = []
    for step in steps:
        experts = step.get("experts")
        ratio = experts["max_over_mean"] if experts else None
        load.append((step["step"], formatting.finite(ratio)))
        loss.append((step["step"], formatting.finite(experts["aux_loss"] if experts else None)))
    return [
        Plot("Load of the experts, maximum over mean", "", [Series("load", load, "c6")]),
        Plot("Auxiliary loss of the experts", "", [Series("auxiliary loss", loss, "c7")]),
    ]


def _rollout_plots(steps: list[StepEvent]) -> list[Plot]:
    """Plot the figures of rollouts. A run that generates no completions has none."""
    names = dict.fromkeys(name for step in steps for name in step.get("rewards") or {})
    rewards = [Series("reward", _points(steps, "reward"), "c1")]
    for number, name in enumerate(names if len(names) > 1 else ()):
        values: list[Point] = [
            (step["step"], formatting.finite((step.get("rewards") or {}).get(name)))
            for step in steps
        ]
        rewards.append(Series(name, values, _RANK_COLOURS[(number + 1) % len(_RANK_COLOURS)]))
    length = Series("completion length", _points(steps, "completion_length"), "c3")
    entropy = Series("entropy", _points(steps, "entropy"), "c6")
    divergence = Series("divergence", _points(steps, "kl"), "c7")
    clipped = Series("clipped ratios", _points(steps, "clip_ratio"), "c5")
    drawn = Series("difference", _points(steps, "logprob_diff"), "c2")
    factors = Series("mean ratio", _points(steps, "importance_ratio"), "c4")
    limited = Series("outside of the limits", _points(steps, "importance_clipped"), "c5")
    return [
        Plot("Reward", "", rewards),
        Plot("Completion length", "tokens", [length], from_zero=True),
        Plot("Entropy of the tokens", "", [entropy], from_zero=True),
        Plot("Divergence from the reference model", "", [divergence]),
        Plot("Clipped ratios", "", [clipped], from_zero=True),
        Plot("Log-probabilities when drawn and in training", "", [drawn], from_zero=True),
        Plot("Ratios that correct for the engine", "", [factors, limited], from_zero=True),
    ]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _time_plot(steps: list[StepEvent]) -> Plot:
    """Plot the parts of a step. The name of the first layer depends on what it includes, because
    parts that were not measured are part of it."""
    step_s = [formatting.finite(step.get("step_time_s")) for step in steps]
    top = max((seconds for seconds in step_s if seconds is not None), default=0.0)
    scale, unit = (1.0, "s") if top >= 1 else (1e-3, "ms")
    waits = [(key, name, colour) for key, name, colour in
             (("data_wait_s", "data wait", "c2"), ("comm_wait_s", "communication wait", "c4"))
             if any(formatting.finite(step.get(key)) is not None for step in steps)]  # fmt: skip
    rest: list[Point] = []
    layers: dict[str, list[Point]] = {key: [] for key, *_ in waits}
    for step, seconds in zip(steps, step_s, strict=True):
        waited = {key: formatting.finite(step.get(key)) or 0.0 for key in layers}
        for key, value in waited.items():
            layers[key].append((step["step"], None if seconds is None else value / scale))
        computed = None
        if seconds is not None:
            computed = max(0.0, seconds - sum(waited.values())) / scale
        rest.append((step["step"], computed))
    world_size = max(len(_as_list(step.get("memory_bytes"))) for step in steps)
    rest_name = "compute"
    if "data_wait_s" not in layers:
        rest_name += " and data wait"
    if "comm_wait_s" not in layers and world_size != 1:
        rest_name += " and communication"
    stack = [Series(rest_name, rest, "c1", "area")]
    stack += [Series(name, layers[key], colour, "area") for key, name, colour in waits]
    return Plot("Time per step", unit, stack, from_zero=True)

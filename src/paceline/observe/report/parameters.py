"""Where the runs of a sweep are on the axes of their parameters and of their metric: for the
scatter plots and the parallel coordinates of ``sweep.html`` and of the panel."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from paceline.core import formatting
from paceline.observe.report.axes import tick_label, ticks

if TYPE_CHECKING:
    from paceline.config.yaml_read import YamlValue

_MAX_VALUE_TICKS = 5
# An axis whose largest value is this many times its smallest one is logarithmic.
_LOG_RATIO = 20.0


class Trial(NamedTuple):
    """A run of a sweep. ``metric``: None if unknown."""

    name: str
    status: str
    values: Mapping[str, YamlValue]
    metric: float | None


class AxisTick(TypedDict):
    """A label of an axis. ``at``: from 0 to 1."""

    at: float
    text: str


class ParameterAxis(TypedDict):
    """An axis. ``name``: the last part of ``key``."""

    key: str
    name: str
    ticks: list[AxisTick]
    is_log: bool


class PlacedTrial(TypedDict):
    """A run on the axes.

    Args:
        text: its parameters and its metric.
        at: its position on each axis of the parameters, from 0 to 1; None if it has no value.
        metric_at: its position on the axis of the metric.
        share: 0 for the best run, 1 for the worst.
    """

    name: str
    status: str
    text: str
    at: list[float | None]
    metric_at: float
    share: float


class ParameterPlots(TypedDict):
    """What the plots of a sweep show."""

    axes: list[ParameterAxis]
    metric: ParameterAxis
    trials: list[PlacedTrial]


class _Scale:
    """Places the values of a parameter on an axis: numbers by their size, others side by side."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.is_numeric = all(_is_number(value) for value in values)
        self.texts = list(dict.fromkeys(value_text(value) for value in values))
        numbers = sorted({float(value) for value in values}) if self.is_numeric else []
        self.numbers = numbers
        self.is_log = bool(numbers) and numbers[0] > 0 and numbers[-1] >= _LOG_RATIO * numbers[0]

    def place(self, value: Any) -> float:
        if not self.is_numeric:
            return self.texts.index(value_text(value)) / max(1, len(self.texts) - 1)
        low, high, number = self.numbers[0], self.numbers[-1], float(value)
        if self.is_log:
            low, high, number = math.log(low), math.log(high), math.log(number)
        return (number - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[AxisTick]:
        if not self.is_numeric:
            count = max(1, len(self.texts) - 1)
            return [{"at": index / count, "text": text} for index, text in enumerate(self.texts)]
        if len(self.numbers) <= _MAX_VALUE_TICKS:
            return [{"at": self.place(value), "text": f"{value:.4g}"} for value in self.numbers]
        low, high = self.numbers[0], self.numbers[-1]
        if self.is_log:
            powers = range(
                math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1
            )
            shown = [10.0**power for power in powers][:: max(1, len(powers) // _MAX_VALUE_TICKS)]
            labels = [f"{value:g}" for value in shown]
        else:
            shown = ticks(low, high)
            step = shown[1] - shown[0] if len(shown) > 1 else abs(shown[0])
            labels = [tick_label(value, step) for value in shown]
        if len(shown) < 2:
            shown, labels = [low, high], [f"{low:.3g}", f"{high:.3g}"]
        places = [self.place(value) for value in shown]
        return [{"at": at, "text": text} for at, text in zip(places, labels, strict=True)]


def place_trials(trials: Sequence[Trial], metric: str, maximize: bool) -> ParameterPlots | None:
    """Place the runs that have a metric on the axes. Return None if fewer than two have one, or no
    parameter has several values.

    Args:
        trials: the runs of a sweep.
        metric: the name of the metric.
        maximize: whether a higher value is better.
    """
    known = [trial for trial in trials if trial.metric is not None and math.isfinite(trial.metric)]
    scales = {
        key: scale
        for key in dict.fromkeys(key for trial in known for key in trial.values)
        if len((scale := _Scale([t.values[key] for t in known if key in t.values])).texts) > 1
    }
    if len(known) < 2 or not scales:
        return None
    metric_scale = _Scale([trial.metric for trial in known])
    order = sorted(known, key=lambda trial: trial.metric or 0.0, reverse=maximize)
    return {
        "axes": [_axis(key, scale) for key, scale in scales.items()],
        "metric": _axis(metric, metric_scale),
        "trials": [
            {
                "name": trial.name,
                "status": trial.status,
                "text": _describe(trial, metric, scales),
                "at": [
                    scale.place(trial.values[key]) if key in trial.values else None
                    for key, scale in scales.items()
                ],
                "metric_at": metric_scale.place(trial.metric),
                "share": number / (len(order) - 1),
            }
            for number, trial in enumerate(order)
        ],
    }


def value_text(value: Any) -> str:
    """Return a value of a parameter as text, numbers with four digits."""
    if isinstance(value, str):
        return value
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def _axis(key: str, scale: _Scale) -> ParameterAxis:
    name = key.rpartition(".")[2]
    return {"key": key, "name": name, "ticks": scale.ticks(), "is_log": scale.is_log}


def _describe(trial: Trial, metric: str, scales: Mapping[str, _Scale]) -> str:
    values = [
        f"{key.rpartition('.')[2]} {value_text(trial.values[key])}"
        for key in scales
        if key in trial.values
    ]
    return f"{', '.join(values)}: {metric} {formatting.loss(trial.metric)}"


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and formatting.finite(value) is not None

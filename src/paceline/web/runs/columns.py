"""The steps of a run as columns of numbers, and their reduction to the points of a plot."""

from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np

from paceline.core.events import Event
from paceline.core.formatting import max_over_ranks, number
from paceline.web.files import as_object

#: The series of a run, and their units.
SERIES = {
    "loss": "",
    "learning_rate": "",
    "grad_norm": "",
    "tokens_per_second": "1/s",
    "samples_per_second": "1/s",
    "flops_per_device_s": "FLOP/s, per device",
    "mfu": "",
    "step_time_s": "s",
    "memory_bytes": "bytes, of the fullest rank",
    "data_wait_s": "s",
    "comm_wait_s": "s",
    "traffic_bytes": "bytes, of the busiest rank",
    "expert_load": "tokens of the busiest expert, by the mean of its layer",
    "aux_loss": "",
    "reward": "",
    "completion_length": "tokens",
    "entropy": "nats",
    "kl": "nats",
    "clip_ratio": "",
    "logprob_diff": "nats",
    "importance_ratio": "",
}
_OF_ROLLOUTS = (
    "reward",
    "completion_length",
    "entropy",
    "kl",
    "clip_ratio",
    "logprob_diff",
    "importance_ratio",
)
ROW = np.dtype(
    [
        ("offset", "i8"),
        ("step", "i8"),
        ("time", "f8"),
        ("tokens", "f8"),
        *[(name, "f4") for name in SERIES],
    ]
)
_CHUNK_ROWS = 1 << 15
#: 1,048,576 rows of 116 bytes: 116 MiB. Of a longer run, every second, fourth, … step is kept.
MAX_ROWS = 1 << 20
_MAX_STEP = 1 << 53
_MAX_FLOAT = 10**300


class Columns:
    """Rows of :data:`ROW`, ordered by step. A chunk is never moved, so readers need no lock."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self.max_rows = max_rows
        self.clear()

    def clear(self) -> None:
        self.chunks: list[np.ndarray] = []
        self.rows = 0
        self.every = 1  # one in this many steps is kept
        self.num_steps = 0  # of all steps, kept or not

    @property
    def size_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    def append(self, rows: list[tuple[Any, ...]]) -> None:
        """Append rows in ascending order of their steps."""
        if self.every > 1:
            numbered = enumerate(rows, self.num_steps)
            retained = [row for index, row in numbered if index % self.every == 0]
        else:
            retained = rows
        self.num_steps += len(rows)
        with np.errstate(over="ignore"):  # a number too large for its column becomes infinite
            block = np.array(retained, dtype=ROW)
        while len(block):
            used = self.rows % _CHUNK_ROWS
            if used == 0 and self.rows // _CHUNK_ROWS == len(self.chunks):
                self.chunks.append(np.empty(_CHUNK_ROWS, dtype=ROW))
            part = block[: _CHUNK_ROWS - used]
            self.chunks[self.rows // _CHUNK_ROWS][used : used + len(part)] = part
            self.rows += len(part)
            block = block[len(part) :]
        while self.rows > self.max_rows:
            self._halve()

    def cut_after(self, step: int) -> None:
        """Remove the rows of all steps after ``step``."""
        rows = int(np.searchsorted(self.column("step"), step, side="right"))
        if rows < self.rows:
            self.num_steps = rows * self.every
            self.rows = rows
            del self.chunks[-(-rows // _CHUNK_ROWS) :]

    def _halve(self) -> None:
        retained = self.slice(0, self.rows)[::2]
        self.every *= 2
        self.rows = len(retained)
        self.chunks = [
            np.resize(retained[begin : begin + _CHUNK_ROWS], _CHUNK_ROWS)
            for begin in range(0, self.rows, _CHUNK_ROWS)
        ]

    def column(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Return the values of a column in the rows ``[begin, end)``."""
        end = self.rows if end is None else min(end, self.rows)
        return self._concatenate([chunk[name] for chunk in self.chunks], ROW[name], begin, end)

    def slice(self, begin: int, end: int) -> np.ndarray:
        """Return a copy of the rows ``[begin, end)``."""
        return self._concatenate(self.chunks, ROW, begin, end)

    def _concatenate(
        self, chunks: list[np.ndarray], dtype: np.dtype, begin: int, end: int
    ) -> np.ndarray:
        first = begin // _CHUNK_ROWS
        chunks = chunks[first : -(-end // _CHUNK_ROWS)]
        rows = np.concatenate(chunks) if chunks else np.empty(0, dtype=dtype)
        return rows[begin - first * _CHUNK_ROWS : end - first * _CHUNK_ROWS]


def step_range(steps: np.ndarray, start: int | None, end: int | None) -> tuple[int, int]:
    """Return the range of rows whose steps are between ``start`` and ``end``, both included."""
    low = 0 if start is None else int(np.searchsorted(steps, start, side="left"))
    high = len(steps) if end is None else int(np.searchsorted(steps, end, side="right"))
    return low, max(low, high)


def step_row(
    event: Event, offset: int, previous: tuple[int, float] | None
) -> tuple[Any, ...] | None:
    """Return the row of a ``step`` event; None if it has no valid step.

    Args:
        event: the event.
        offset: the byte of the log at which its line begins.
        previous: the step and the tokens of the row before.
    """
    step = event.get("step")
    if type(step) is not int or not 0 <= step < _MAX_STEP:
        return None
    seconds, tokens = _figure(event.get("step_time_s")), _figure(event.get("tokens"))
    samples, traffic = _figure(event.get("samples")), event.get("traffic")
    previous_step, total_tokens = previous or (0, 0.0)
    if tokens == tokens:  # not NaN
        total_tokens += tokens * (step - previous_step)
    sent = np.nan
    if isinstance(traffic, dict) and traffic:
        sent = sum(_figure(size) for size in traffic.values())
    experts = as_object(event.get("experts"))
    return (
        offset,
        step,
        _figure(event.get("time")),
        total_tokens,
        _figure(event.get("loss")),
        _figure(event.get("learning_rate")),
        _figure(event.get("grad_norm")),
        tokens / seconds if seconds > 0 else np.nan,
        samples / seconds if seconds > 0 else np.nan,
        _figure(event.get("flops_per_device_s")),
        _figure(event.get("mfu")),
        seconds,
        _max_memory(event.get("memory_bytes")),
        _figure(event.get("data_wait_s")),
        _figure(event.get("comm_wait_s")),
        sent,
        _figure(experts.get("max_over_mean")),
        _figure(experts.get("aux_loss")),
        *(_figure(event.get(name)) for name in _OF_ROLLOUTS),
    )


def _figure(value: Any) -> Any:
    kind = type(value)
    if kind is float or (kind is int and -_MAX_FLOAT < value < _MAX_FLOAT):  # nearly always
        return value
    figure = number(value) if kind is not int else None
    return np.nan if figure is None else figure


def _max_memory(values: Any) -> float:
    # Nearly always a list of integers, which does not need the checks of max_over_ranks().
    try:
        size = max(values) if type(values) is list else None
    except (TypeError, ValueError):
        size = None
    if type(size) is int and size < _MAX_FLOAT:
        return size
    known_size = max_over_ranks(values)
    return np.nan if known_size is None else known_size


class Curves(TypedDict):
    """Columns in buckets. ``series``: name → mean, min and max."""

    step: list[int]
    time: list[float | None]
    tokens: list[float | None]
    series: dict[str, dict[str, list[float | None]]]


def thin(column: Callable[[str], np.ndarray], names: list[str], points: int) -> Curves:
    """Reduce columns to at most ``points`` buckets with the same number of rows each.

    A bucket has the step, time and tokens of its last row. Values that are not finite are left out
    of its mean, minimum and maximum.

    Args:
        column: returns the values of the column with a name.
        names: the series.
        points: the maximum number of buckets.
    """
    steps = column("step")
    count = len(steps)
    edges = np.linspace(0, count, min(points, count) + 1).astype(np.int64)
    ends = edges[1:] - 1
    return {
        "step": steps[ends].tolist(),
        "time": _numbers(column("time")[ends], 14),
        "tokens": _numbers(column("tokens")[ends], 14),
        "series": {name: _buckets(column(name), edges[:-1]) for name in names},
    }


def _buckets(values: np.ndarray, begins: np.ndarray) -> dict[str, list[float | None]]:
    if len(begins) == len(values):
        same = _numbers(values)
        return {"mean": same, "min": same, "max": same}
    wide = values.astype(np.float64)
    wide[~np.isfinite(wide)] = np.nan
    lows, highs = np.fmin.reduceat(wide, begins), np.fmax.reduceat(wide, begins)
    unknown = np.isnan(wide)
    sizes = np.diff(begins, append=len(values))
    wide[unknown] = 0.0
    with np.errstate(all="ignore"):
        means = np.add.reduceat(wide, begins) / (
            sizes - np.add.reduceat(unknown, begins, dtype=np.int64)
        )
    return {"mean": _numbers(means), "min": _numbers(lows), "max": _numbers(highs)}


def _numbers(values: np.ndarray, digits: int = 7) -> list[float | None]:
    """Return numbers with this many significant digits for JSON; None for those not finite."""
    return [
        float(f"{value:.{digits}g}") if is_finite else None
        for value, is_finite in zip(values.tolist(), np.isfinite(values).tolist(), strict=True)
    ]

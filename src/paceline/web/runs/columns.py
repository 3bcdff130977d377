"""The steps of a run as columns of numbers, and their thinning for a plot."""

from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np

from paceline.core.events import Event
from paceline.core.formatting import fullest, number

#: What a series can show, and its unit; each is of one step.
SERIES = {
    "loss": "",
    "learning_rate": "",
    "grad_norm": "",
    "tokens_per_second": "1/s",
    "samples_per_second": "1/s",
    "step_time_s": "s",
    "memory_bytes": "bytes, of the fullest rank",
    "data_wait_s": "s",
    "comm_wait_s": "s",
    "traffic_bytes": "bytes, of the busiest rank",
}
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
#: 1,048,576 rows of 76 bytes: 76 MiB. Of a longer run every second, fourth … step is kept.
MAX_ROWS = 1 << 20
_MAX_STEP = 1 << 53
_LARGEST = 10**300


class Columns:
    """Rows of :data:`ROW` in the order of their steps; a chunk never moves, so readers need no lock
    of their own."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self.max_rows = max_rows
        self.clear()

    def clear(self) -> None:
        self.chunks: list[np.ndarray] = []
        self.rows = 0
        self.every = 1  # one in so many steps is kept
        self.num_steps = 0  # that count, kept or not

    @property
    def size_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    def append(self, rows: list[tuple[Any, ...]]) -> None:
        """Add rows, each of a higher step than the one before."""
        kept = (
            rows
            if self.every == 1
            else [row for at, row in enumerate(rows, self.num_steps) if at % self.every == 0]
        )
        self.num_steps += len(rows)
        with np.errstate(over="ignore"):  # a figure too large for the column is as good as infinite
            block = np.array(kept, dtype=ROW)
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
        """Leave out every row of a step after ``step``."""
        kept = int(np.searchsorted(self.column("step"), step, side="right"))
        if kept < self.rows:
            self.num_steps = kept * self.every
            self.rows = kept
            del self.chunks[-(-kept // _CHUNK_ROWS) :]

    def _halve(self) -> None:
        kept, self.every = self.slice(0, self.rows)[::2], self.every * 2
        self.rows = len(kept)
        self.chunks = [
            np.resize(kept[at : at + _CHUNK_ROWS], _CHUNK_ROWS)
            for at in range(0, len(kept), _CHUNK_ROWS)
        ]

    def column(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """A column's rows ``[begin, end)``."""
        end = self.rows if end is None else min(end, self.rows)
        first, last = begin // _CHUNK_ROWS, -(-end // _CHUNK_ROWS)
        parts = [chunk[name] for chunk in self.chunks[first:last]]
        whole = np.concatenate(parts) if parts else np.empty(0, dtype=ROW[name])
        return whole[begin - first * _CHUNK_ROWS : end - first * _CHUNK_ROWS]

    def slice(self, begin: int, end: int) -> np.ndarray:
        """Rows ``[begin, end)``, copied."""
        first, last = begin // _CHUNK_ROWS, -(-end // _CHUNK_ROWS)
        parts = self.chunks[first:last]
        whole = np.concatenate(parts) if parts else np.empty(0, dtype=ROW)
        return whole[begin - first * _CHUNK_ROWS : end - first * _CHUNK_ROWS]


def step_row(event: Event, offset: int, before: tuple[int, float] | None) -> tuple[Any, ...] | None:
    """A row of a ``step`` event; None where it has no step. ``before``: the step and the tokens of
    the row before."""
    step = event.get("step")
    if type(step) is not int or not 0 <= step < _MAX_STEP:
        return None
    get = event.get
    seconds, tokens, samples = (
        _figure(get("step_time_s")),
        _figure(get("tokens")),
        _figure(get("samples")),
    )
    last_step, last_tokens = before or (0, 0.0)
    traffic = get("traffic")
    sent = (
        sum(_figure(one) for one in traffic.values())
        if isinstance(traffic, dict) and traffic
        else np.nan
    )
    memory = _fullest(get("memory_bytes"))
    return (
        offset,
        step,
        _figure(get("time")),
        last_tokens + (tokens * (step - last_step) if tokens == tokens else 0.0),
        _figure(get("loss")),
        _figure(get("learning_rate")),
        _figure(get("grad_norm")),
        tokens / seconds if seconds > 0 else np.nan,
        samples / seconds if seconds > 0 else np.nan,
        seconds,
        memory,
        _figure(get("data_wait_s")),
        _figure(get("comm_wait_s")),
        sent,
    )


def _figure(value: Any) -> Any:
    kind = type(value)
    if kind is float or (kind is int and -_LARGEST < value < _LARGEST):  # nearly always
        return value  # a float, or an int that fits one
    figure = number(value) if kind is not int else None
    return np.nan if figure is None else figure


def _fullest(values: Any) -> float:
    try:
        # as fullest(), which has time for all that may stand there
        most = max(values) if type(values) is list else None
    except (TypeError, ValueError):
        most = None
    if type(most) is int and most < _LARGEST:
        return most
    found = fullest(values)
    return np.nan if found is None else found


class Curves(TypedDict):
    """Columns in buckets; ``series``: name → mean, min and max."""

    step: list[int]
    time: list[float | None]
    tokens: list[float | None]
    series: dict[str, dict[str, list[float | None]]]


def thin(column: Callable[[str], np.ndarray], names: list[str], points: int) -> Curves:
    """The rows that ``column(name)`` gives of each column, in at most ``points`` buckets of as many
    rows each: ``{step, time, tokens, series}``. A bucket stands at its last step; figures that are
    not finite are left out of its mean, least and greatest."""
    steps = column("step")
    count = len(steps)
    edges = (
        np.linspace(0, count, min(points, count) + 1).astype(np.int64)
        if count
        else np.zeros(1, dtype=np.int64)
    )
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
    least, greatest = np.fmin.reduceat(wide, begins), np.fmax.reduceat(wide, begins)
    unknown = np.isnan(wide)
    sizes = np.diff(begins, append=len(values))
    wide[unknown] = 0.0
    with np.errstate(all="ignore"):
        means = np.add.reduceat(wide, begins) / (
            sizes - np.add.reduceat(unknown, begins, dtype=np.int64)
        )
    return {"mean": _numbers(means), "min": _numbers(least), "max": _numbers(greatest)}


def _numbers(values: np.ndarray, digits: int = 7) -> list[float | None]:
    """For JSON: so many digits; None for what is not finite."""
    finite = np.isfinite(values)
    return [
        float(f"{one:.{digits}g}") if known else None
        for one, known in zip(values.tolist(), finite.tolist(), strict=True)
    ]

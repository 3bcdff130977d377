"""The record of a run: frames with the state of each rank, the messages between them, and spans of
time. Text, JSON, pages and pictures are all made from it.

A topic only produces a :class:`Recording`. Every value in it comes from the run; checks compare
what is shown with what the run's traffic counters or a reference recorded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

#: How a cell is marked: changed in this frame, complete, wrong, or not in use.
Tone = Literal["", "new", "done", "wrong", "idle"]


@dataclass(frozen=True)
class Cell:
    """A value of a rank.

    Args:
        ranks: ranks whose values it contains, shown as colored stripes.
        fill: filled share of the cell, from 0 to 1.
        weight: width relative to the other cells of the row.
    """

    text: str
    ranks: tuple[int, ...] = ()
    fill: float = 0.0
    tone: Tone = ""
    weight: float = 1.0


@dataclass(frozen=True)
class DrawnRow:
    """A row of a rank: cells, or a bar for an amount of memory.

    Args:
        size_bytes: length of the bar; None for a row of cells.
        expected_bytes: prediction, shown as a dashed mark.
    """

    label: str
    cells: tuple[Cell, ...] = ()
    size_bytes: int | None = None
    expected_bytes: int | None = None


@dataclass(frozen=True)
class DrawnMessage:
    """A message between two actors, given as positions in :attr:`Recording.actors`.

    Args:
        row, cells: row and range of cells that it starts from and arrives at, if it has them.
    """

    source: int
    target: int
    label: str
    size_bytes: int
    row: int | None = None
    cells: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Collective:
    """A collective of the backend. ``sent_bytes``: bytes that each of its actors sends."""

    kind: str
    actors: tuple[int, ...]
    label: str
    sent_bytes: int


@dataclass(frozen=True)
class Frame:
    """A moment of the run.

    Args:
        rows: rows of each actor.
        phase: name of the phase, if the run has phases.
        time_s: time on the clock of the spans, if there are spans.
        is_key: whether a static picture shows it.
    """

    caption: str
    rows: tuple[tuple[DrawnRow, ...], ...]
    phase: str = ""
    messages: tuple[DrawnMessage, ...] = ()
    collectives: tuple[Collective, ...] = ()
    time_s: float | None = None
    is_key: bool = False


@dataclass(frozen=True)
class Span:
    """A time span of an actor in a lane of the timeline, in seconds."""

    actor: int
    lane: str
    kind: str
    label: str
    start_s: float
    end_s: float
    size_bytes: int | None = None


@dataclass(frozen=True)
class Check:
    """A comparison of what is shown with what was recorded."""

    name: str
    shown: object
    recorded: object
    passed: bool

    @classmethod
    def equal(cls, name: str, shown: object, recorded: object) -> "Check":
        return cls(name, shown, recorded, shown == recorded)


@dataclass(frozen=True)
class Recording:
    """The record of a run.

    Args:
        about: description of the algorithm in a few sentences.
        actors: names of the rows of the picture: ranks, devices, servers.
        facts: labels and values that summarize the run.
        figures: further keys of the JSON output.
        columns: number of actors next to each other in the picture.
    """

    topic: str
    title: str
    about: str
    actors: tuple[str, ...]
    frames: tuple[Frame, ...]
    checks: tuple[Check, ...]
    facts: tuple[tuple[str, str], ...] = ()
    spans: tuple[Span, ...] = ()
    figures: Mapping[str, object] = field(default_factory=dict)
    columns: int = 1

    @property
    def is_correct(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def end_s(self) -> float:
        """End of the timeline; 0 without spans."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def bytes_sent(self) -> list[int]:
        """Bytes that each actor sends in the frames."""
        return bytes_shown(self.frames, len(self.actors))

    def content(self) -> dict[str, object]:
        """Return what `--json` prints."""
        return {
            "topic": self.topic,
            "title": self.title,
            "actors": list(self.actors),
            "bytes_sent": self.bytes_sent,
            **self.figures,
            "frames": [asdict(frame) for frame in self.frames],
            "spans": [asdict(span) for span in self.spans],
            "facts": [{"name": name, "value": value} for name, value in self.facts],
            "checks": [asdict(check) for check in self.checks],
            "result_ok": self.is_correct,
        }


def bytes_shown(frames: Iterable[Frame], num_actors: int) -> list[int]:
    """Return the bytes that each actor sends in ``frames``."""
    sent = [0] * num_actors
    for frame in frames:
        for message in frame.messages:
            sent[message.source] += message.size_bytes
        for collective in frame.collectives:
            for actor in collective.actors:
                sent[actor] += collective.sent_bytes
    return sent


def check_traffic(frames: Iterable[Frame], recorded: Sequence[int]) -> Check:
    """Compare the bytes that the frames show with those that the ranks' counters recorded."""
    shown = bytes_shown(frames, len(recorded))
    return Check.equal("bytes sent by each rank", shown, list(recorded))


def cells_of(values: Iterable[float], tone: Tone = "") -> tuple[Cell, ...]:
    """Return a cell for each number."""
    return tuple(Cell(number_text(value), tone=tone) for value in values)


def idle_cells(count: int) -> tuple[Cell, ...]:
    return (Cell("", tone="idle"),) * count


def number_text(value: float) -> str:
    """Return a number with three significant digits."""
    # `+ 0.0` makes a negative zero positive.
    return f"{value + 0.0:.3g}".replace("e-0", "e-").replace("e+0", "e")


def on_step_clock(spans: Iterable[Span]) -> tuple[list[Span], float]:
    """Return the spans sorted by actor and start, on a clock on which the first one starts at 0,
    and the time that was subtracted."""
    listed = list(spans)
    begin = min(span.start_s for span in listed)
    moved = [
        replace(span, start_s=span.start_s - begin, end_s=span.end_s - begin) for span in listed
    ]
    return sorted(moved, key=lambda span: (span.actor, span.start_s)), begin


def stack_lanes(spans: Sequence[Span]) -> list[tuple[int, str, list[list[Span]]]]:
    """Return the lanes of the timeline as (actor, lane, rows). Spans of a row do not overlap."""
    lanes: dict[tuple[int, str], list[list[Span]]] = {}
    for span in sorted(spans, key=lambda span: (span.actor, span.start_s)):
        rows = lanes.setdefault((span.actor, span.lane), [])
        for row in rows:
            if row[-1].end_s <= span.start_s:
                row.append(span)
                break
        else:
            rows.append([span])
    return [(actor, lane, rows) for (actor, lane), rows in lanes.items()]

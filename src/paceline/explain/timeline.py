"""Timelines of a training step: spans, and the data of their animation."""

from collections.abc import Mapping
from typing import NotRequired, TypedDict

Moments = list[tuple[float, str]]


class Span(TypedDict):
    """A time span of a rank, in a row (``lane``) of the timeline. Times in seconds, on the clock
    that the processes of a host share until :func:`on_step_clock` is called."""

    lane: str
    kind: str
    label: str
    start: float
    end: float
    bucket: NotRequired[int]
    rank: int


def on_step_clock(spans: list[Span]) -> float:
    """Shift the spans in place so that the first one starts at 0, and sort them by rank and start.
    Return the time that was subtracted."""
    begin = min(span["start"] for span in spans)
    for span in spans:
        span["start"] -= begin
        span["end"] -= begin
    spans.sort(key=lambda span: (span["rank"], span["start"]))
    return begin


def end_of(spans: list[Span]) -> float:
    """Return the seconds from the start of the step to its end."""
    return max(span["end"] for span in spans)


def step_fact(spans: list[Span]) -> tuple[str, str]:
    return "Step", f"{1000 * end_of(spans):.1f} ms"


def gradients_fact(is_correct: bool) -> tuple[str, str]:
    return (
        "Gradients",
        "equal to those of one process" if is_correct else "NOT equal to those of one process",
    )


def captions(moments: Moments) -> list[str]:
    """Return a caption for each moment."""
    return [f"{1000 * time:.1f} ms. {text}" for time, text in moments]


def player(
    spans: list[Span],
    ranks: int,
    moments: Moments,
    row_names: list[str],
    rows: list[int],
    colors: dict[str, str],
) -> Mapping[str, object]:
    """Return the input of page.js for a timeline.

    Args:
        moments: the time and the caption of each frame.
        row_names: names of the rows.
        rows: index of the row of each span.
        colors: kind of span → color.
    """
    return {
        "kind": "timeline",
        "times": [time for time, _ in moments],
        "ranks": ranks,
        "lanes": row_names,
        "bars": [{**span, "lane": row} for span, row in zip(spans, rows, strict=True)],
        "end": end_of(spans),
        "colors": colors,
    }

"""What the explanations of a step on a clock have in common: spans, and the picture that plays
them."""

from collections.abc import Mapping
from typing import NotRequired, TypedDict

Moments = list[tuple[float, str]]


class Span(TypedDict):
    """A stretch of time of a rank, in a lane of the picture. Seconds, on the clock that the
    processes of a host share until :func:`on_step_clock` is called."""

    lane: str
    kind: str
    label: str
    start: float
    end: float
    bucket: NotRequired[int]
    rank: int


def on_step_clock(spans: list[Span]) -> float:
    """Put the spans on a clock that is 0 at the first of them, in the order of their ranks and
    starts. Returns the 0 of that clock."""
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
    return "Gradients", "those of one process" if is_correct else "NOT those of one process"


def captions(moments: Moments) -> list[str]:
    """Return a line for each moment at which something changes."""
    return [f"{1000 * time:.1f} ms. {text}" for time, text in moments]


def player(
    spans: list[Span],
    ranks: int,
    moments: Moments,
    lanes: list[str],
    lane_numbers: list[int],
    colors: dict[str, str],
) -> Mapping[str, object]:
    """Return what page.js draws as a timeline.

    Args:
        moments: when something changes, and what: a frame each.
        lanes: names of the rows.
        lane_numbers: the row of each span.
        colors: kind of span → color.
    """
    return {
        "kind": "timeline",
        "times": [time for time, _ in moments],
        "ranks": ranks,
        "lanes": lanes,
        "bars": [
            {**span, "lane": number} for span, number in zip(spans, lane_numbers, strict=True)
        ],
        "end": end_of(spans),
        "colours": colors,
    }

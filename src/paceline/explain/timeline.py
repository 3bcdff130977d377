"""What the explanations of a step on a clock have in common: spans, their facts, and the picture
that plays them."""

from typing import Any

Story = dict[str, Any]
Moments = list[tuple[float, str]]


def in_order(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Spans by rank, then by when they began."""
    return sorted(spans, key=lambda span: (span["rank"], span["start"]))


def shifted(spans: list[dict[str, Any]], begin: float) -> list[dict[str, Any]]:
    """The spans on a clock that is 0 at ``begin``; seconds."""
    return [{**span, "start": span["start"] - begin, "end": span["end"] - begin} for span in spans]


def end_of(story: Story) -> float:
    """Seconds from the start of the step to its end."""
    return float(max(span["end"] for span in story["spans"]))


def step_fact(story: Story) -> tuple[str, str]:
    return "Step", f"{1000 * end_of(story):.1f} ms"


def gradients_fact(story: Story) -> tuple[str, str]:
    return "Gradients", "those of one process" if story["result_ok"] else "NOT those of one process"


def gradients_line(story: Story) -> str:
    """The same fact, in a text."""
    label, value = gradients_fact(story)
    return f"{label.lower()}: {value}"


def player(
    story: Story,
    moments: Moments,
    lanes: list[str],
    bars: list[dict[str, Any]],
    colours: dict[str, str],
    **more: Any,
) -> dict[str, Any]:
    """What page.js draws as a timeline.

    Args:
        moments: when something changes, and what: a frame each.
        lanes: names of the rows.
        bars: the spans, each with the number of its ``lane``.
        colours: kind of span → colour.
    """
    return {
        "kind": "timeline",
        "captions": [f"{1000 * when:.1f} ms. {text}" for when, text in moments],
        "times": [when for when, _ in moments],
        "ranks": story["ranks"],
        "lanes": lanes,
        "bars": bars,
        "end": end_of(story),
        "colours": colours,
        **more,
    }

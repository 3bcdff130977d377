"""A recording as one HTML file that plays it step by step."""

from pathlib import Path

from paceline.explain.draw import NARROW, WIDE, Drawing
from paceline.explain.record import Recording
from paceline.explain.text import render_text
from paceline.observe.report.html import template


def render_page(recording: Recording) -> str:
    """Return the page. It loads nothing, so it works offline; all values are escaped."""
    frames = range(len(recording.frames))
    data: dict[str, list[str]] = {"captions": [_caption(recording, number) for number in frames]}
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        drawing = Drawing(recording, width)
        data[name] = [drawing.frame(number) for number in frames]
    page = template("page.html.jinja", Path(__file__).parent)
    return str(page.render(recording=recording, text=render_text(recording), data=data))


def _caption(recording: Recording, number: int) -> str:
    frame = recording.frames[number]
    return (
        frame.caption if frame.time_s is None else f"{1000 * frame.time_s:.1f} ms. {frame.caption}"
    )

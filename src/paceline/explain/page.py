"""A recording as one HTML file that plays it step by step."""

from collections.abc import Callable
from pathlib import Path

from paceline.explain.draw import NARROW, WIDE, Drawing
from paceline.explain.record import Frame, Recording
from paceline.explain.text import render_text
from paceline.messages.pages import PageText, in_chinese
from paceline.observe.report.html import template


def render_page(recording: Recording) -> str:
    """Return the page. It loads nothing, so it works offline; all values are escaped."""
    data: dict[str, dict[str, list[str]]] = {}
    for language, say in (("en", str), ("zh", _say_in_chinese)):
        captions = [say(_caption(frame)) for frame in recording.frames]
        data[language] = {"captions": captions, **_drawings(recording, say)}
    page = template("page.html.jinja", Path(__file__).parent)
    return str(page.render(recording=recording, text=render_text(recording), data=data))


def _drawings(recording: Recording, say: Callable[[str], str]) -> dict[str, list[str]]:
    """Return the drawings of all frames, for wide and for narrow windows."""
    drawings = {
        name: Drawing(recording, width, say) for name, width in (("wide", WIDE), ("narrow", NARROW))
    }
    frames = range(len(recording.frames))
    return {
        name: [drawing.frame(number) for number in frames] for name, drawing in drawings.items()
    }


def _say_in_chinese(text: str) -> str:
    return in_chinese(text) or text


def _caption(frame: Frame) -> str:
    if frame.time_s is None:
        return frame.caption
    time = f"{1000 * frame.time_s:.1f}"
    return PageText("{time} ms. {caption}", time=time, caption=frame.caption)

"""A recording as one HTML file that plays it step by step."""

from collections.abc import Iterator
from pathlib import Path

from paceline.explain.draw import NARROW, WIDE, Drawing
from paceline.explain.record import Recording
from paceline.explain.text import render_text
from paceline.messages.pages import PageText, in_chinese
from paceline.observe.report.html import template


def render_page(recording: Recording) -> str:
    """Return the page. It loads nothing, so it works offline; all values are escaped."""
    frames = range(len(recording.frames))
    captions = [_caption(recording, number) for number in frames]
    data: dict[str, object] = {
        "captions": captions,
        "captionsInChinese": [in_chinese(caption) or f"{caption}（英文）" for caption in captions],
    }
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        drawing = Drawing(recording, width)
        data[name] = [drawing.frame(number) for number in frames]
    data["chinese"] = {text: other for text in _drawn(recording) if (other := in_chinese(text))}
    page = template("page.html.jinja", Path(__file__).parent)
    return str(page.render(recording=recording, text=render_text(recording), data=data))


def _caption(recording: Recording, number: int) -> str:
    frame = recording.frames[number]
    if frame.time_s is None:
        return frame.caption
    time = f"{1000 * frame.time_s:.1f}"
    return PageText("{time} ms. {caption}", time=time, caption=frame.caption)


def _drawn(recording: Recording) -> Iterator[str]:
    """Yield the texts in the drawings, except values."""
    yield from recording.actors
    for frame in recording.frames:
        yield from (row.label for rows in frame.rows for row in rows)
        yield from (message.label for message in frame.messages)
    for span in recording.spans:
        yield from (span.lane, span.kind, span.label)

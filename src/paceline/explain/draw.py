"""Draw the frames of a recording, and its timeline, as SVG. The page, the player of the browser UI
and static pictures show the same drawings."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

from paceline.core.files import human_bytes
from paceline.explain.record import (
    Cell,
    Collective,
    DrawnMessage,
    DrawnRow,
    Frame,
    Recording,
    stack_lanes,
)
from paceline.messages.pages import PageText

WIDE, NARROW = 900, 340
_ROW, _GAP, _HEADER = 28, 4, 20
#: Widths of a character of 12, 11 and 9.5 px.
_CHAR, _SMALL_CHAR, _TINY_CHAR = 6.7, 6.0, 5.3
_MIN_CELL, _MAX_NEEDED_CELL = 30, 62
_COLORS = 6
_MIN_SCALE = 0.85
_MAX_PICTURE_FRAMES, _MAX_KEY_FRAMES = 5, 7


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


class Drawing:
    """Draws the frames of a recording at a width in pixels.

    Args:
        width: width of the place for the drawing. It becomes wider if a row has too many cells.
        say: function that returns a text in the language of the drawing.
    """

    def __init__(self, recording: Recording, width: int, say: Callable[[str], str] = str) -> None:
        self.recording, self.say = recording, say
        frames, actors = recording.frames, recording.actors
        is_narrow = width < 600
        self.columns = min(recording.columns, 2) if is_narrow else recording.columns
        self.num_rows = [
            max(len(frame.rows[actor]) for frame in frames) for actor in range(len(actors))
        ]
        self.has_header = max(self.num_rows) > 1 or self.columns > 1
        drawn = [row for frame in frames for rows in frame.rows for row in rows]
        self.labels = list(dict.fromkeys(row.label for row in drawn))
        names = self.labels if self.has_header else list(actors)
        longest = max((text_length(say(name)) for name in names), default=0.0)
        self.label_width = min(110.0 if is_narrow else 190.0, longest * _CHAR + 12)
        has_gutter = self.columns == 1 and any(
            frame.collectives or any(message.row is None for message in frame.messages)
            for frame in frames
        )
        self.gutter = (112.0 if is_narrow else 200.0) if has_gutter else 0.0
        cells_width = max(map(_cells_width, drawn), default=0.0)
        needed = self.label_width + self.gutter + cells_width + 4
        self.width = max(width, round(needed) if self.columns == 1 else 0)
        self.max_bytes = max(
            (max(row.size_bytes or 0, row.expected_bytes or 0) for row in drawn), default=0
        )
        self.boxes, self.state_height = self._place_actors()
        labels_height = 13 * max(sum(map(len, self._labels(frame))) for frame in frames) + 8
        if self.gutter:
            self.state_height = max(self.state_height, labels_height)
        self.kinds = list(dict.fromkeys(span.kind for span in recording.spans))
        self.lanes = stack_lanes(recording.spans)
        self.height = self.state_height + self._timeline_height()

    def _place_actors(self) -> tuple[list[_Box], float]:
        gap = 12.0 if self.has_header else 6.0
        box_width = (self.width - self.gutter - gap * (self.columns - 1)) / self.columns
        boxes, top = [], 2.0
        for first in range(0, len(self.num_rows), self.columns):
            line = self.num_rows[first : first + self.columns]
            height = max(line) * (_ROW + _GAP) + (_HEADER if self.has_header else 0)
            for place in range(len(line)):
                boxes.append(_Box(place * (box_width + gap), top, box_width, height))
            top += height + gap
        return boxes, top

    # -- frames
    def frame(self, number: int) -> str:
        """Return a frame as an SVG document."""
        body = self.frame_body(number)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height:.0f}"'
            f' width="{self.width}" height="{self.height:.0f}" class="drawing" role="img"'
            # It shrinks a little to fit, then scrolls.
            f' style="min-width:{_MIN_SCALE * self.width:.0f}px;max-width:{self.width}px"'
            f' aria-label="{escape(self.say(self.recording.frames[number].caption))}">{body}</svg>'
        )

    def frame_body(self, number: int, with_timeline: bool = True) -> str:
        frame = self.recording.frames[number]
        parts = [self._actor(actor, rows) for actor, rows in enumerate(frame.rows)]
        parts += [self._message(message) for message in frame.messages]
        if self.columns > 1:
            parts += [self._in_grid(collective) for collective in frame.collectives]
        else:
            parts.append(self._gutter(frame))
        if with_timeline and self.recording.spans:
            end_s = self.recording.end_s if frame.time_s is None else frame.time_s
            parts.append(
                f'<g transform="translate(0 {self.state_height:.0f})">{self.timeline(end_s)}</g>'
            )
        return "".join(parts)

    def _row_y(self, box: _Box, row: int) -> float:
        return box.y + (_HEADER if self.has_header else 0) + row * (_ROW + _GAP)

    def _actor(self, actor: int, rows: tuple[DrawnRow, ...]) -> str:
        box, parts = self.boxes[actor], []
        name = self.say(self.recording.actors[actor])
        if self.has_header:
            parts.append(_text(name, box.x, box.y + 11, "strong", box.width))
        for place, row in enumerate(rows):
            y = self._row_y(box, place)
            label = self.say(row.label) if self.has_header else name
            parts.append(_text(label, box.x, y + _ROW / 2, "left", self.label_width))
            inner = _Box(box.x + self.label_width, y, box.width - self.label_width - 4, _ROW)
            parts.append(
                self._bar(row, inner) if row.size_bytes is not None else self._cells(row, inner)
            )
        return "".join(parts)

    def _cells(self, row: DrawnRow, box: _Box) -> str:
        return "".join(map(self._cell, row.cells, _cell_boxes(row, box)))

    def _cell(self, cell: Cell, box: _Box) -> str:
        tone = f" {cell.tone}" if cell.tone else ""
        width = max(4.0, box.width - 3)
        parts = [_rect(box.x, box.y, width, box.height, f"cell{tone}")]
        for place, rank in enumerate(cell.ranks):
            hue = round(360 * rank / max(2, len(self.recording.actors)))
            stripe = width / len(cell.ranks)
            parts.append(
                f'<rect x="{box.x + place * stripe:.1f}" y="{box.y:.1f}" width="{stripe:.1f}"'
                f' height="{box.height:.1f}" style="fill:hsl({hue} var(--sat) var(--lum))"/>'
            )
        if cell.fill:
            parts.append(_rect(box.x, box.y, width * min(1.0, cell.fill), box.height, "fill"))
        if cell.tone in ("new", "wrong"):
            parts.append(_rect(box.x, box.y, width, box.height, f"edge {cell.tone}"))
        parts.append(_text(self.say(cell.text), box.x + width / 2, box.middle, "mid", width))
        return "".join(parts)

    def _bar(self, row: DrawnRow, box: _Box) -> str:
        size_bytes = row.size_bytes or 0
        room = box.width - 84
        scale = room / self.max_bytes if self.max_bytes else 0.0
        color = f"c{self.labels.index(row.label) % _COLORS}"
        parts = [
            _rect(box.x, box.y + 4, room, box.height - 8, "cell"),
            _rect(box.x, box.y + 4, size_bytes * scale, box.height - 8, color),
        ]
        if row.expected_bytes is not None:
            parts.append(
                _rect(box.x, box.y + 2, row.expected_bytes * scale, box.height - 4, "expected")
            )
        parts.append(_text(human_bytes(size_bytes), box.x + room + 6, box.middle, "left small", 80))
        return "".join(parts)

    # -- messages
    def _message(self, message: DrawnMessage) -> str:
        source, target = self.boxes[message.source], self.boxes[message.target]
        if message.row is not None:
            return self._between_cells(message, source, target)
        if self.columns > 1:
            return self._straight(source, target, _message_label(message))
        return ""  # in the gutter

    def _between_cells(self, message: DrawnMessage, source: _Box, target: _Box) -> str:
        """Draw an arrow between cells, and a chip that moves along it in the animation."""
        assert message.row is not None
        inner_x = source.x + self.label_width
        inner_width = source.width - self.label_width - 4
        first, beyond = message.cells
        count = max(1, self._num_cells(message))
        x = inner_x + inner_width * first / count
        width = max(8.0, inner_width * (beyond - first) / count - 3)
        start, end = self._row_y(source, message.row), self._row_y(target, message.row)
        is_down = end > start
        is_far = abs(message.target - message.source) > 1
        middle = x + width / 2 + (min(14.0, width / 3) if is_far else 0)
        bend = min(30.0, width / 2) if is_far else 0.0
        y0, y1 = (start + _ROW, end - 5) if is_down else (start, end + _ROW + 5)
        tip = 5 if is_down else -5
        return (
            f'<path class="arrow" d="M{middle:.1f} {y0:.1f}C{middle + bend:.1f} {y0:.1f}'
            f' {middle + bend:.1f} {y1:.1f} {middle:.1f} {y1:.1f}"/>'
            f'<path class="tip" d="M{middle - 4:.1f} {y1:.1f}h8l-4 {tip}z"/>'
            f'<g class="chip" style="--dy:{end - start:.1f}px">'
            f"{_rect(x, start + 3, width, _ROW - 6, 'moving')}"
            f"{_text(self.say(message.label), x + width / 2, start + _ROW / 2, 'mid', width)}</g>"
        )

    def _num_cells(self, message: DrawnMessage) -> int:
        for frame in self.recording.frames:
            if message in frame.messages:
                row = message.row or 0
                return len(frame.rows[message.source][row].cells)
        return 1

    def _in_grid(self, collective: Collective) -> str:
        boxes = [self.boxes[actor] for actor in collective.actors]
        return "".join(
            self._straight(first, second, _collective_label(collective), arrow=False)
            for first, second in pairwise(boxes)
        )

    def _labels(self, frame: Frame) -> list[list[str]]:
        """Return the lines of the labels in the gutter."""
        messages = [message for message in frame.messages if message.row is None]
        labels: list[str] = [
            PageText(
                "{ends}{label}",
                ends=f"{message.source}→{message.target} " if len(messages) > 1 else "",
                label=_message_label(message),
            )
            for message in messages
        ]
        labels += map(_collective_label, frame.collectives)
        room = max(8, int((self.gutter - 48) / _SMALL_CHAR))
        return [wrap(self.say(label), room, break_long_words=False) for label in labels]

    def _gutter(self, frame: Frame) -> str:
        """Draw lines between actors at the right of the picture, and their labels."""
        messages = [message for message in frame.messages if message.row is None]
        ends = [([message.source, message.target], True) for message in messages]
        ends += [(list(collective.actors), False) for collective in frame.collectives]
        labels = self._labels(frame)
        left, parts = self.width - self.gutter, []
        actors = [actor for members, _ in ends for actor in members]
        if not actors:
            return ""
        height = 13 * sum(map(len, labels))
        heights = [self.boxes[actor].middle for actor in actors]
        y = max(8.0, (min(heights) + max(heights) - height) / 2 + 6)
        for number, ((members, is_arrow), lines) in enumerate(zip(ends, labels, strict=True)):
            x, shift = left + 8 + 6 * (number % 5), 4.0 * (number % 5 - min(2, len(ends) // 2))
            marks = [self.boxes[actor].middle + shift for actor in members]
            parts.append(_connection(left, x, marks, is_arrow))
            for text in lines:
                parts.append(_text(text, left + 42, y, "left small", self.gutter - 40))
                y += 13
        return "".join(parts)

    def _straight(self, source: _Box, target: _Box, label: str, arrow: bool = True) -> str:
        """Draw a line between two boxes of a grid."""
        if abs(source.y - target.y) < 1:
            is_right = target.x > source.x
            x0 = source.x + (source.width if is_right else 0)
            x1 = target.x + (0 if is_right else target.width)
            y0 = y1 = source.y + 10
        else:
            x0 = x1 = source.x + self.label_width / 2 + (0 if source.x == target.x else 20)
            is_down = target.y > source.y
            y0 = source.y + (source.height - 2 if is_down else 0)
            y1 = target.y + (0 if is_down else target.height - 2)
        line = f'<path class="arrow thick" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"/>'
        ends = [(x1, y1)] if arrow else [(x0, y0), (x1, y1)]
        line += "".join(f'<circle class="tip" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in ends)
        return line + f"<title>{escape(self.say(label))}</title>" if label else line

    # -- timeline
    def _timeline_height(self) -> float:
        if not self.recording.spans:
            return 0.0
        rows = sum(len(rows) for _, _, rows in self.lanes)
        return 26.0 + rows * 22 + 20 * self._legend_rows()

    def _legend_rows(self) -> int:
        per_row = max(1, int(self.width // 130))
        return -(-len(self.kinds) // per_row)

    def timeline(self, until_s: float) -> str:
        """Return the spans up to ``until_s``, with a cursor there."""
        actors = [self.say(actor) for actor in self.recording.actors]
        names = [f"{actors[actor]} {self.say(lane)}" for actor, lane, _ in self.lanes]
        left = min(self.width * 0.36, max(map(text_length, names)) * 6.2 + 8)
        room, end_s = self.width - left - 8, self.recording.end_s or 1.0
        parts, y = [], 4.0
        for name, (_, _, rows) in zip(names, self.lanes, strict=True):
            parts.append(_text(name, 0, y + 10, "left small", left))
            for row in rows:
                for span in row:
                    if span.start_s > until_s:
                        continue
                    x = left + room * span.start_s / end_s
                    width = max(1.2, room * (min(span.end_s, until_s) - span.start_s) / end_s)
                    color = f"c{self.kinds.index(span.kind) % _COLORS}"
                    label = self.say(span.label)
                    duration = f"{label}: {_time_text(span.end_s - span.start_s)}"
                    parts.append(
                        f"<g><title>{escape(duration)}</title>{_rect(x, y, width, 18, color)}"
                    )
                    if width > 6.4 * text_length(label) + 4:
                        parts.append(_text(label, x + width / 2, y + 9.5, "mid onbar", width))
                    parts.append("</g>")
                y += 22
            parts.append(f'<path class="axis" d="M0 {y - 2:.1f}H{self.width}"/>')
        x = left + room * min(until_s, end_s) / end_s
        parts.append(f'<path class="cursor" d="M{x:.1f} 0V{y:.1f}"/>')
        for tick in range(3):
            at = left + room * tick / 2
            anchor = ("left", "mid", "end")[tick]
            time = _time_text(end_s * tick / 2)
            parts.append(_text(time, at, y + 10, f"{anchor} small soft", 90))
        per_row = max(1, int(self.width // 130))
        for number, kind in enumerate(self.kinds):
            x = 130 * (number % per_row)
            top = y + 22 + 20 * (number // per_row)
            parts.append(_rect(x, top, 12, 12, f"c{number % _COLORS}"))
            parts.append(_text(self.say(kind), x + 17, top + 6.5, "left small", 110))
        return "".join(parts)


def _time_text(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1000 * seconds:.4g} ms"


def _message_label(message: DrawnMessage) -> str:
    return PageText("{label}, {size}", label=message.label, size=human_bytes(message.size_bytes))


def _collective_label(collective: Collective) -> str:
    label: str = collective.kind
    if collective.label:
        label = PageText("{kind} {label}", kind=collective.kind, label=collective.label)
    if not collective.sent_bytes:
        return label
    return PageText("{label}, {size} each", label=label, size=human_bytes(collective.sent_bytes))


def _connection(left: float, x: float, heights: list[float], is_arrow: bool) -> str:
    """Return a line at ``x`` between actors: an arrow from the first to the last, or a mark at
    each."""
    line = f'<path class="arrow" d="M{left:.1f} {heights[0]:.1f}H{x:.1f}V{heights[-1]:.1f}'
    if is_arrow:
        y = heights[-1]
        return (
            f'{line}H{left + 5:.1f}"/><path class="tip" d="M{left + 6:.1f} {y - 4:.1f}v8l-6 -4z"/>'
        )
    return f'{line}"/>' + "".join(
        f'<circle class="tip" cx="{x:.1f}" cy="{height:.1f}" r="3.5"/>' for height in heights
    )


def _cells_width(row: DrawnRow) -> float:
    """Return the width at which the cells of a row show their text, unless it is very long."""
    total = sum(cell.weight for cell in row.cells)
    return max(
        (
            min(_MAX_NEEDED_CELL, max(_MIN_CELL, len(cell.text) * _TINY_CHAR + 4))
            * (total / cell.weight)
            for cell in row.cells
            if cell.weight
        ),
        default=0.0,
    )


def _cell_boxes(row: DrawnRow, box: _Box) -> list[_Box]:
    total = sum(cell.weight for cell in row.cells) or 1.0
    boxes, x = [], box.x
    for cell in row.cells:
        width = box.width * cell.weight / total
        boxes.append(_Box(x, box.y, width, box.height))
        x += width
    return boxes


def _rect(x: float, y: float, width: float, height: float, style: str) -> str:
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}"'
        f' height="{height:.1f}" rx="3"/>'
    )


def text_length(text: str) -> float:
    """Return the width of a text in Latin characters; Chinese ones are wider."""
    return sum(1.8 if ord(char) > 0x2E7F else 1.0 for char in text)


def _text(text: str, x: float, y: float, style: str, width: float) -> str:
    """Return text that is shortened to ``width``; its full form is then in a tooltip."""
    char = _SMALL_CHAR if "small" in style else _CHAR
    length = text_length(text)
    if length * char > width and length * _TINY_CHAR <= width:
        char, style = _TINY_CHAR, f"{style} tiny"
    room = max(1, int(width / char))
    if length <= room:
        return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
    short = text[: max(1, int(room * len(text) / length) - 1)] + "…"
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"><title>{escape(text)}</title>'
        f"{escape(short)}</text>"
    )


def draw_picture(recording: Recording) -> str:
    """Return one SVG file that shows the main frames below each other, then the timeline. It has a
    background, so that it is readable on light and dark pages."""
    drawing = Drawing(recording, WIDE)
    margin, y = 20, 34.0
    parts = [_text(recording.title, 0, 12, "title", drawing.width * 1.2)]
    for number in _key_frames(recording):
        frame = recording.frames[number]
        for line in wrap(frame.caption, int(drawing.width / 6.9)):
            parts.append(_text(line, 0, y + 8, "strong", drawing.width))
            y += 18
        y += 4
        body = drawing.frame_body(number, with_timeline=False)
        parts.append(f'<g transform="translate(0 {y:.0f})">{body}</g>')
        y += drawing.state_height + 14
    if recording.spans:
        parts.append(f'<g transform="translate(0 {y:.0f})">{drawing.timeline(recording.end_s)}</g>')
        y += drawing.height - drawing.state_height + 10
    facts = " · ".join(f"{name}: {value}" for name, value in recording.facts)
    for line in wrap(facts, int(drawing.width / 6.2)):
        parts.append(_text(line, 0, y + 8, "left small soft", drawing.width * 1.1))
        y += 16
    # The style sheet of drawings has a light and a dark form.
    style = (Path(__file__).parent / "drawing.css").read_text(encoding="utf-8")
    full_width, height = drawing.width + 2 * margin, round(y) + 2 * margin
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width} {height}"'
        f' width="{full_width}" height="{height}" class="drawing" role="img">'
        f"<title>{escape(recording.title)}</title><style>{style}</style>"
        f'<rect class="background" width="{full_width}" height="{height}" rx="10"/>'
        f'<g transform="translate({margin} {margin})">{"".join(parts)}</g></svg>\n'
    )


def _key_frames(recording: Recording) -> list[int]:
    """Return the frames that a static picture shows."""
    marked = [number for number, frame in enumerate(recording.frames) if frame.is_key]
    numbers = marked or list(range(len(recording.frames)))
    if len(numbers) <= (_MAX_KEY_FRAMES if marked else _MAX_PICTURE_FRAMES):
        return numbers
    last = _MAX_PICTURE_FRAMES - 1
    return [numbers[round(place * (len(numbers) - 1) / last)] for place in range(last + 1)]

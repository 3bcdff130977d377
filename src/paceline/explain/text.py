"""A recording as text for a terminal."""

from collections.abc import Sequence

from paceline.core.files import human_bytes
from paceline.explain.record import DrawnRow, Frame, Recording


def render_text(recording: Recording) -> str:
    """Return the frames, the time of each kind of span, the facts and the checks."""
    lines = [recording.title, recording.about]
    for frame in recording.frames:
        lines += ["", _heading(frame), *_frame_lines(frame, recording.actors)]
    if recording.spans:
        lines += ["", *_span_lines(recording)]
    lines.append("")
    lines += [f"{name}: {value}" for name, value in recording.facts]
    lines += [
        f"check: {check.name}: {'ok' if check.passed else 'FAILED'}"
        + ("" if check.passed else f" (shown {check.shown}, recorded {check.recorded})")
        for check in recording.checks
    ]
    return "\n".join(lines)


def _heading(frame: Frame) -> str:
    if frame.time_s is None:
        return frame.caption
    return f"{1000 * frame.time_s:8.2f} ms  {frame.caption}"


def _frame_lines(frame: Frame, actors: Sequence[str]) -> list[str]:
    lines = [
        f"  {actors[message.source]} → {actors[message.target]}   {message.label}"
        f"   {human_bytes(message.size_bytes)}"
        for message in frame.messages
    ]
    lines += [
        f"  {collective.kind} of {', '.join(actors[actor] for actor in collective.actors)}"
        f"   {collective.label}   {human_bytes(collective.sent_bytes)} sent by each"
        for collective in frame.collectives
    ]
    labeled = [
        (f"{actor} {row.label}".strip(), row)
        for actor, rows in zip(actors, frame.rows, strict=True)
        for row in rows
    ]
    name_width = max((len(name) for name, _ in labeled), default=0)
    widths: dict[int, int] = {}
    for _, row in labeled:
        for place, text in enumerate(_texts(row)):
            widths[place] = max(widths.get(place, 0), len(text))
    for name, row in labeled:
        columns = [text.ljust(widths[place]) for place, text in enumerate(_texts(row))]
        lines.append(f"  {name.ljust(name_width)}   {'  '.join(columns)}".rstrip())
    return lines


def _texts(row: DrawnRow) -> list[str]:
    if row.size_bytes is not None:
        expected = row.expected_bytes
        return [
            human_bytes(row.size_bytes),
            "" if expected is None else f"(predicted {human_bytes(expected)})",
        ]
    marks = {"wrong": "!", "new": "*"}
    return [cell.text + marks.get(cell.tone, "") for cell in row.cells]


def _span_lines(recording: Recording) -> list[str]:
    """Return one line per actor: the time of each kind of span."""
    kinds = dict.fromkeys(span.kind for span in recording.spans)
    lines = []
    for actor, name in enumerate(recording.actors):
        times = dict.fromkeys(kinds, 0.0)
        for span in recording.spans:
            if span.actor == actor:
                times[span.kind] += span.end_s - span.start_s
        parts = [f"{kind} {1000 * seconds:.2f} ms" for kind, seconds in times.items() if seconds]
        if parts:
            lines.append(f"{name}: {', '.join(parts)}")
    return lines

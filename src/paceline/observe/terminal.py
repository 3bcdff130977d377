"""Where the console's lines go: a stream that may break, a plain one, and a terminal with a live
line at its foot."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from paceline.core.log import discarding_unread

if TYPE_CHECKING:
    from collections.abc import Iterator

_LABEL_WIDTH = 11
_REDRAW_S = 0.1  # the live line is drawn at most ten times a second
_BAR_WIDTH = 24


class HasFields(Protocol):
    """What a live line draws: figures, and how far the run is."""

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int | None: ...

    def fields(self) -> list[tuple[str, str, int]]: ...


class SafeStream:
    """A text stream that goes quiet, and never raises, once it can no longer be written (closed
    terminal, broken pipe)."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.broken = stream is None

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        try:
            return not self.broken and bool(self._stream.isatty())  # type: ignore[union-attr]
        except (OSError, ValueError, AttributeError):
            return False

    def is_terminal(self) -> bool:
        """True where lines can be redrawn in place."""
        return self.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")

    def fileno(self) -> int:
        return self._stream.fileno()  # type: ignore[union-attr]

    def size(self) -> tuple[int, int]:
        """Columns and rows of this very terminal (not of the one behind standard output)."""
        try:
            columns, rows = os.get_terminal_size(self.fileno())
        except (OSError, ValueError, AttributeError):
            columns, rows = 0, 0
        return columns or 80, rows or 24

    def write(self, text: str) -> int:
        if not self.broken:
            try:
                with discarding_unread(self._stream):
                    self._write(text)
            except (OSError, ValueError):
                self.broken = True
        return len(text)

    def flush(self) -> None:
        if not self.broken:
            try:
                with discarding_unread(self._stream):
                    self._stream.flush()  # type: ignore[union-attr]
            except (OSError, ValueError):
                self.broken = True

    def _write(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # an ASCII log file
            raw = text.replace("×", "x").replace("→", "->").replace("–", "-").replace("…", "...")
            self._stream.write(raw.encode(self.encoding, "replace").decode(self.encoding))


class PlainTerminal:
    """Lines for a log file or a pipe: no colours, nothing redrawn."""

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream

    def say(self, text: str, style: str = "") -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def labelled(self, label: str, text: str, style: str = "") -> None:
        self.say(f"{label:<{_LABEL_WIDTH}} {text}")

    def redraw(self, progress: HasFields, force: bool = False) -> None:
        pass

    def close(self) -> None:
        pass


class LiveTerminal:
    """A terminal: coloured lines, and one progress line at the foot that is redrawn in place.

    No thread redraws it: drawing happens as events come in, so nothing runs beside the training,
    and a terminal that closes is met only where it is handled.
    """

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream
        self._console: Any = None
        self._live: Any = None
        self._drawn_at = 0.0

    def _rich(self) -> Any:
        if self._console is None:
            from rich.console import Console

            stream: Any = self._stream
            self._console = Console(
                file=stream, force_terminal=True, highlight=False, markup=False, emoji=False
            )
        self._console.size = self._stream.size()
        return self._console

    def say(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._rich().print(Text(text, style=style))

    def labelled(self, label: str, text: str, style: str = "") -> None:
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 1))
        row.add_column(width=_LABEL_WIDTH, no_wrap=True)
        row.add_column(overflow="fold")
        row.add_row(Text(label, style=style or "dim"), Text(text))
        self._rich().print(row)

    def redraw(self, progress: HasFields, force: bool = False) -> None:
        now = time.monotonic()
        if self._stream.broken or (not force and now - self._drawn_at < _REDRAW_S):
            return
        self._drawn_at = now
        console = self._rich()
        if self._live is None:
            from rich.live import Live

            # What libraries write to standard error comes out above the line; standard output is
            # left to its owner.
            self._live = Live(
                console=console, auto_refresh=False, redirect_stdout=False, vertical_overflow="crop"
            )
            self._live.start()
            console.show_cursor(True)  # a run that is killed leaves a terminal with its cursor
        self._live.update(_Line(progress), refresh=True)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


class _Line:
    """The progress line, cut to the terminal's width: the least important figures go first."""

    def __init__(self, progress: HasFields) -> None:
        self._progress = progress

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        width = options.max_width - 1
        fields, bar_width = list(self._progress.fields()), _BAR_WIDTH
        while _width(fields) + 2 + bar_width > width and bar_width > 8:
            bar_width -= 1
        while _width(fields) + 2 + bar_width > width and any(
            importance for *_, importance in fields
        ):
            fields.remove(max(fields, key=lambda field: field[2]))
        line = Text(no_wrap=True, overflow="crop", end="")
        if self._progress.total and _width(fields) + 2 + bar_width <= width:
            done, left = _bar(
                self._progress.done / self._progress.total, bar_width, options.ascii_only
            )
            line.append(done, "green").append(left, "bright_black").append("  ")
        for index, (style, text, _) in enumerate(fields):
            line.append("  " if index else "").append(text, style)
        yield line


def _width(fields: list[tuple[str, str, int]]) -> int:
    return sum(len(text) + 2 for _, text, _ in fields) - 2


def _bar(share: float, width: int, ascii_only: bool) -> tuple[str, str]:
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    full, half = divmod(halves, 2)
    if ascii_only:
        return "#" * full, "-" * (width - full)
    return "━" * full + "╸" * half, "─" * (width - full - half)

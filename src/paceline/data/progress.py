"""Lines about work in progress on standard error, such as tokenization: rows, rate and remaining
time."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from paceline.core import formatting
from paceline.core.log import is_shown

_QUIET_S = 2.0  # no line for shorter work
_TERMINAL_EVERY_S = 0.2


class ProgressLine:
    """A line that is redrawn in place on a terminal; elsewhere a new line every few seconds.

    Args:
        plain_every_s: time between two lines if the stream is not a terminal; None for no lines.
    """

    def __init__(self, stream: TextIO | None = None, plain_every_s: float | None = 10.0) -> None:
        self.stream = sys.stderr if stream is None else stream
        self._on_terminal = self.stream.isatty()
        self._every_s = _TERMINAL_EVERY_S if self._on_terminal else plain_every_s
        self._next = time.monotonic() + _QUIET_S
        self._width = 0

    def show(self, text: Callable[[], str]) -> None:
        """Print ``text()``, unless a line was printed very recently."""
        now = time.monotonic()
        if self._every_s is None or now < self._next or not is_shown():
            return
        self._next = now + self._every_s
        if not self._on_terminal:
            self._write(text() + "\n")
            return
        line = text()[: shutil.get_terminal_size().columns - 1]
        self._write("\r" + line.ljust(self._width))
        self._width = len(line)

    def clear(self) -> None:
        """Remove the line from a terminal, so that other lines can be printed."""
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            self.stream.write(text)
            self.stream.flush()


class RowProgress:
    """Counts rows and prints the progress.

    Args:
        total_bytes: size of all rows in bytes, or None if unknown; the remaining time is then
            omitted.
    """

    def __init__(self, total_bytes: int | None, stream: TextIO | None = None) -> None:
        self.total_bytes = total_bytes
        self.rows = self.done_bytes = 0
        self._begun = time.monotonic()
        self._line = ProgressLine(stream)

    def add(self, rows: int, size_bytes: int) -> None:
        """Count completed rows."""
        self.rows += rows
        self.done_bytes += size_bytes
        self._line.show(lambda: self.text(time.monotonic() - self._begun))

    def text(self, elapsed_s: float) -> str:
        """Return the line after ``elapsed_s`` seconds."""
        parts = [
            f"tokenizing: {formatting.counted(self.rows, 'row')}",
            f"{self.rows / max(elapsed_s, 1e-9):,.0f} rows/s",
        ]
        if self.total_bytes and self.done_bytes:
            share = min(1.0, self.done_bytes / self.total_bytes)
            filled = round(20 * share)
            parts.insert(0, f"[{'#' * filled}{'.' * (20 - filled)}] {share:.0%}")
            parts.append(f"ETA {formatting.clock(elapsed_s * (1 - share) / share)}")
        return "  ".join(parts)

    def close(self) -> None:
        """Remove the line from a terminal."""
        self._line.clear()

"""Print the progress of tokenization on standard error: rows, rate and remaining time."""

import contextlib
import sys
import time
from typing import TextIO

from paceline.core import formatting
from paceline.core.log import is_shown

_QUIET_S = 2.0  # no progress line for shorter work
_TERMINAL_EVERY_S, _PLAIN_EVERY_S = 0.2, 10.0


class RowProgress:
    """Counts rows and prints the progress: on a terminal as one line that is redrawn, otherwise as
    a new line every few seconds.

    Args:
        total_bytes: size of all rows in bytes, or None if unknown; the remaining time is then
            omitted.
    """

    def __init__(self, total_bytes: int | None, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.total_bytes = total_bytes
        self.rows = self.done_bytes = 0
        self._begun = time.monotonic()
        self._next = self._begun + _QUIET_S
        self._width = 0
        self._on_terminal = self.stream.isatty()

    def add(self, rows: int, size_bytes: int) -> None:
        """Count completed rows."""
        self.rows += rows
        self.done_bytes += size_bytes
        now = time.monotonic()
        if now >= self._next and is_shown():
            self._next = now + (_TERMINAL_EVERY_S if self._on_terminal else _PLAIN_EVERY_S)
            text = self.text(now - self._begun)
            if self._on_terminal:
                self._write("\r" + text.ljust(self._width))
                self._width = max(self._width, len(text))
            else:
                self._write(text + "\n")

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
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream is closed
            self.stream.write(text)
            self.stream.flush()

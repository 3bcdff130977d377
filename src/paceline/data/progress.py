"""Print the progress of tokenization: rows, rate and remaining time."""

import time
from typing import TextIO

from paceline.core import formatting
from paceline.core.progress_line import ProgressLine


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

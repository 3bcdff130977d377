"""Output of the console: a stream that may break, with plain lines or with a live progress line in
the last row of a terminal."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TextIO

from paceline.core import formatting
from paceline.core.event_log import throughput
from paceline.core.log import discarding_unread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.events import RunStartEvent, StepEvent

_LABEL_WIDTH = 11
_REDRAW_S = 0.1  # minimum time between two updates of the live line
_BAR_WIDTH = 24
_RECENT_STEPS = 64  # used to estimate the remaining time


class RunProgress:
    """The progress of a run, collected from its events for a progress line."""

    def __init__(self, start: RunStartEvent | None = None) -> None:
        self.start: RunStartEvent = start or {}
        self.step: StepEvent | None = None
        self.first_loss: Any = None
        self.eval_loss: Any = None
        self.eval_metrics: dict[str, float] = {}
        self.resumed_from: int | None = self.start.get("resumed_from_step") or None
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)

    def add(self, event: StepEvent) -> None:
        if self.step is None:
            self.first_loss = event.get("loss")
        self.step = event
        seconds = formatting.finite(event.get("step_time_s"))
        if seconds is not None:
            self._step_times.append(seconds)

    @property
    def derived(self) -> dict[str, float | None]:
        return self.start.get("derived") or {}

    @property
    def total(self) -> int | None:
        steps = formatting.finite(self.derived.get("steps"))
        return int(steps) if steps else None

    @property
    def done(self) -> int:
        return int(self.step["step"]) if self.step is not None else self.resumed_from or 0

    @property
    def eta_s(self) -> float | None:
        """Estimated remaining time in seconds, from the median of the recent step times, so that a
        single slow step (a save, an evaluation) has no effect."""
        if not self._step_times or self.total is None:
            return None
        return max(0, self.total - self.done) * statistics.median(self._step_times)

    def fields(self) -> list[tuple[str, str, int]]:
        """Return (style, text, priority) of each known figure. On a narrow terminal, figures with a
        higher number are omitted first; those with 0 are always shown."""
        step = self.step or {}
        rate, unit = throughput(step, self.derived.get("global_batch_size"))
        epoch = formatting.finite(step.get("epoch"))
        loss, memory = step.get("loss"), formatting.max_over_ranks(step.get("memory_bytes"))
        total = f"/{self.total:,}" if self.total else ""
        fields = [("bold", f"step {self.done:,}{total}", 0)]
        if epoch is not None:
            fields.append(("dim", f"epoch {epoch:.2f}", 5))
        if self.step is not None:
            is_bad = formatting.number(loss) is not None and formatting.finite(loss) is None
            fields.append(("bold red" if is_bad else "bold", f"loss {formatting.loss(loss)}", 0))
        reward = formatting.finite(step.get("reward"))
        if reward is not None:
            fields.append(("bold", f"reward {reward:.3f}", 0))
        if self.eval_loss is not None:
            fields.append(("dim", f"eval {formatting.loss(self.eval_loss)}", 7))
        if step.get("learning_rate") is not None:
            fields.append(("dim", f"lr {formatting.rate(step['learning_rate'])}", 4))
        if rate is not None:
            fields.append(("", f"{formatting.short_count(rate)} {unit}", 2))
        flops = formatting.flops(step.get("flops_per_device_s"), step.get("mfu"))
        if flops is not None:
            fields.append(("dim", flops, 8))
        if memory:
            fields.append(("dim", f"mem {formatting.size(memory)}", 3))
        if self.start.get("world_size"):
            fields.append(("dim", formatting.ranks(self.start["world_size"]), 6))
        if self.eta_s is not None:
            fields.append(("cyan", f"ETA {formatting.clock(self.eta_s)}", 1))
        return fields


class SafeStream:
    """A text stream that never raises an exception. After a write error (closed terminal, broken
    pipe), it discards all output."""

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
        """Return whether lines can be redrawn in place."""
        return self.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")

    def fileno(self) -> int:
        return self._stream.fileno()  # type: ignore[union-attr]

    def size(self) -> tuple[int, int]:
        """Return the columns and rows of the terminal of this stream (not of standard output)."""
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


class Terminal:
    """Prints lines: plain lines to a log file or a pipe; on a terminal colored lines, above a
    progress line that is redrawn in place.

    The progress line is drawn when an event arrives, not by a thread: nothing runs in parallel to
    the training, and a closed terminal is noticed only where it is handled.
    """

    def __init__(self, stream: SafeStream, is_live: bool) -> None:
        self._stream = stream
        self._is_live = is_live
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

    def print(self, text: str, style: str = "") -> None:
        if not self._is_live:
            self._stream.write(text + "\n")
            self._stream.flush()
            return
        from rich.text import Text

        self._rich().print(Text(text, style=style))

    def print_step(self, progress: RunProgress) -> None:
        """Print the figures of the latest step; those that fit on a terminal."""
        fields = progress.fields()
        if self._is_live:
            fields = fit_fields(fields, self._stream.size()[0])
        self.print("  ".join(text for _, text, _ in fields), "dim")

    def print_labelled(self, label: str, text: str, style: str = "") -> None:
        if not self._is_live:
            self.print(f"{label:<{_LABEL_WIDTH}} {text}")
            return
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 1))
        row.add_column(width=_LABEL_WIDTH, no_wrap=True)
        row.add_column(overflow="fold")
        row.add_row(Text(label, style=style or "dim"), Text(text))
        self._rich().print(row)

    def redraw(self, progress: RunProgress, force: bool = False) -> None:
        """Redraw the progress line, unless it was drawn very recently."""
        now = time.monotonic()
        is_recent = now - self._drawn_at < _REDRAW_S and not force
        if not self._is_live or self._stream.broken or is_recent:
            return
        self._drawn_at = now
        console = self._rich()
        if self._live is None:
            from rich.live import Live

            # Standard error of libraries is printed above the line. Standard output belongs to the
            # command.
            self._live = Live(
                console=console, auto_refresh=False, redirect_stdout=False, vertical_overflow="crop"
            )
            self._live.start()
            console.show_cursor(True)  # a killed run must not leave the cursor hidden
        self._live.update(_Line(progress), refresh=True)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


class _Line:
    """The progress line, fitted to the width of the terminal."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        width = options.max_width - 1
        bar_width = max(8, min(_BAR_WIDTH, width - 2 - _width(self._progress.fields())))
        fields = fit_fields(self._progress.fields(), width - 2 - bar_width)
        line = Text(no_wrap=True, overflow="crop", end="")
        if self._progress.total and _width(fields) + 2 + bar_width <= width:
            share = self._progress.done / self._progress.total
            done, left = _bar(share, bar_width, options.ascii_only)
            line.append(done, "green").append(left, "bright_black").append("  ")
        for index, (style, text, _) in enumerate(fields):
            line.append("  " if index else "").append(text, style)
        yield line


def fit_fields(fields: list[tuple[str, str, int]], width: int) -> list[tuple[str, str, int]]:
    """Leave out fields, those with the highest number first, until the others fit the width."""
    fields = list(fields)
    while _width(fields) > width and any(priority for *_, priority in fields):
        fields.remove(max(fields, key=lambda field: field[2]))
    return fields


def _width(fields: list[tuple[str, str, int]]) -> int:
    return sum(len(text) + 2 for _, text, _ in fields) - 2


def _bar(share: float, width: int, ascii_only: bool) -> tuple[str, str]:
    full, half = divmod(round(min(1.0, max(0.0, share)) * width * 2), 2)
    if ascii_only:
        return "#" * full, "-" * (width - full)
    return "━" * full + "╸" * half, "─" * (width - full - half)

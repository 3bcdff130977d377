"""Being asked to stop: the step under way is finished, all ranks agree, a checkpoint is written."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.errors import EXIT_FAILED

# A terminal and a launcher may both pass on one Ctrl-C; signals this close together are one.
_SAME_SIGNAL_S = 1.0


class StopFlag:
    """Set by SIGTERM, and by SIGINT where no launcher of ours answers it; there a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._first_at = 0.0
        self._alone = True
        #: Ends this process at once with a fault, from any thread, where the main one stands still: (text, ranks to blame).
        self.fail: Callable[[str, Sequence[int]], None] = _end_by_fault
        #: Told of a second signal, just before the end.
        self.on_haste: Callable[[int], None] = lambda number: None

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    def install(self, sigint: bool) -> None:
        """``sigint``: False where a launcher of ours answers signals. Haste is then its to show, by SIGKILL: a second SIGTERM
        may come from a scheduler, which sends it to every process, or by way of another host."""
        self._alone = sigint
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal if sigint else signal.SIG_IGN)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, self._on_signal if sigint else signal.SIG_IGN)

    def _on_signal(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._first_at = number, now
        elif self._alone and now - self._first_at > _SAME_SIGNAL_S:
            with contextlib.suppress(Exception):  # nothing holds up who is in haste
                self.on_haste(number)
            os._exit(128 + number)


def _end_by_fault(text: str, blamed: Sequence[int]) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)

"""Handle requests to stop: the run finishes the current step, agrees on all ranks, and writes a
checkpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.core.errors import EXIT_FAILED, RunError
from paceline.core.log import CONSOLE_ONLY

logger = logging.getLogger(__name__)

# The terminal and the launcher may both deliver the same Ctrl-C, so signals this close together
# count as one.
_SAME_SIGNAL_S = 1.0

_HANDLED = {
    number
    for name in ("SIGTERM", "SIGINT", "SIGHUP")
    if (number := getattr(signal, name, None)) is not None
}


_FLAGS: weakref.WeakSet[StopFlag] = weakref.WeakSet()


def request_stop(number: int) -> None:
    """Act as if the runs of this process had received the signal ``number``. For threads, which
    receive no signals. Repeat the call, because a run that is not prepared yet misses it."""
    for flag in list(_FLAGS):
        flag.signal = flag.signal or number


class StopFlag:
    """A flag that SIGTERM sets. If no launcher of Paceline handles SIGINT, SIGINT sets it too, and
    a second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._first_at = 0.0
        self._alone = True
        _FLAGS.add(self)
        #: Ends this process at once with an error, from any thread, as the main one is blocked.
        self.fail: Callable[[RunError], None] = _end_with_error
        #: Called with the number of a second signal, just before the process ends.
        self.on_second_signal: Callable[[int], None] = lambda number: None

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    def install(self, sigint: bool) -> bool:
        """Handle the signals that ask a run to stop. Only the main thread of a process may do that:
        in any other thread (Ray Train and other schedulers run the training function in one)
        nothing changes, and the result is False.

        Args:
            sigint: whether to handle SIGINT. False if a launcher of Paceline handles signals: a
                second signal then does not end this process at once, because a scheduler may send
                SIGTERM to every process; the launcher ends it with SIGKILL.
        """
        self._alone = sigint
        if threading.current_thread() is not threading.main_thread():
            return False
        signal.signal(signal.SIGTERM, self._on_signal)
        for number in _HANDLED - {signal.SIGTERM}:
            signal.signal(number, self._on_signal if sigint else signal.SIG_IGN)
        return True

    def _on_signal(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._first_at = number, now
        elif self._alone and now - self._first_at > _SAME_SIGNAL_S:
            with contextlib.suppress(Exception):  # best effort: the user asked to quit at once
                self.on_second_signal(number)
            os._exit(128 + number)


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the process's signal handlers after the block: a program that calls
    ``paceline.train()`` may continue."""
    before = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                # None: it was not installed from Python, and cannot be restored from Python
                if handler is not None:
                    signal.signal(number, handler)


def _end_with_error(error: RunError) -> None:
    logger.error(error.paragraph(), extra=CONSOLE_ONLY)
    os._exit(EXIT_FAILED)


_CALLS: list[Callable[[], None]] = []


@contextmanager
def polling(call: Callable[[], None]) -> Iterator[None]:
    """Within the block, :func:`poll` calls ``call``, which may raise."""
    _CALLS.append(call)
    try:
        yield
    finally:
        _CALLS.remove(call)


def poll() -> None:
    """Call the functions registered with :func:`polling`. Long computations call this between their
    parts."""
    for call in tuple(_CALLS):
        call()

"""Logging: the loggers ``paceline.*``, the messages on standard error, and the ``notice`` events of
a run.

Every module logs to ``logging.getLogger(__name__)``. A record of level info or above is a notice:
it is printed, and it becomes a ``notice`` event of the run. A record with ``extra=CONSOLE_ONLY`` is
only printed, because another event contains it or it does not belong to a run.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from paceline.core.formatting import clean
from paceline.core.texts import UserText, translatable

if TYPE_CHECKING:
    from paceline.core.event_log import EventLog

#: Values of ``--log-level``.
LEVELS = ("debug", "info", "warning", "error", "critical")
#: ``extra`` of a record that is not a notice.
CONSOLE_ONLY = {"is_notice": False}
#: Like :data:`CONSOLE_ONLY`, but printed by every rank.
ON_EVERY_RANK = {"is_notice": False, "is_of_this_rank": True}

#: Passes the level on to the processes that this one starts.
_LEVEL_VARIABLE = "PACELINE_LOG_LEVEL"
_YELLOW, _RED, _RESET = "\x1b[33m", "\x1b[31m", "\x1b[0m"
_PACKAGE_LOGGER = logging.getLogger("paceline")


class Notice(NamedTuple):
    """A message for another process to log. ``level`` is info or warning."""

    level: str
    message: str

    def as_json(self) -> list[Any]:
        """Return the notice for a file of JSON, as :meth:`from_json` reads it."""
        return [self.level, self.message, *translatable(self.message).values()]

    @classmethod
    def from_json(cls, record: Sequence[Any]) -> Notice:
        """Return the notice that :meth:`as_json` has converted."""
        level, message, *of_text = record
        return cls(level, UserText.of(message, *of_text) if of_text else message)


def configure_logging(level: str | None = None, quiet: bool = False) -> None:
    """Print records of ``level`` and above on standard error.

    Args:
        level: one of :data:`LEVELS`; None for the level of the parent process, or info.
        quiet: print warnings and errors only.
    """
    level = "warning" if quiet and level is None else level
    if level is not None:
        os.environ[_LEVEL_VARIABLE] = level
    number = _number_of(os.environ.get(_LEVEL_VARIABLE, "info"))
    # The event log needs info records even if the console shows only warnings.
    _PACKAGE_LOGGER.setLevel(min(number, logging.INFO))
    console = _console_handler()
    if console is None:
        console = ConsoleHandler()
        _PACKAGE_LOGGER.addHandler(console)
        _PACKAGE_LOGGER.propagate = False  # a root handler of the program would print it again
    console.setLevel(number)
    console.hidden = frozenset()
    console.is_muted = False
    ignore_import_warnings()


def ignore_import_warnings() -> None:
    """Suppress what libraries print when they are imported and users cannot act on."""
    # Packages such as swanlab require pynvml, which warns when torch imports it.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated")
    warnings.filterwarnings("ignore", message=r".*_pytree")
    for package in ("bitsandbytes", "torchao"):  # they warn about optional kernels
        logging.getLogger(package).setLevel(logging.ERROR)


@contextmanager
def discarding_unread(stream: TextIO | None) -> Iterator[None]:
    """Discard what is written to ``stream`` after its pipe or terminal was closed. The error of the
    write is still raised.

    What a stream could not write stays in its buffer, and multiprocessing flushes the streams
    before it starts a process, so no rank could be started after that.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO) and stream is not None:
            with suppress(OSError, ValueError, AttributeError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), stream.fileno())
                stream.flush()
        raise


def mute_console() -> None:
    """Print only errors and records with :data:`ON_EVERY_RANK`; another rank prints the others."""
    configure_logging()
    console = _console_handler()
    if console is not None:
        console.is_muted = True


def hide_on_console(messages: Iterable[str]) -> None:
    """Do not print these messages again, because another process of this host has printed them."""
    console = _console_handler()
    if console is not None:
        console.hidden = frozenset(messages)


@contextmanager
def console_limited_to(level: str) -> Iterator[None]:
    """Print records of ``level`` and above only, also in processes that this one starts within the
    block."""
    before = os.environ.get(_LEVEL_VARIABLE)
    configure_logging(level)
    try:
        yield
    finally:
        os.environ.pop(_LEVEL_VARIABLE, None)
        configure_logging(before)


@contextmanager
def warnings_last() -> Iterator[Callable[[], None]]:
    """Within the block, print warnings after all other messages: at its end, or when the function
    is called that the block gets. In a long list of messages, users read the last lines."""
    console = _console_handler()

    def print_held() -> None:
        if console is not None and console.held is not None:
            lines, console.held = console.held, None
            for line in lines:
                write_line(line)

    if console is not None and console.held is None:
        console.held = []
    try:
        yield print_held
    finally:
        print_held()


def is_shown(level: str = "info") -> bool:
    """Return whether the console of this process shows messages of this level."""
    return _number_of(level) >= _number_of(os.environ.get(_LEVEL_VARIABLE, "info"))


def log_notices(logger: logging.Logger, notices: Iterable[tuple[str, str]]) -> None:
    """Log (level, message) pairs of a config, a dataset or another process, warnings last."""
    for level, message in sorted(notices, key=lambda notice: _number_of(notice[0])):
        logger.log(_number_of(level), message)


class ConsoleHandler(logging.Handler):
    """Prints messages on standard error, warnings with a prefix and, in a terminal, in color.

    Attributes:
        hidden: messages that are not printed.
        is_muted: whether only errors and records with :data:`ON_EVERY_RANK` are printed.
        is_replaced: whether notices are left to the console of a run, which listens to its event
            log.
        held: lines of warnings that are printed later; None if they are printed at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden: frozenset[str] = frozenset()
        self.is_muted = False
        self.is_replaced = False
        self.held: list[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        is_muted = self.is_muted and record.levelno < logging.ERROR
        if is_muted and not hasattr(record, "is_of_this_rank"):
            return
        if message in self.hidden or (self.is_replaced and _is_notice(record)):
            return
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        line = clean(f"{prefix}{message}")
        if prefix and _has_color():
            line = f"{_RED if record.levelno >= logging.ERROR else _YELLOW}{line}{_RESET}"
        if self.held is not None and record.levelno == logging.WARNING:
            self.held.append(line)
        else:
            write_line(line)


def _has_color() -> bool:
    is_dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    with suppress(ValueError, AttributeError):  # standard error may be closed or missing
        return not is_dumb and not os.environ.get("NO_COLOR") and sys.stderr.isatty()
    return False


def write_line(line: str) -> None:
    """Write a line on standard error, at every level of messages: for output of other processes,
    which have selected and formatted it."""
    # Standard error may be closed, or a signal may interrupt another write: the run continues.
    with (
        suppress(OSError, ValueError, AttributeError, RuntimeError),
        discarding_unread(sys.stderr),
    ):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class NoticeRecorder(logging.Handler):
    """Collects notices for the process that writes them to the event log.

    Attributes:
        notices: the notices, in the order in which they were logged.
        messages: the messages of all records, including those that are not notices.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.notices: list[Notice] = []
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if _is_notice(record):
            self.notices.append(_as_notice(record))


class EventLogHandler(logging.Handler):
    """Writes each notice to an event log as a ``notice`` event."""

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.INFO)
        self.events = events

    def createLock(self) -> None:
        # The event log has its own lock; a second one could be taken in the opposite order
        # (deadlock).
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        if _is_notice(record):
            level, message = _as_notice(record)
            self.events.notice(message, level)


@contextmanager
def recorded_notices() -> Iterator[NoticeRecorder]:
    """Record the notices that are logged within the block."""
    with _attached(NoticeRecorder()) as recorder:
        yield recorder


@contextmanager
def log_to_events(events: EventLog) -> Iterator[None]:
    """Write notices to ``events``, whose listeners print them, within the block."""
    console = _console_handler()
    with _attached(EventLogHandler(events)):
        if console is not None:
            console.is_replaced = True
        try:
            yield
        finally:
            if console is not None:
                console.is_replaced = False


@contextmanager
def _attached(handler: Any) -> Iterator[Any]:
    _PACKAGE_LOGGER.addHandler(handler)
    if _PACKAGE_LOGGER.level == logging.NOTSET:
        _PACKAGE_LOGGER.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        _PACKAGE_LOGGER.removeHandler(handler)


def _console_handler() -> ConsoleHandler | None:
    return next((h for h in _PACKAGE_LOGGER.handlers if isinstance(h, ConsoleHandler)), None)


def _is_notice(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.INFO and getattr(record, "is_notice", True)


def _as_notice(record: logging.LogRecord) -> Notice:
    level = "warning" if record.levelno >= logging.WARNING else "info"
    # A text with a code keeps it: `getMessage` would return a plain string.
    return Notice(level, record.msg if isinstance(record.msg, UserText) else record.getMessage())


def _number_of(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]

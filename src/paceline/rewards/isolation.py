"""Compute scores in a forked process that can be killed: a computation in C reacts to no signal
handler. Only for a main thread, in a process whose other threads hold no locks."""

import contextlib
import os
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from paceline.core.processes import end_with_parent

Item = TypeVar("Item")
_RECORD = struct.Struct("<d")


def score_isolated(
    score: Callable[[Item], float], items: Sequence[Item], timeout_s: float
) -> list[float | None]:
    """Return the score of each item; None for an item that took too long, raised, or ended its
    process.

    Args:
        timeout_s: seconds that an item may take.
    """
    scores: list[float | None] = []
    while len(scores) < len(items):
        scores += _score_until_failure(score, items[len(scores) :], timeout_s)
    return scores


def _score_until_failure(
    score: Callable[[Item], float], items: Sequence[Item], timeout_s: float
) -> list[float | None]:
    """Return the scores of the first items; the last one is None unless all items have one."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _write_scores(score, items, writing)
    os.close(writing)
    scores: list[float | None] = []
    try:
        while len(scores) < len(items) and None not in scores:
            scores.append(_read_score(reading, timeout_s))
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return scores


def _write_scores(score: Callable[[Item], float], items: Sequence[Item], writing: int) -> NoReturn:
    """Write a record for each item, in the forked process, and end it."""
    try:
        end_with_parent()
        for item in items:
            os.write(writing, _RECORD.pack(score(item)))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _read_score(reading: int, timeout_s: float) -> float | None:
    """Return the next score, or None if it does not arrive in time."""
    end, record = time.monotonic() + timeout_s, b""
    while len(record) < _RECORD.size:
        ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
        part = os.read(reading, _RECORD.size - len(record)) if ready else b""
        if not part:
            return None
        record += part
    (value,) = _RECORD.unpack(record)
    return float(value)

"""Calls that a long computation makes now and then, so that others can end it by an exception."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """Called by a long computation between its parts."""
    for call in tuple(_CALLS):
        call()

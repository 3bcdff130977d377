"""How a rank, or a run of several ranks, ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from pydantic import JsonValue


class Outcome(TypedDict, total=False):
    """The outcome of a rank or of a run.

    ``report`` is the result of the ranks that have one. The other fields belong to failures:

    - ``fault``: resuming from a checkpoint may succeed; None if that is not known.
    - ``repeats``: the same exception would be raised again.
    - ``every_rank``: every rank reports the same. ``of_all``: the error describes other ranks too;
      ``blamed``: which of them.
    - ``ranks``, ``hosts``, ``reason``: for the ``fault`` event.
    - ``gone``: the process left no message. ``secondary``: only another failure caused it.
    - ``is_final``: no restart follows.
    - ``time``: seconds since the epoch.
    """

    status: str  # done, stopped, failed or finished
    exit_code: int
    report: dict[str, JsonValue] | None
    text: str
    traceback: str
    rank: int
    time: float
    fault: bool | None
    repeats: bool
    every_rank: bool
    of_all: bool
    blamed: list[int] | None
    ranks: list[int]
    hosts: list[str]
    reason: str
    gone: bool
    secondary: bool
    is_final: bool

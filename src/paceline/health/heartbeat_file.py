"""``heartbeats.json``: where each rank is just now, for whoever looks at a run from outside."""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.health.hangs import RankStatus

#: Between two writes.
_EVERY_S = 2.0


class HeartbeatFile:
    """The file of one life of a run, written over in place: a new name every two seconds would make
    work for the disk of a run that saves.

    Args:
        path: of the file; nothing is made before the first :meth:`tell`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._size = 0
        self._told_at = -float("inf")

    def tell(self, ranks: Sequence[RankStatus]) -> None:
        """What one rank knows of all; too soon after the last time nothing is written. A disk that
        is full is no matter."""
        if time.monotonic() - self._told_at < _EVERY_S:
            return
        self._told_at, now = time.monotonic(), time.time()
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(
                    self.path,
                    os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
                    0o644,
                )
            text = json.dumps(
                {
                    "time": round(now, 3),
                    "every_s": _EVERY_S,
                    "ranks": [_as_dict(one, now) for one in ranks],
                }
            )
            # it never grows shorter, so that none reads a torn end
            self._size = max(self._size, len(text))
            os.pwrite(self._file, text.ljust(self._size).encode() + b"\n", 0)

    def close(self) -> None:
        """The run's end is in its log: the file goes."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            with contextlib.suppress(OSError):
                self.path.unlink()


def _as_dict(one: RankStatus, now: float) -> dict[str, Any]:
    """``heard_at``, ``moved_at``: its last beat and last sign of progress, in seconds since the
    epoch, by one clock for all."""
    return {
        "rank": one.rank,
        "host": one.host,
        "pid": one.pid,
        "phase": one.phase,
        "step": one.step,
        "waits_for": one.waits_for,
        "heard_at": round(now - one.silent_s, 2),
        "moved_at": round(now - one.still_s, 2),
        "state": one.state,
    }

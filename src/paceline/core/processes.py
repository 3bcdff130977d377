"""Processes that do not outlive those they work for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends (Linux; elsewhere nothing is done)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_by_parent_alone(number: int) -> None:
    """Have a signal end this process only where its parent has sent it. One that goes to a whole group of processes is for the
    parent to answer, which still needs this one. (Where the sender cannot be known, on macOS, any ends it.)"""
    if not hasattr(signal, "sigwaitinfo"):
        signal.signal(number, signal.SIG_DFL)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def watch() -> None:
        while signal.sigwaitinfo({number}).si_pid != os.getppid():
            pass
        os._exit(128 + number)

    threading.Thread(target=watch, name="signal-watch", daemon=True).start()


_hiding = threading.Lock()
_hidden: list[dict[str, Any]] = []  # what was hidden, once for each block under way


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every process it starts: a script that calls
    paceline.train() needs no ``if __name__ == "__main__"``. Blocks of several threads may overlap."""
    names = vars(sys.modules["__main__"])
    with _hiding:
        _hidden.append({name: names.pop(name) for name in ("__file__", "__spec__") if name in names} if not _hidden else {})
        names["__spec__"] = None
    try:
        yield
    finally:
        with _hiding:
            kept = _hidden.pop()
            if _hidden:
                _hidden[0].update(kept)  # for the block that ends last
            else:
                names.update(kept)

"""Processes that do not outlive those they work for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

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

"""Start multiprocessing's fork server: a process that imports modules once, from which other
processes are forked."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from typing import Any

from paceline.core.files import Scratch
from paceline.core.processes import temporary_environment


def start_server(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a fork server that imports ``modules`` with these environment variables set, and exits
    when this process does. Returns immediately."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main:
        # Must be imported first. The kernel then ends the server together with the thread that
        # started it, which must therefore be the main thread.
        modules = ["paceline.core.fork_server.parent_death", *modules]
    multiprocessing.set_forkserver_preload(list(modules))
    _set_temp_dir()
    # Ctrl-C and a closed terminal signal the whole process group, and Slurm sends SIGTERM to every
    # process of a step. The server inherits that these signals are ignored. It prints no traceback,
    # lets the ranks save their checkpoint, and exits with the launcher.
    numbers = []
    if in_main:
        numbers = [
            getattr(signal, name)
            for name in ("SIGINT", "SIGTERM", "SIGHUP")
            if hasattr(signal, name)
        ]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    parent = {"PACELINE_FORK_SERVER_PARENT": str(os.getpid())}  # see parent_death.py
    try:
        with temporary_environment({**environment, **parent}):
            multiprocessing.forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def join_server() -> bool:
    """Let the processes that this process starts be forked from the server from which this process
    was forked. Return whether there is one."""
    server: Any = vars(multiprocessing.forkserver)["_forkserver"]
    if server._forkserver_address is None or server._forkserver_pid is not None:
        return False  # no server, or one that this process has started
    if getattr(server, "_forkserver_authkey", b"") is None:
        return False  # Python 3.14 does not pass on its key
    # According to its docstring this method does nothing in such a process, but it starts another
    # server (Python 3.11 to 3.14).
    server.ensure_running = resource_tracker.ensure_running
    return True


def _set_temp_dir() -> None:
    """Put the server's socket into a folder that is always removed: by the next run if this process
    is killed."""
    if multiprocessing.current_process()._config.get("tempdir") is not None:  # type: ignore[attr-defined]
        return  # the calling program has already used multiprocessing
    # The path of a socket is limited to 107 bytes, and the names below this folder take up to 60.
    is_long = len(os.fsencode(tempfile.gettempdir())) > 45
    scratch, before = Scratch(parent="/tmp" if is_long else None), tempfile.tempdir
    try:
        tempfile.tempdir = str(scratch.path)
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before
    # Runs after the finalizer of the folder's content, which has the priority -100.
    multiprocessing.util.Finalize(None, scratch.close, exitpriority=-200)

"""Manage processes: end them with their parent, check whether they are alive, describe their exit.
Query the name and the available memory of this host."""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

from paceline.core.events import RunStartEvent
from paceline.core.formatting import finite

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends for any reason. Does nothing on
    systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_starter() -> None:
    """End this process as soon as the process that started it through multiprocessing ends for any
    reason, or the fork server in between."""
    import multiprocessing.connection

    end_with_parent()  # a fork server ends with the process that started it
    starter = multiprocessing.parent_process()
    if starter is None:
        return
    sentinel = starter.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="starter-watch", daemon=True).start()


def end_by_starter_alone(number: int) -> None:
    """Let the signal ``number`` end this process only if the process that started it sent the
    signal. A signal to the whole process group is handled by that process, which still needs this
    one. On macOS, where the sender is unknown, any such signal ends it."""
    import multiprocessing

    if not hasattr(signal, "sigwaitinfo"):
        signal.signal(number, signal.SIG_DFL)
        return
    starter = multiprocessing.parent_process()
    sender = os.getppid() if starter is None else starter.pid
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    # A fork server ignores the signal, and an ignored signal never reaches `sigwaitinfo`.
    signal.signal(number, signal.SIG_DFL)

    def watch() -> None:
        while signal.sigwaitinfo({number}).si_pid != sender:
            pass
        os._exit(128 + number)

    threading.Thread(target=watch, name="signal-watch", daemon=True).start()


_hiding = threading.Lock()
#: The hidden names, for each active block.
_hidden: list[dict[str, str | ModuleSpec | None]] = []


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every process it starts, so
    that a script that calls paceline.train() needs no ``if __name__ == "__main__"``. Blocks of
    several threads may overlap."""
    names = vars(sys.modules["__main__"])
    with _hiding:
        _hidden.append(
            {name: names.pop(name) for name in ("__file__", "__spec__") if name in names}
            if not _hidden
            else {}
        )
        names["__spec__"] = None
    try:
        yield
    finally:
        with _hiding:
            hidden = _hidden.pop()
            if _hidden:
                _hidden[0].update(hidden)  # for the block that ends last
            else:
                names.update(hidden)


@contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block, and restore them after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def host_name() -> str:
    """Return the name of this host: ``PACELINE_HOST`` if it is set, because hosts may share a
    name."""
    return os.environ.get("PACELINE_HOST") or socket.gethostname()


def process_alive(pid: object, host: object, started_at: object) -> bool | None:
    """Return whether the process is alive, or None if it is on another host or the values are
    invalid.

    Args:
        pid, host: process ID and host name from a ``run_start`` event or another file.
        started_at: when the process was recorded, in seconds since the epoch.
    """
    if not isinstance(pid, int) or pid <= 0 or host != host_name():
        return None
    return pid_alive(pid, finite(started_at))


def run_alive(start: RunStartEvent) -> bool | None:
    """Return whether a run is alive, judging by its launcher, which outlives the ranks, or else by
    rank 0; None if that cannot be determined on this host."""
    pid = start.get("launcher") or start.get("pid")
    return process_alive(pid, start.get("host"), start.get("time"))


def pid_alive(pid: int, began_before: float | None = None) -> bool:
    """Return whether a process of this host is alive. A zombie counts as ended.

    Args:
        began_before: time in seconds since the epoch; a process that started later only reuses the
            ID.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return began_before is None or bool(process.create_time() < began_before + 2.0)
    except psutil.AccessDenied:
        return True  # it belongs to another user
    except (psutil.NoSuchProcess, ValueError):
        return False


def process_start_time() -> float:
    """Return when this process started, in seconds since the epoch: the time to the first step
    includes the start of Python."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as file:
            uptime_s = float(file.read().split()[0])
        return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()


def exit_text(code: int | None) -> str:
    """Describe the exit of a process that left no message.

    Args:
        code: exit code of the process, negative for a signal; None if unknown.
    """
    if not code:
        return "ended without a message"
    if code > 0:
        return f"ended without a message, with exit code {code}"
    hint = " (often: out of memory; see `dmesg`)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def available_memory() -> int:
    """Return how many bytes a new process could use on this host without swapping, within the limit
    of the control group."""
    import psutil

    available_bytes: int = psutil.virtual_memory().available
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return available_bytes  # no control group, or one without a limit
    # The kernel frees inactive page cache when memory is needed.
    return min(available_bytes, max(0, limit - used + int(stat.get("inactive_file", 0))))

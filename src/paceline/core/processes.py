"""Processes that do not outlive those they work for."""

import ctypes
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.events import RunStartEvent
from paceline.core.formatting import finite
from paceline.core.run_dir import RunDir

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends (Linux; elsewhere
    nothing is done)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_launcher() -> None:
    """End this process as soon as the launcher or the fork server is gone, however they went."""
    import multiprocessing.connection

    end_with_parent()  # the fork server, which itself ends with the launcher
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return
    sentinel = launcher.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def end_by_parent_alone(number: int) -> None:
    """Have a signal end this process only where its parent has sent it. One that goes to a whole
    group of processes is for the parent to answer, which still needs this one. (Where the sender
    cannot be known, on macOS, any ends it.)"""
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
    """Keep multiprocessing from running the caller's script again in every process it starts: a
    script that calls paceline.train() needs no ``if __name__ == "__main__"``. Blocks of several
    threads may overlap."""
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
    """Of this rank's host; ``PACELINE_HOST`` in its stead, where hosts share one."""
    return os.environ.get("PACELINE_HOST") or socket.gethostname()


def process_alive(pid: object, host: object, started_at: object) -> bool | None:
    """Return whether the process is alive; None if it is on another host, or not a process.

    Args:
        pid, host: as a ``run_start`` event or another file has them.
        started_at: seconds since the epoch.
    """
    if not isinstance(pid, int) or pid <= 0 or host != host_name():
        return None
    return pid_alive(pid, finite(started_at))


def run_alive(start: RunStartEvent) -> bool | None:
    """Return whether a run continues, by its launcher, which outlives its ranks, or else by rank
    0's process; None if that cannot be known from here."""
    pid = start.get("launcher") or start.get("pid")
    return process_alive(pid, start.get("host"), start.get("time"))


def holder_alive(run_dir: RunDir) -> bool | None:
    """Whether the process that signed a run's lock last is there; None where nobody did, or on
    another host. The lock itself is not touched."""
    try:
        handle = os.open(run_dir.lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, encoding="utf-8", errors="replace") as lock:
            signed = re.fullmatch(r"(\d{1,9}) on (.+)", lock.read(1000))
            signed_at = os.fstat(lock.fileno()).st_mtime
    except OSError:
        return None
    if signed is None or signed[2] != socket.gethostname():
        return None
    return pid_alive(int(signed[1]), signed_at)


def pid_alive(pid: int, began_before: float | None = None) -> bool:
    """Whether a process of this host is there. ``began_before`` (seconds since the epoch): one that
    got the same number after that is another (Linux; elsewhere not seen). A zombie is gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False
    except OSError:
        return True  # another user's, but there
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
        with open("/proc/stat", encoding="utf-8") as handle:
            booted = next(float(line.split()[1]) for line in handle if line.startswith("btime"))
        born = booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError, IndexError):
        return True
    return fields[0] != "Z" and (began_before is None or born < began_before + 2.0)


def available_memory() -> int:
    """Bytes that a new process could take on this host without swapping; the control group's limit
    counts too."""
    limits = []
    try:
        with open("/proc/meminfo") as handle:
            limits += [
                int(line.split()[1]) * 1024 for line in handle if line.startswith("MemAvailable")
            ]
    except (OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # files' pages give way
        limits.append(max(0, limit - used + int(stat.get("inactive_file", 0))))
    except (OSError, ValueError):
        pass  # no control group, or one without a limit
    return min(limits)

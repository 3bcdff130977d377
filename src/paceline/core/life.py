"""Whether a run's processes are still there, as far as this host can tell."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from paceline.core.events import Event
from paceline.core.run_dir import RunDir
from paceline.core.wording import finite


def host_name() -> str:
    """Of this rank's host; ``PACELINE_HOST`` in its stead, where hosts share one."""
    return os.environ.get("PACELINE_HOST") or socket.gethostname()


def process_alive(start: Event) -> bool | None:
    """Whether a run goes on, by its launcher, which outlives its ranks, or else by rank 0's process; None where that cannot be
    known from here. ``start``: its ``run_start`` event."""
    pid, host = start.get("launcher") or start.get("pid"), start.get("host")
    if not isinstance(pid, int) or pid <= 0 or host != host_name():
        return None
    return pid_alive(pid, finite(start.get("time")))


def holder_alive(run_dir: RunDir) -> bool | None:
    """Whether the process that signed a run's lock last is there; None where nobody did, or on another host. The lock itself is
    not touched."""
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
    """Whether a process of this host is there. ``began_before`` (seconds since the epoch): one that got the same number after
    that is another (Linux; elsewhere not seen). A zombie is gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False
    except OSError:
        return True  # another user's, but there
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        with open("/proc/stat", encoding="utf-8") as handle:
            booted = next(float(line.split()[1]) for line in handle if line.startswith("btime"))
        born = booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, StopIteration, ValueError, IndexError):
        return True
    return fields[0] != "Z" and (began_before is None or born < began_before + 2.0)

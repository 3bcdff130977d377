"""What this host is called, and what it has left. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.life import host_name

__all__ = ["available_memory", "host_name"]


def available_memory() -> int:
    """Bytes that a new process could take on this host without swapping; the control group's limit counts too."""
    found = []
    try:
        with open("/proc/meminfo") as handle:
            found += [int(line.split()[1]) * 1024 for line in handle if line.startswith("MemAvailable")]
    except (OSError, ValueError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        found.append(max(0, limit - used + int(stat.get("inactive_file", 0))))  # files' pages give way
    except (OSError, ValueError):
        pass  # no control group, or one without a limit
    return min(found)

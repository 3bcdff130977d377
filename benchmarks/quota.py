"""Limit the CPU time of processes with a cgroup, of version 1 or 2. Needs Linux and root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000  # the kernel's default


class QuotaUnavailable(Exception):
    """A cgroup with a CPU quota cannot be created on this host."""


@contextmanager
def cpu_quota(cores: float, name: str = "paceline-quota") -> Iterator[Path]:
    """Create a cgroup whose processes get ``cores`` seconds of CPU time per second, and yield its
    file for process IDs.

    Raises:
        QuotaUnavailable: the user is not root, or there is no CPU controller.
    """
    quota_us = round(cores * PERIOD_US)
    is_v1 = (ROOT / "cpu" / "cpu.cfs_quota_us").exists()
    cgroup = (ROOT / "cpu" if is_v1 else ROOT) / f"{name}-{os.getpid()}"
    try:
        cgroup.mkdir()
    except OSError as error:
        raise QuotaUnavailable(f"{cgroup}: {error.strerror}") from error
    try:
        try:
            if is_v1:
                (cgroup / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (cgroup / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (cgroup / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        except OSError as error:
            raise QuotaUnavailable(f"{cgroup}: no CPU controller ({error.strerror})") from error
        yield cgroup / ("tasks" if is_v1 else "cgroup.procs")
    finally:
        cgroup.rmdir()  # possible only after all its processes have ended

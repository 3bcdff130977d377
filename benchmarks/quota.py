"""A cgroup that limits the CPU time of the processes in it: version 1 or 2, whichever is mounted.
Needs root and Linux."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000  # the kernel's default


class QuotaUnavailable(Exception):
    """This host lets no cgroup with a CPU quota be made."""


@contextmanager
def cpu_quota(cores: float, name: str = "paceline-quota") -> Iterator[Path]:
    """Make a cgroup whose processes get ``cores`` of CPU time per second; yields the file that a
    process ID is written to.

    Raises:
        QuotaUnavailable: not root, or no CPU controller.
    """
    quota_us = round(cores * PERIOD_US)
    is_v1 = (ROOT / "cpu" / "cpu.cfs_quota_us").exists()
    group = (ROOT / "cpu" if is_v1 else ROOT) / f"{name}-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise QuotaUnavailable(f"{group}: {error.strerror}") from error
    try:
        try:
            if is_v1:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        except OSError as error:
            raise QuotaUnavailable(f"{group}: no CPU controller ({error.strerror})") from error
        yield group / ("tasks" if is_v1 else "cgroup.procs")
    finally:
        group.rmdir()  # works once every process in it has ended

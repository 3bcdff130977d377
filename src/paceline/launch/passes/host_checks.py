"""The result of a check, and the checks of this host that are fast enough to run at each start."""

import os
import resource
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypedDict

from paceline.config.schema import Config
from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.distributed.devices import cpu_cores

_SHARED = Path("/dev/shm")
#: With less shared memory, loader processes and NCCL run out of it. (Docker's default is 64 MB.)
_MIN_SHARED_BYTES = 1 << 30
#: Limit on open files below which ranks, loader processes and checkpoints may exceed it.
_MIN_OPEN_FILES = 1024


class CheckRecord(TypedDict):
    """A :class:`CheckResult` as JSON."""

    name: str
    ok: bool
    value: str
    advice: str | None
    fatal: bool


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Args:
        name: name of the check, which is stable for use in scripts.
        ok: whether there is no problem.
        value: measured value, as text.
        advice: advice on how to solve the problem, or None if there is none.
        fatal: whether the problem would make a run fail.
    """

    name: str
    ok: bool
    value: str
    advice: str | None = None
    fatal: bool = False

    def as_dict(self) -> CheckRecord:
        return CheckRecord(
            name=self.name, ok=self.ok, value=self.value, advice=self.advice, fatal=self.fatal
        )

    @classmethod
    def passed(cls, name: str, value: str) -> Self:
        return cls(name, True, value)

    @classmethod
    def warning(cls, name: str, value: str, advice: str) -> Self:
        """Return the result for a problem that slows runs down or has unexpected effects."""
        return cls(name, False, value, advice)

    @classmethod
    def error(cls, name: str, value: str, advice: str) -> Self:
        """Return the result for a problem that would make a run fail."""
        return cls(name, False, value, advice, fatal=True)


def quick_checks(config: Config, device_type: str, num_ranks: int) -> list[CheckResult]:
    """Run the checks of this host that take at most a millisecond and do not need torch. Return
    those that found a problem."""
    checks = [
        check_open_files(),
        check_shared_memory(
            num_ranks, config.train_args.num_loader_processes(device_type), device_type != "cpu"
        ),
    ]
    if device_type == "cpu":
        checks.append(check_threads(num_ranks))
    if num_ranks > 1:
        checks.append(check_port())
    return [check for check in checks if not check.ok]


def check_threads(num_ranks: int) -> CheckResult:
    """Check that the threads of all ranks do not outnumber the cores, which slows training down."""
    cores = cpu_cores()
    limits = {
        name: os.environ[name]
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        if os.environ.get(name)
    }
    value = f"{counted(cores, 'core')}, " + (
        ", ".join(f"{name}={count}" for name, count in limits.items()) or "shared by the ranks"
    )
    threads = max((int(count) for count in limits.values() if count.isdecimal()), default=0)
    if threads * num_ranks > cores:
        return CheckResult.warning(
            "threads",
            f"{value}: {counted(num_ranks, 'rank')} × {counted(threads, 'thread')} on"
            f" {counted(cores, 'core')}",
            f"unset {' and '.join(limits)}, or set OMP_NUM_THREADS={max(1, cores // num_ranks)}",
        )
    return CheckResult.passed("threads", value)


def check_shared_memory(num_ranks: int, loader_workers: int, accelerator: bool) -> CheckResult:
    """Check the size of /dev/shm, which loader processes and the GPUs of a host use to exchange
    data."""
    if not _SHARED.is_dir():
        return CheckResult.passed("shared_memory", "no /dev/shm on this system")
    usage = shutil.disk_usage(_SHARED)
    value = f"{human_bytes(usage.free)} of {human_bytes(usage.total)} free"
    if usage.free < _MIN_SHARED_BYTES and (loader_workers > 0 or (accelerator and num_ranks > 1)):
        advice = "start the container with `--shm-size=8g` (or `--ipc=host`)"
        return CheckResult.warning(
            "shared_memory",
            value,
            advice + (", or set `dataloader_num_workers: 0`" if loader_workers else ""),
        )
    return CheckResult.passed("shared_memory", value)


def check_open_files() -> CheckResult:
    """Check the limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft:,} at once" + (f", up to {hard:,} by `ulimit -n`" if hard != soft else "")
    if 0 <= soft < _MIN_OPEN_FILES:
        return CheckResult.warning(
            "open_files",
            value,
            f"run `ulimit -n {min(hard, 4096) if hard > 0 else 4096}` before the run",
        )
    return CheckResult.passed("open_files", value)


def check_port() -> CheckResult:
    """Check that ranks on this host can connect to each other through the loopback interface."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return CheckResult.error(
            "port",
            f"127.0.0.1: {error.strerror or error}",
            "bring the loopback interface up: `ip link set lo up`",
        )
    return CheckResult.passed("port", "a free port answers on 127.0.0.1")

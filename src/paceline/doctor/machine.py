"""What this host gives to a run: memory, threads, clocks, and the limits of a process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.core.processes import available_memory
from paceline.distributed.devices import cpu_cores
from paceline.doctor.check import Check, doubtful, well

_SHARED = Path("/dev/shm")
#: Below this loader processes and NCCL run out of it: a container gets 64 MB where nobody asks for
#: more.
_SHARED_BYTES = 1 << 30
#: Ranks, loader processes, their pipes, and the files of a checkpoint.
_OPEN_FILES = 1024
#: State of adjtimex(2): the clock is not synchronised.
_TIME_ERROR = 5
_SLOWED = (
    "clocks_event_reasons.hw_thermal_slowdown",
    "clocks_event_reasons.hw_power_brake_slowdown",
)


def check_memory() -> Check:
    """Free memory of this host. What a config needs of it is for `paceline plan` to say."""
    return well("memory", f"{human_bytes(available_memory())} free")


def check_threads(num_ranks: int) -> Check:
    """Threads and cores: too many threads a rank is the commonest way to make a CPU slow."""
    cores = cpu_cores()
    said = {
        name: os.environ[name]
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        if os.environ.get(name)
    }
    value = f"{counted(cores, 'core')}, " + (
        ", ".join(f"{name}={count}" for name, count in said.items()) or "shared by the ranks"
    )
    each = max((int(count) for count in said.values() if count.isdecimal()), default=0)
    if each * num_ranks > cores:
        return doubtful(
            "threads",
            f"{value}: {counted(num_ranks, 'rank')} × {counted(each, 'thread')} on"
            f" {counted(cores, 'core')}",
            f"unset {' and '.join(said)}, or set OMP_NUM_THREADS={max(1, cores // num_ranks)}",
        )
    return well("threads", value)


def check_clock(several_hosts: bool = False) -> Check:
    """The clock is kept right: logs and checkpoints of several hosts are compared by time."""
    state = _clock_state()
    if state is None:
        return well("clock", "not known")
    if state != _TIME_ERROR:
        return well("clock", "synchronised")
    if several_hosts:
        return doubtful(
            "clock", "not synchronised", "start chrony or systemd-timesyncd on every host"
        )
    return well("clock", "not synchronised (of no matter on one host)")


def _clock_state() -> int | None:
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None) if os.name == "posix" else None
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(512))  # all zero: asks, and changes nothing
    return None if state < 0 else int(state)


def check_frequency() -> Check:
    """Nothing holds the processor or the GPUs back."""
    held = []
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    driver = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver") or ""
    # there powersave does go up when there is work
    if governor == "powersave" and "pstate" not in driver:
        held.append("the CPU's governor is powersave")
    for line in _nvidia_smi("index", *_SLOWED):
        index, *reasons = [part.strip() for part in line.split(",")]
        held += [
            f"GPU {index} is slowed down by {why}"
            for why, on in zip(("heat", "power"), reasons, strict=False)
            if on == "Active"
        ]
    if held:
        return doubtful(
            "frequency",
            "; ".join(held),
            "look at cooling and power; `cpupower frequency-set -g performance`",
        )
    return well(
        "frequency",
        f"governor {governor}" if governor else "nothing holds it back that can be seen",
    )


def check_shared_memory(num_ranks: int, loader_workers: int, accelerator: bool) -> Check:
    """/dev/shm, through which loader processes hand over batches and the GPUs of a host speak."""
    if not _SHARED.is_dir():
        return well("shared_memory", "no /dev/shm on this system")
    total = shutil.disk_usage(_SHARED)
    value = f"{human_bytes(total.free)} of {human_bytes(total.total)} free"
    if total.free < _SHARED_BYTES and (loader_workers > 0 or (accelerator and num_ranks > 1)):
        advice = "start the container with `--shm-size=8g` (or `--ipc=host`)"
        return doubtful(
            "shared_memory",
            value,
            advice + (", or set `dataloader_num_workers: 0`" if loader_workers else ""),
        )
    return well("shared_memory", value)


def check_open_files() -> Check:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft:,} at once" + (f", up to {hard:,} by `ulimit -n`" if hard != soft else "")
    if 0 <= soft < _OPEN_FILES:
        return doubtful(
            "open_files",
            value,
            f"type `ulimit -n {min(hard, 4096) if hard > 0 else 4096}` before the run",
        )
    return well("open_files", value)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _nvidia_smi(*fields: str) -> list[str]:
    """A line a GPU; none where there is no such tool, or it knows no such field."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []

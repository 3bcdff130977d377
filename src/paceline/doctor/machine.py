"""What this host gives to a run: memory and clocks."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from paceline.core.check import Check, doubtful, well
from paceline.core.files import human_bytes
from paceline.core.processes import available_memory

#: State of adjtimex(2): the clock is not synchronised.
_TIME_ERROR = 5
_SLOWED = (
    "clocks_event_reasons.hw_thermal_slowdown",
    "clocks_event_reasons.hw_power_brake_slowdown",
)


def check_memory() -> Check:
    """Free memory of this host. What a config needs of it is for `paceline plan` to say."""
    return well("memory", f"{human_bytes(available_memory())} free")


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

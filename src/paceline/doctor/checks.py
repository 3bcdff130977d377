"""The checks of this host: memory, clocks, network, software and storage."""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from packaging.requirements import Requirement

from paceline.config.schema import Config
from paceline.core.files import cache_dir, human_bytes
from paceline.core.network import interfaces, source_address
from paceline.core.processes import available_memory
from paceline.launch.host_checks import CheckResult

#: State of adjtimex(2): the clock is not synchronised.
_TIME_ERROR = 5
_SLOWED = (
    "clocks_event_reasons.hw_thermal_slowdown",
    "clocks_event_reasons.hw_power_brake_slowdown",
)


def check_memory() -> CheckResult:
    """Free memory of this host. What a config needs of it is for `paceline plan` to say."""
    return CheckResult.passed("memory", f"{human_bytes(available_memory())} free")


def check_clock(several_hosts: bool = False) -> CheckResult:
    """The clock is kept right: logs and checkpoints of several hosts are compared by time."""
    state = _clock_state()
    if state is None:
        return CheckResult.passed("clock", "not known")
    if state != _TIME_ERROR:
        return CheckResult.passed("clock", "synchronised")
    if several_hosts:
        return CheckResult.warning(
            "clock", "not synchronised", "start chrony or systemd-timesyncd on every host"
        )
    return CheckResult.passed("clock", "not synchronised (of no matter on one host)")


def _clock_state() -> int | None:
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None) if os.name == "posix" else None
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(512))  # all zero: asks, and changes nothing
    return None if state < 0 else int(state)


def check_frequency() -> CheckResult:
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
        return CheckResult.warning(
            "frequency",
            "; ".join(held),
            "look at cooling and power; `cpupower frequency-set -g performance`",
        )
    return CheckResult.passed(
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


_CHOSEN_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def check_host_name(several_hosts: bool = False) -> CheckResult:
    """The host's own name leads to an address: gloo looks it up."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        advice = (
            f"add a line for {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface's"
            " name"
        )
        make_result = CheckResult.error if several_hosts else CheckResult.warning
        return make_result("host_name", f"{name} does not resolve", advice)
    if several_hosts and str(address).startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
        advice = (
            f"let {name} lead to the address that the other hosts see, or set GLOO_SOCKET_IFNAME"
        )
        return CheckResult.warning(
            "host_name", f"{name} is {address}, which no other host reaches", advice
        )
    return CheckResult.passed("host_name", f"{name} is {address}")


def check_interface(head: str | None = None) -> CheckResult:
    """The interface that traffic takes, and that those which the environment names are there.
    ``head``: the host to be reached; else any outside."""
    known = dict(interfaces())
    for variable in _CHOSEN_BY:
        given = os.environ.get(variable)
        names = [one.lstrip("=^") for one in (given or "").split(",") if one]
        if (
            names
            and not (given or "").startswith("^")
            and not any(name.startswith(tuple(names)) for name in known)
        ):
            return CheckResult.error(
                "interface",
                f"{variable}={given}, and there is no such interface",
                f"one of {', '.join(known)}; or unset {variable}",
            )
    try:
        address = source_address(head)
    except OSError:
        return CheckResult.passed(
            "interface",
            "no way out of this host: loopback alone"
            + (f"; {head} cannot be reached" if head else ""),
        )
    name = next((name for name, one in known.items() if one == address), "of unknown name")
    return CheckResult.passed("interface", f"{name} ({address})")


_NVIDIA = Path("/proc/driver/nvidia/version")


def check_packages(config: Config | None = None) -> CheckResult:
    """Every package that Paceline needs is there, in a version it works with; DeepSpeed,
    TensorBoard where the config asks."""
    extras = [""]
    if config is not None:
        extras += ["deepspeed"] if config.parallel.mode == "deepspeed" else []
        extras += ["tensorboard"] if "tensorboard" in config.report_to else []
    wanted = [Requirement(text) for text in importlib.metadata.requires("paceline") or []]
    wrong, found = [], []
    for one in wanted:
        if one.marker is not None and not any(
            one.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{one.name} is not installed, {one} is needed")
            continue
        found.append(f"{one.name} {version}")
        if not one.specifier.contains(version.partition("+")[0], prereleases=True):
            wrong.append(f"{one.name} {version} is installed, {one} is needed")
    value = f"Python {platform.python_version()}, " + ", ".join(found)
    if wrong:
        asked = [extra for extra in extras if extra]
        what = f"paceline[{','.join(asked)}]" if asked else "paceline"
        return CheckResult.error(
            "packages",
            "; ".join(wrong),
            f"type `pip install --upgrade '{what}'` in this environment",
        )
    return CheckResult.passed("packages", value)


def check_driver(device: str = "auto") -> CheckResult:
    """torch's build and the accelerator's driver go together. Imports torch.

    Args:
        device: `parallel.device` of the config: where it names an accelerator, being without one is
            fatal.
    """
    import torch

    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "ROCm " + torch.version.hip
        if torch.version.hip
        else "CPU"
    )
    driver = nvidia_driver()
    value = f"torch {torch.__version__}, built for {build}" + (
        f"; NVIDIA driver {driver}" if driver else ""
    )
    make_result = CheckResult.warning if device in ("auto", "cpu") else CheckResult.error
    if torch.accelerator.is_available():
        return CheckResult.passed("driver", value)
    if driver and torch.version.cuda is None:
        return make_result(
            "driver",
            f"{value}: the GPU of this machine is not used",
            "install a build of torch for CUDA (https://pytorch.org/get-started/locally), or set"
            " `parallel.device: cpu`",
        )
    if driver:
        return make_result(
            "driver",
            f"{value}: {_why_no_cuda()}",
            "update the driver, or install a torch built for an older CUDA",
        )
    if device not in ("auto", "cpu"):
        return CheckResult.error(
            "driver",
            f"{value}; no accelerator",
            "set `parallel.device: cpu`, or see whether `nvidia-smi` answers",
        )
    return CheckResult.passed("driver", f"{value}; no accelerator: training runs on the CPU")


def nvidia_driver(path: Path = _NVIDIA) -> str | None:
    """Version of the kernel's NVIDIA driver, or None where there is none."""
    try:
        text = path.read_text()
    except OSError:
        return None
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found else "of unknown version"


def _why_no_cuda() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "no GPU is visible" + (
        " (is CUDA_VISIBLE_DEVICES empty?)" if torch.cuda.device_count() == 0 else ""
    )


_TRIAL_BYTES = 8 << 20


def check_disk(
    folder: Path, checkpoint_bytes: int | None, model_bytes: int, num_kept: int | None
) -> CheckResult:
    """Free space for the checkpoints that are kept, one that is being written, and the model at the
    end.

    Args:
        checkpoint_bytes: of one checkpoint; None: not known.
        num_kept: None: all of them, however many there will be.
    """
    here = existing(folder)
    free = shutil.disk_usage(here).free
    if checkpoint_bytes is None:
        return CheckResult.passed("disk", f"{human_bytes(free)} free in {here}")
    least = checkpoint_bytes + model_bytes
    value = (
        f"{human_bytes(free)} free in {here}; a checkpoint takes {human_bytes(checkpoint_bytes)}, "
    )
    if num_kept is None:
        most = least
        value += "and all of them are kept (`save_total_limit` is not set)"
    else:
        most = checkpoint_bytes * (num_kept + 1) + model_bytes
        value += f"{num_kept} of them and one being written, with the model, {human_bytes(most)}"
    if free < least:
        return CheckResult.error("disk", value, "make room, or set `output_dir` to another disk")
    if free < most:
        return CheckResult.warning(
            "disk",
            value,
            "make room, lower `save_total_limit`, or set `output_dir` to another disk",
        )
    return CheckResult.passed("disk", value)


def check_writing(name: str, folder: Path) -> CheckResult:
    """A file can be written into ``folder`` (or where it is to be made), brought to the disk, and
    renamed. Leaves nothing."""
    here = existing(folder)
    aside: Path | None = None
    try:
        handle, path = tempfile.mkstemp(prefix=".paceline-doctor-", dir=here)
        aside = Path(path)
        with os.fdopen(handle, "wb") as file:
            start = time.perf_counter()
            file.write(os.urandom(1 << 16) * (_TRIAL_BYTES >> 16))
            file.flush()
            os.fsync(file.fileno())
            wall_s = time.perf_counter() - start
        renamed = aside.with_name(aside.name + ".renamed")
        aside.rename(renamed)
        aside = renamed
    except OSError as error:
        return CheckResult.error(
            name,
            f"{here} cannot be written: {error.strerror or error}",
            "see its owner and rights, or name another",
        )
    finally:
        if aside is not None:
            with contextlib.suppress(OSError):
                aside.unlink()
    return CheckResult.passed(
        name, f"{here} takes {human_bytes(_TRIAL_BYTES / wall_s)}/s, brought to the disk"
    )


def check_cache() -> CheckResult:
    return check_writing("cache", cache_dir())


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path

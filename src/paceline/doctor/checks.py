"""The checks of this host: memory, clocks, network, software and storage."""

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
from paceline.core.errors import first_line
from paceline.core.files import human_bytes, write_atomic
from paceline.core.network import interfaces, source_address
from paceline.core.processes import available_memory
from paceline.launch.passes.host_checks import CheckResult
from paceline.planner.model_profile import ModelProfile

#: State of adjtimex(2): the clock is not synchronized.
_TIME_ERROR = 5
_SLOWED = (
    "clocks_event_reasons.hw_thermal_slowdown",
    "clocks_event_reasons.hw_power_brake_slowdown",
)


def check_memory() -> CheckResult:
    """Report the free memory of this host. `paceline plan` says how much a config needs."""
    return CheckResult.passed("memory", f"{human_bytes(available_memory())} free")


def check_clock(several_hosts: bool = False) -> CheckResult:
    """Check that the clock is synchronized: logs of several hosts are compared by time."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None) if os.name == "posix" else None
    # A buffer of zeros only reads the state.
    state = -1 if adjtimex is None else int(adjtimex(ctypes.create_string_buffer(512)))
    if state < 0:
        return CheckResult.passed("clock", "not known")
    if state != _TIME_ERROR:
        return CheckResult.passed("clock", "synchronized")
    if several_hosts:
        return CheckResult.warning(
            "clock", "not synchronized", "start chrony or systemd-timesyncd on every host"
        )
    return CheckResult.passed("clock", "not synchronized (does not matter on one host)")


def check_frequency() -> CheckResult:
    """Check that neither the CPU nor a GPU is throttled."""
    throttled = []
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    driver = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver") or ""
    # With a pstate driver, powersave does raise the frequency under load.
    if governor == "powersave" and "pstate" not in driver:
        throttled.append("the CPU's governor is powersave")
    for line in _nvidia_smi("index", *_SLOWED):
        index, *states = [part.strip() for part in line.split(",")]
        throttled += [
            f"GPU {index} is throttled by {cause}"
            for cause, state in zip(("heat", "power"), states, strict=False)
            if state == "Active"
        ]
    if throttled:
        return CheckResult.warning(
            "frequency",
            "; ".join(throttled),
            "check cooling and power supply; for the CPU: `cpupower frequency-set -g performance`",
        )
    return CheckResult.passed(
        "frequency", f"governor {governor}" if governor else "no throttling detected"
    )


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _nvidia_smi(*fields: str) -> list[str]:
    """Return one line per GPU; none without nvidia-smi, or if it does not know a field."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def check_host_name(several_hosts: bool = False) -> CheckResult:
    """Check that the name of this host resolves: Gloo looks it up."""
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
            f"make {name} resolve to the address that the other hosts use, or set"
            " GLOO_SOCKET_IFNAME"
        )
        return CheckResult.warning(
            "host_name", f"{name} is {address}, which no other host reaches", advice
        )
    return CheckResult.passed("host_name", f"{name} is {address}")


def check_interface(endpoint_address: str | None = None) -> CheckResult:
    """Check that the interfaces that the environment names exist, and report the one that traffic
    to ``endpoint_address`` (default: to the outside) takes."""
    known = dict(interfaces())
    for variable in _INTERFACE_VARIABLES:
        value = os.environ.get(variable, "")
        names = tuple(name.lstrip("=^") for name in value.split(",") if name)
        is_exclusion = value.startswith("^")
        if names and not is_exclusion and not any(name.startswith(names) for name in known):
            return CheckResult.error(
                "interface",
                f"{variable}={value}: no such interface",
                f"set it to one of {', '.join(known)}, or unset it",
            )
    try:
        address = source_address(endpoint_address)
    except OSError:
        return CheckResult.passed(
            "interface",
            "no route out of this host, only loopback"
            + (f"; {endpoint_address} cannot be reached" if endpoint_address else ""),
        )
    name = next(
        (name for name, known_address in known.items() if known_address == address),
        "unknown interface",
    )
    return CheckResult.passed("interface", f"{name} ({address})")


def check_layers(profile: ModelProfile, config: Config, device_type: str) -> CheckResult | None:
    """Check that the packages with kernels for a model's recurrent and convolution layers are
    installed. None if the kinds of its layers are not known."""
    texts = profile.kernel_texts(config, device_type)
    if not texts:
        return None
    value = "; ".join(text.removeprefix("layers: ") for text in texts)
    missing = sorted({package for layers in profile.layers for package in layers.missing})
    if not missing or device_type == "cpu":
        return CheckResult.passed("layers", value)
    return CheckResult.warning(
        "layers", value, f"run `pip install {' '.join(missing)}` to use these kernels"
    )


_NVIDIA = Path("/proc/driver/nvidia/version")


def check_packages(config: Config | None = None) -> CheckResult:
    """Check that every required package is installed in a supported version, with the extras that
    the config needs (DeepSpeed, TensorBoard)."""
    extras = [""]
    if config is not None:
        extras += ["deepspeed"] if config.parallel.mode == "deepspeed" else []
        extras += ["tensorboard"] if "tensorboard" in config.report_to else []
    problems, installed = [], [f"Python {platform.python_version()}"]
    for requirement in map(Requirement, importlib.metadata.requires("paceline") or []):
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed, {requirement} is required")
            continue
        installed.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version.partition("+")[0], prereleases=True):
            problems.append(f"{requirement.name} {version} is installed, {requirement} is required")
    if problems:
        package = f"paceline[{','.join(extras[1:])}]" if extras[1:] else "paceline"
        return CheckResult.error(
            "packages",
            "; ".join(problems),
            f"run `pip install --upgrade '{package}'` in this environment",
        )
    return CheckResult.passed("packages", ", ".join(installed))


def check_driver(device: str = "auto") -> CheckResult:
    """Check that torch's build supports the accelerator's driver. Imports torch.

    Args:
        device: `parallel.device` of the config. If it names an accelerator, a missing one is fatal.
    """
    import torch

    build = "CPU"
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    elif torch.version.xpu:
        build = f"XPU (oneAPI {torch.version.xpu})"
    driver = nvidia_driver()
    value = f"torch {torch.__version__}, built for {build}"
    if driver:
        value += f"; NVIDIA driver {driver}"
    make_result = CheckResult.warning if device in ("auto", "cpu") else CheckResult.error
    if torch.accelerator.is_available():
        return CheckResult.passed("driver", value)
    if driver and torch.version.cuda is None:
        return make_result(
            "driver",
            f"{value}: the GPU of this machine is not used",
            "install torch built for CUDA (https://pytorch.org/get-started/locally), or set"
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
            "set `parallel.device: cpu`, or check the driver with `nvidia-smi`",
        )
    return CheckResult.passed("driver", f"{value}; no accelerator: training runs on the CPU")


def nvidia_driver(path: Path = _NVIDIA) -> str | None:
    """Return the version of the kernel's NVIDIA driver; None without one."""
    try:
        text = path.read_text()
    except OSError:
        return None
    match = re.search(r"(\d+\.\d+(?:\.\d+)?)", text)
    return match[1] if match else "of unknown version"


def _why_no_cuda() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "no GPU is visible (is CUDA_VISIBLE_DEVICES empty?)"


_TRIAL_BYTES = 8 << 20


def check_disk(
    folder: Path, checkpoint_bytes: int | None, model_bytes: int, num_kept: int | None
) -> CheckResult:
    """Check that the retained checkpoints, one that is being written, and the final model fit on
    the disk.

    Args:
        checkpoint_bytes: size of one checkpoint; None if it is not known.
        num_kept: `save_total_limit`; None: all checkpoints are retained.
    """
    folder = existing(folder)
    free = shutil.disk_usage(folder).free
    value = f"{human_bytes(free)} free in {folder}"
    if checkpoint_bytes is None:
        return CheckResult.passed("disk", value)
    min_bytes = max_bytes = checkpoint_bytes + model_bytes
    value += f"; a checkpoint takes {human_bytes(checkpoint_bytes)}, "
    if num_kept is None:
        value += "and all of them are kept (`save_total_limit` is not set)"
    else:
        max_bytes += checkpoint_bytes * num_kept
        value += f"{num_kept} of them, one being written and the model {human_bytes(max_bytes)}"
    if free < min_bytes:
        return CheckResult.error(
            "disk", value, "free disk space, or set `output_dir` to another disk"
        )
    if free < max_bytes:
        return CheckResult.warning(
            "disk",
            value,
            "free disk space, lower `save_total_limit`, or set `output_dir` to another disk",
        )
    return CheckResult.passed("disk", value)


def check_writing(name: str, folder: Path) -> CheckResult:
    """Check that a file in ``folder`` (or in its nearest existing parent) can be written, synced
    and renamed. Leaves nothing behind."""
    folder = existing(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".paceline-doctor-", dir=folder) as trial_dir:
            start = time.perf_counter()
            write_atomic(Path(trial_dir) / "trial", os.urandom(1 << 16) * (_TRIAL_BYTES >> 16))
            wall_s = time.perf_counter() - start
    except OSError as error:
        return CheckResult.error(
            name,
            f"{folder} cannot be written: {error.strerror or error}",
            "change its owner or permissions, or set another folder",
        )
    return CheckResult.passed(name, f"{folder}: {human_bytes(_TRIAL_BYTES / wall_s)}/s, synced")


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent folder that exists."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path

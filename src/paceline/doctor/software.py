"""Versions that must fit each other: Paceline's dependencies, torch's build and the driver."""

import importlib.metadata
import platform
import re
from pathlib import Path

from packaging.requirements import Requirement

from paceline.config.schema import Config
from paceline.core.check import Check, broken, doubtful, well

_NVIDIA = Path("/proc/driver/nvidia/version")


def check_packages(config: Config | None = None) -> Check:
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
        return broken(
            "packages",
            "; ".join(wrong),
            f"type `pip install --upgrade '{what}'` in this environment",
        )
    return well("packages", value)


def check_driver(device: str = "auto") -> Check:
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
    missed = broken if device not in ("auto", "cpu") else doubtful
    if torch.accelerator.is_available():
        return well("driver", value)
    if driver and torch.version.cuda is None:
        return missed(
            "driver",
            f"{value}: the GPU of this machine is not used",
            "install a build of torch for CUDA (https://pytorch.org/get-started/locally), or set"
            " `parallel.device: cpu`",
        )
    if driver:
        return missed(
            "driver",
            f"{value}: {_why_no_cuda()}",
            "update the driver, or install a torch built for an older CUDA",
        )
    if device not in ("auto", "cpu"):
        return broken(
            "driver",
            f"{value}; no accelerator",
            "set `parallel.device: cpu`, or see whether `nvidia-smi` answers",
        )
    return well("driver", f"{value}; no accelerator: training runs on the CPU")


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

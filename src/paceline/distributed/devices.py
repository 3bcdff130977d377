"""Choose the devices and the precision of a run. A device that is not available is an error."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError
from paceline.core.texts import UserText

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.config.schema.parallel import Parallel

#: Environment variables that limit the visible devices: CUDA, ROCm, Intel GPUs.
_VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
#: Lowest compute capability of GPUs with TensorFloat-32.
TF32_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Devices:
    """The devices of this host that a run uses, one per rank."""

    type: str
    count: int
    names: list[str] = field(default_factory=list)
    notices: list[tuple[str, str]] = field(default_factory=list)


def without_idle_offload(
    parallel: Parallel, device_type: str
) -> tuple[Parallel, list[tuple[str, str]]]:
    """Turn off `parallel.cpu_offload` on a CPU, where it has no effect. Return the settings and the
    notices as (level, text)."""
    if device_type != "cpu" or parallel.cpu_offload == "none":
        return parallel, []
    text = UserText(
        "`parallel.cpu_offload: {offload_text}` has no effect on a CPU: everything is already"
        " in the host's memory",
        code="offload-without-effect",
        offload_text=parallel.offload_text,
    )
    return parallel.model_copy(update={"cpu_offload": "none"}), [("info", text)]


def expands_segments(device_type: str) -> bool:
    """Return whether ranks enable expandable segments in torch's caching allocator: on CUDA, unless
    the environment has settings for the allocator."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return device_type == "cuda" and not any(name in os.environ for name in names)


def cpu_cores() -> int:
    """Return the number of cores that this process may use: by its affinity, and by the limit of
    its container."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    limit = container_cores()
    return cores if limit is None else max(1, min(cores, limit))


@cache
def container_cores(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the cores that the control group of a container allows, rounded up, or None (version 2
    of control groups, else version 1)."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text()
            period = (root / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        return math.ceil(int(quota) / int(period)) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return None


def accelerators() -> tuple[str | None, list[str]]:
    """Return the type of accelerator, or None, and the names of the visible ones.

    Initializes no device context.
    """
    import torch

    if not torch.accelerator.is_available():
        return None, []
    current = torch.accelerator.current_accelerator()
    assert current is not None
    count = torch.accelerator.device_count()
    module: Any = getattr(torch, current.type, None)
    names = []
    for index in range(count):
        try:
            names.append(module.get_device_name(index))
        except (AttributeError, RuntimeError):
            names.append(current.type)
    return current.type, names


def gpu_capability(device_type: str, count: int) -> tuple[int, int] | None:
    """Return the lowest compute capability of the first ``count`` NVIDIA GPUs, or None on other
    devices."""
    if device_type != "cuda":
        return None
    import torch

    if torch.version.hip:
        return None
    return min(torch.cuda.get_device_capability(index) for index in range(count))


def check_several_ranks(device_type: str, num_ranks: int) -> None:
    """Raise ConfigError if ranks on these devices cannot communicate."""
    if device_type == "mps" and num_ranks > 1:
        raise ConfigError(
            "`parallel.device: mps` is not supported with {num_ranks} ranks: torch has no"
            " collectives for tensors on Apple GPUs",
            code="mps-with-several-ranks",
            allowed="one rank on `mps`",
            fix="set `parallel.mode: single`, or `parallel.device: cpu` on each host",
            num_ranks=num_ranks,
        )


def choose_devices(
    parallel: Parallel, num_launched: int | None = None, single_device: bool = False
) -> Devices:
    """Choose the devices of this host for a config.

    Args:
        num_launched: number of ranks that an outer launcher started on this host, or None.
        single_device: whether the mode of the config trains on one device only.

    Raises:
        ConfigError: if the requested devices are not available.
    """
    count = None if parallel.num_gpus == "auto" else int(parallel.num_gpus)
    if num_launched is not None:
        if count not in (None, num_launched):
            raise ConfigError(
                "`parallel.num_gpus: {count}` contradicts the outer launcher, which started"
                " {num_launched} ranks on this host",
                code="num-gpus-contradicts-launcher",
                fix="start it with `--nproc-per-node {count}`, or leave `parallel.num_gpus` out",
                count=count,
                num_launched=num_launched,
            )
        count = num_launched
    if single_device:
        if count not in (None, 1):
            raise ConfigError(
                "`parallel.num_gpus: {count}` is not supported with `parallel.mode: {mode}`: it"
                " trains on one device",
                code="num-gpus-with-single-device-mode",
                fix="set `parallel.num_gpus: 1`, or `parallel.mode: ddp`",
                count=count,
                mode=parallel.mode,
            )
        count = 1
    if parallel.device == "cpu":
        return _cpu(count, "`parallel.device: cpu`")
    kind, names = accelerators()
    visible = [f"{name}={os.environ[name]!r}" for name in _VISIBLE if name in os.environ]
    limited = f" ({', '.join(visible)})" if visible else ""
    if parallel.device not in ("auto", kind):
        raise ConfigError(
            "`parallel.device: {device}` is not available: this machine has {present}"
            if kind
            else "`parallel.device: {device}` is not available: no accelerator was found{limited}",
            code="device-not-available" if kind else "no-accelerator",
            allowed="auto, cpu, {kind}" if kind else "auto, cpu",
            fix="to run on the CPU, set `parallel.device=cpu`",
            device=parallel.device,
            present=f"{len(names)} × {kind}",
            kind=kind,
            limited=limited,
        )
    if kind is None or not names:
        if parallel.num_gpus != "auto" and num_launched is None:
            raise ConfigError(
                "`parallel.num_gpus: {count}`: no GPU was found{limited}",
                code="no-gpu",
                fix="check the driver with `nvidia-smi`; or set `parallel.device=cpu` to run"
                " {num_gpus:rank} on the CPU",
                count=count,
                limited=limited,
                num_gpus=int(parallel.num_gpus),
            )
        return _cpu(count, f"no GPU was found{limited}")
    if num_launched is not None and num_launched > len(names):
        raise ConfigError(
            "the outer launcher started {num_launched} ranks on this host, but a rank sees only"
            " {num_names} × {kind}{limited}",
            code="launcher-started-too-many-ranks",
            allowed="every rank sees all GPUs of its host, and uses the GPU of its LOCAL_RANK",
            fix="with srun, request `--gpus-per-node` instead of `--gpus-per-task`; otherwise do"
            " not limit {visible} per rank; or start {num_names} per host",
            num_launched=num_launched,
            num_names=len(names),
            kind=kind,
            limited=limited,
            visible=_VISIBLE[0],
        )
    return _gpus(kind, names, count, limited)


def _gpus(kind: str, names: list[str], count: int | None, limited: str) -> Devices:
    if count is not None and count > len(names):
        raise ConfigError(
            "`parallel.num_gpus: {count}`: only {num_names} × {kind} visible{limited}: {names}",
            code="too-few-gpus",
            allowed="1 to {num_names}, or auto",
            fix="set `parallel.num_gpus={num_names}`; or set `parallel.device=cpu` to run {count}"
            " ranks on the CPU",
            count=count,
            num_names=len(names),
            kind=kind,
            limited=limited,
            names=", ".join(names),
        )
    chosen = names[: count or len(names)]
    listing = ", ".join(f"{kind}:{index} {name}" for index, name in enumerate(chosen))
    notices: list[tuple[str, str]] = [
        (
            "info",
            UserText(
                "devices: {num_chosen} of {num_names} visible{limited}: {listing}",
                code="devices",
                num_chosen=len(chosen),
                num_names=len(names),
                limited=limited,
                listing=listing,
            ),
        )
    ]
    return Devices(kind, len(chosen), chosen, notices)


def _cpu(requested: int | None, reason: str) -> Devices:
    cores = cpu_cores()
    count = requested if requested is not None else min(2, cores)
    notices: list[tuple[str, str]] = [
        (
            "info",
            UserText(
                "devices: CPU ({reason}), {count:rank} on {cores} cores",
                code="devices-cpu",
                reason=reason,
                count=count,
                cores=cores,
            ),
        )
    ]
    if count > cores:
        text = UserText(
            "{count} CPU ranks share {cores} cores: slower than {cores} ranks",
            code="cpu-ranks-share-cores",
            count=count,
            cores=cores,
        )
        notices.append(("warning", text))
    return Devices("cpu", count, ["cpu"] * count, notices)


def with_precision(
    config: Config, device_type: str, names: Sequence[str] = ()
) -> tuple[Config, str]:
    """Replace ``train_args.precision: auto`` by the precision for these devices.

    Args:
        names: names of the devices of this machine that the run uses, from index 0 on.

    Returns:
        The config, and a message about its precision.
    """
    args = config.train_args
    if args.precision != "auto":
        return config, UserText(
            "precision: {precision}", code="precision-set", precision=args.precision
        )
    precision, reason = resolve(device_type, names)
    update = {"train_args": args.with_derived({"precision": precision})}
    return (
        config.model_copy(update=update),
        UserText(
            "precision: {precision}, chosen by `precision: auto`: {reason}",
            code="precision-chosen",
            precision=precision,
            reason=reason,
        ),
    )


def with_capability(device_type: str, capability: tuple[int, int] | None) -> str:
    """Return the name of a device type for messages, with the compute capability, if any."""
    if capability is None:
        return f"`{device_type}`"
    return "`{}` with compute capability {}.{}".format(device_type, *capability)


def with_supported_tf32(
    config: Config, device_type: str, capability: tuple[int, int] | None
) -> tuple[Config, str | None]:
    """Return the config without `train_args.tf32: true` if these devices have no TensorFloat-32,
    and a warning about it. Recipes set it for all kinds of devices.

    Args:
        capability: see :func:`gpu_capability`.
    """
    args = config.train_args
    if not args.tf32 or (capability is not None and capability >= TF32_CAPABILITY):
        return config, None
    shown = with_capability(device_type, capability)
    return (
        config.model_copy(update={"train_args": args.model_copy(update={"tf32": None})}),
        UserText(
            "`train_args.tf32: true` has no effect on {shown}, which has no TensorFloat-32:"
            " products are computed in float32",
            code="tf32-without-effect",
            shown=shown,
        ),
    )


def resolve(device_type: str, names: Sequence[str] = ()) -> tuple[str, str]:
    """Return the precision that ``auto`` selects on devices of this machine, and the reason."""
    if device_type == "cpu":
        return "32", UserText("float32 on a CPU", code="float32-on-cpu")
    indices = range(max(1, len(names)))
    shown = ", ".join(dict.fromkeys(names)) or device_type
    supported = [_supports_bf16(device_type, index) for index in indices]
    if all(supported):
        text = UserText("bfloat16 is supported by {devices}", code="has-bfloat16", devices=shown)
        return "bf16-mixed", text
    if any(is_supported is None for is_supported in supported) or device_type == "mps":
        return "32", UserText(
            "whether {devices} supports bfloat16 is not known",
            code="bfloat16-not-known",
            devices=shown,
        )
    lacking = (
        ", ".join(dict.fromkeys(names[index] for index in indices if not supported[index]))
        if names
        else shown
    )
    return "fp16-mixed", UserText(
        "bfloat16 is not supported by {devices}", code="no-bfloat16", devices=lacking
    )


def _supports_bf16(device_type: str, index: int) -> bool | None:
    """Return whether the device supports bfloat16 without emulation, or None if torch cannot
    tell."""
    import torch

    if device_type == "cuda":
        # Same as torch.cuda.is_bf16_supported(including_emulation=False), which checks only the
        # current device.
        return bool(torch.version.hip) or torch.cuda.get_device_properties(index).major >= 8
    if device_type == "xpu":
        return bool(torch.xpu.get_device_properties(index).has_bfloat16_conversions)
    if device_type == "mps":
        # Metal supports bfloat16 since macOS 14.
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    module: Any = getattr(torch, device_type, None)
    # torch.autocast calls this function for other accelerators.
    known = getattr(module, "get_amp_supported_dtype", None)
    return None if known is None else torch.bfloat16 in known()

"""Which devices a run takes. Never a silent fallback: what was asked for is there, or it is an
error."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted


@dataclass(frozen=True)
class Devices:
    """The devices of this host that a run takes, one rank each."""

    type: str
    count: int
    names: list[str] = field(default_factory=list)
    notices: list[tuple[str, str]] = field(default_factory=list)


def without_idle_offload(
    parallel: Parallel, device_type: str
) -> tuple[Parallel, list[tuple[str, str]]]:
    """``parallel`` without ``cpu_offload`` on a CPU, where all state is in the host's memory
    already, and the notice of it."""
    if device_type != "cpu" or parallel.cpu_offload == "none":
        return parallel, []
    text = (
        f"`parallel.cpu_offload: {parallel.cpu_offload}` has no effect on a CPU: all state is"
        " in the host's"
        " memory already"
    )
    return parallel.model_copy(update={"cpu_offload": "none"}), [("info", text)]


def cpu_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def accelerators() -> tuple[str | None, list[str]]:
    """(accelerator type or None, the names of the visible ones). Initialises no device context."""
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


def choose_devices(parallel: Parallel, ranks_given: int | None = None) -> Devices:
    """The devices for a config, on this host. ``ranks_given``: the number of ranks an outer
    launcher started here.

    Raises:
        ConfigError: asked-for devices are not there; the text says what was found and how to run on
            the CPU.
    """
    wanted = None if parallel.num_gpus == "auto" else int(parallel.num_gpus)
    if ranks_given is not None:
        if wanted not in (None, ranks_given):
            raise ConfigError(
                f"`parallel.num_gpus` is {wanted}, and the outer launcher started {ranks_given}"
                " ranks on this host",
                fix=f"start it with `--nproc-per-node {wanted}`, or leave `parallel.num_gpus` out",
            )
        wanted = ranks_given
    if parallel.mode == "single":
        if wanted not in (None, 1):
            raise ConfigError(
                "`parallel.mode: single` trains on one device, and `parallel.num_gpus` is"
                f" {wanted}",
                fix="set `parallel.num_gpus: 1`, or `parallel.mode: ddp`",
            )
        wanted = 1
    if parallel.device == "cpu":
        return _cpu(wanted, "asked for by `parallel.device: cpu`")
    kind, names = accelerators()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
    if parallel.device not in ("auto", kind):
        raise ConfigError(
            f"`parallel.device: {parallel.device}` was asked for, and "
            + (
                f"this machine has {len(names)} × {kind}"
                if kind
                else f"no accelerator was found{limited}"
            ),
            allowed="auto, cpu" + (f", {kind}" if kind else ""),
            fix="to run on the CPU, set `parallel.device=cpu`",
        )
    if kind is None or not names:
        if parallel.num_gpus != "auto" and ranks_given is None:
            ranks = counted(int(parallel.num_gpus), "rank")
            raise ConfigError(
                f"`parallel.num_gpus: {wanted}` was asked for, and no GPU was found{limited}",
                fix=(
                    f"check the driver with `nvidia-smi`; or run on the CPU with {ranks} by"
                    " `parallel.device=cpu`"
                ),
            )
        return _cpu(wanted, f"no GPU was found{limited}")
    if wanted is not None and wanted > len(names):
        raise ConfigError(
            f"`parallel.num_gpus: {wanted}` was asked for, and {len(names)} × {kind} are"
            f" visible{limited}: {', '.join(names)}",
            allowed=f"1 to {len(names)}, or auto",
            fix=(
                f"set `parallel.num_gpus={len(names)}`; or run {wanted} ranks on the CPU with"
                " `parallel.device=cpu`"
            ),
        )
    taken = names[: wanted or len(names)]
    listing = ", ".join(f"{kind}:{index} {name}" for index, name in enumerate(taken))
    notices = [("info", f"devices: {len(taken)} of {len(names)} visible{limited}: {listing}")]
    return Devices(kind, len(taken), taken, notices)


def _cpu(wanted: int | None, why: str) -> Devices:
    cores = cpu_cores()
    count = wanted if wanted is not None else min(2, cores)
    notices = [
        ("info", f"devices: CPU ({why}), {count} rank{'s' if count > 1 else ''} on {cores} cores")
    ]
    if count > cores:
        notices.append(
            (
                "warning",
                f"{count} CPU ranks share {cores} cores: right, but slower than {cores} ranks",
            )
        )
    return Devices("cpu", count, ["cpu"] * count, notices)


def with_precision(
    config: Config, device_type: str, names: Sequence[str] = ()
) -> tuple[Config, str]:
    """The config with ``auto`` replaced by the precision for these devices, and a line for the
    user.

    Args:
        names: of the devices of this machine that are used, from index 0 on.
    """
    args = config.train_args
    if args.precision != "auto":
        return config, f"precision: {args.precision}"
    precision, reason = resolve(device_type, names)
    update = {"train_args": args.model_copy(update={"precision": precision})}
    return (
        config.model_copy(update=update),
        f"precision: {precision}, chosen by `precision: auto`: {reason}",
    )


def resolve(device_type: str, names: Sequence[str] = ()) -> tuple[str, str]:
    """What ``auto`` is on devices of this machine, and why."""
    if device_type == "cpu":
        return "32", "float32 on a CPU"
    indices = range(max(1, len(names)))
    shown = ", ".join(dict.fromkeys(names)) or device_type
    supported = [_supports_bf16(device_type, index) for index in indices]
    if all(supported):
        return "bf16-mixed", f"bfloat16 is supported by {shown}"
    if any(is_supported is None for is_supported in supported) or device_type == "mps":
        return "32", f"whether {shown} supports bfloat16 is not known"
    lacking = (
        ", ".join(dict.fromkeys(names[index] for index in indices if not supported[index]))
        if names
        else shown
    )
    return "fp16-mixed", f"bfloat16 is not supported by {lacking}"


def _supports_bf16(device_type: str, index: int) -> bool | None:
    """Whether the device computes in bfloat16 without emulation; None if torch cannot tell."""
    import torch

    if device_type == "cuda":
        # As torch.cuda.is_bf16_supported(including_emulation=False), which looks at the current
        # device alone.
        return bool(torch.version.hip) or torch.cuda.get_device_properties(index).major >= 8
    if device_type == "xpu":
        return bool(torch.xpu.get_device_properties(index).has_bfloat16_conversions)
    if device_type == "mps":
        # Metal has bfloat16 from macOS 14 on
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    module: Any = getattr(torch, device_type, None)
    # which torch.autocast asks of other accelerators
    known = getattr(module, "get_amp_supported_dtype", None)
    return None if known is None else torch.bfloat16 in known()

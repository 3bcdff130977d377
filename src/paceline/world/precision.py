"""The precision of a run: what ``train_args.precision: auto`` means on the devices that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.config.schema import Config


def with_precision(config: Config, device_type: str, names: Sequence[str] = ()) -> tuple[Config, str]:
    """The config with ``auto`` replaced by the precision for these devices, and a line for the user.

    Args:
        names: of the devices of this machine that are used, from index 0 on.
    """
    args = config.train_args
    if args.precision != "auto":
        return config, f"precision: {args.precision}"
    precision, reason = resolve(device_type, names)
    update = {"train_args": args.model_copy(update={"precision": precision})}
    return config.model_copy(update=update), f"precision: {precision}, chosen by `precision: auto`: {reason}"


def resolve(device_type: str, names: Sequence[str] = ()) -> tuple[str, str]:
    """What ``auto`` is on devices of this machine, and why."""
    if device_type == "cpu":
        return "32", "float32 on a CPU"
    indices = range(max(1, len(names)))
    shown = ", ".join(dict.fromkeys(names)) or device_type
    supported = [_supports_bf16(device_type, index) for index in indices]
    if all(supported):
        return "bf16-mixed", f"bfloat16 is supported by {shown}"
    if any(one is None for one in supported) or device_type == "mps":
        return "32", f"whether {shown} supports bfloat16 is not known"
    lacking = ", ".join(dict.fromkeys(names[index] for index in indices if not supported[index])) if names else shown
    return "fp16-mixed", f"bfloat16 is not supported by {lacking}"


def _supports_bf16(device_type: str, index: int) -> bool | None:
    """Whether the device computes in bfloat16 without emulation; None if torch cannot tell."""
    import torch

    if device_type == "cuda":
        # As torch.cuda.is_bf16_supported(including_emulation=False), which looks at the current device alone.
        return bool(torch.version.hip) or torch.cuda.get_device_properties(index).major >= 8
    if device_type == "xpu":
        return bool(torch.xpu.get_device_properties(index).has_bfloat16_conversions)
    if device_type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))  # Metal has bfloat16 from macOS 14 on
    module: Any = getattr(torch, device_type, None)
    known = getattr(module, "get_amp_supported_dtype", None)  # which torch.autocast asks of other accelerators
    return None if known is None else torch.bfloat16 in known()

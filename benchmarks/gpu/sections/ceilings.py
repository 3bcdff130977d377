"""Versions, and the rates that no training step can exceed."""

import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cases import Case, Section
from context import Context

PACKAGES = ("torch", "transformers", "peft", "accelerate", "triton", "bitsandbytes", "torchao",
            "liger-kernel", "pydantic", "numpy")  # fmt: skip


def section(is_simulated: bool) -> Section:
    """Return the section."""
    why = "needs a GPU: speed is not measured on simulated devices" if is_simulated else ""
    return Section(
        "ceilings",
        40,
        [
            Case("versions", "sections.ceilings:list_versions", limit_s=40),
            Case("matrix product", "sections.ceilings:multiply", is_timing=True, why_skipped=why),
            Case("copy", "sections.ceilings:copy", is_timing=True, why_skipped=why),
            Case("launch", "sections.ceilings:launch", is_timing=True, why_skipped=why),
        ],
    )


def list_versions(context: Context) -> dict[str, Any]:
    """Return the versions of packages, and what the driver says about the device."""
    import torch

    figures: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            figures[name] = version(name)
        except PackageNotFoundError:
            figures[name] = None
    properties = torch.cuda.get_device_properties(0)
    return figures | {
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(0)),
    }


def multiply(context: Context) -> dict[str, Any]:
    """Return the FLOP/s of square products."""
    import torch

    size = 8192
    figures = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        left, right = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        seconds = seconds_of(lambda left=left, right=right: left @ right)
        figures[f"{str(dtype).removeprefix('torch.')}_flops_s"] = 2 * size**3 / seconds
    return figures


def copy(context: Context) -> dict[str, Any]:
    """Return the bytes per second that copies read and write: on the device, and over the bus."""
    import torch

    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target, pinned = torch.empty_like(source), torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    part = source[: pinned.numel()]
    return {
        "device_bytes_s": 2 * source.numel() / seconds_of(lambda: target.copy_(source)),
        "to_device_bytes_s": pinned.numel()
        / seconds_of(lambda: part.copy_(pinned, non_blocking=True)),
        "to_host_bytes_s": pinned.numel()
        / seconds_of(lambda: pinned.copy_(part, non_blocking=True)),
    }


def launch(context: Context) -> dict[str, Any]:
    """Return the seconds that the host and the device take for a small kernel."""
    import torch

    values, count = torch.zeros(16, device="cuda"), 2000
    for _ in range(count):
        values.add_(1)
    torch.cuda.synchronize()
    started_at = time.perf_counter()
    for _ in range(count):
        values.add_(1)
    host_s = (time.perf_counter() - started_at) / count
    torch.cuda.synchronize()
    return {"host_s": host_s, "total_s": (time.perf_counter() - started_at) / count}


def seconds_of(function: Callable[[], Any], num_repeats: int = 10) -> float:
    """Return the median device time of a call in seconds, after two calls to warm up."""
    import torch

    for _ in range(2):
        function()
    times = []
    for _ in range(num_repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]

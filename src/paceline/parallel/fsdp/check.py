"""Checks `parallel.cpu_offload` against the device."""

import torch

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims


def check_offload(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError for ``parallel.cpu_offload`` without an accelerator."""
    device = config.parallel.device
    on_cpu = device == "cpu" or (device == "auto" and not torch.accelerator.is_available())
    if config.parallel.cpu_offload != "none" and on_cpu:
        raise offload_needs_accelerator(config.parallel.cpu_offload)


def offload_needs_accelerator(offload: str) -> ConfigError:
    """Return the error for offloading from the CPU to the CPU."""
    return ConfigError(
        f"`parallel.cpu_offload: {offload}` is not supported with `parallel.device: cpu`: all state"
        " is already in the host's memory; offloading requires an accelerator",
        allowed="on the CPU: `parallel.cpu_offload: none`",
        fix="leave `parallel.cpu_offload` out",
    )

"""Checks `parallel.cpu_offload` against the device. Imports no torch."""

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims


def check_offload(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError for ``parallel.cpu_offload`` with ``parallel.device: cpu``."""
    if config.parallel.cpu_offload != "none" and config.parallel.device == "cpu":
        raise offload_needs_accelerator(config.parallel.offload_text)


def offload_needs_accelerator(offload: str) -> ConfigError:
    """Return the error for offloading from the CPU to the CPU."""
    return ConfigError(
        "`parallel.cpu_offload: {offload}` is not supported with `parallel.device: cpu`: all state"
        " is already in the host's memory; offloading requires an accelerator",
        code="offload-on-cpu",
        allowed="on the CPU: `parallel.cpu_offload: none`",
        fix="leave `parallel.cpu_offload` out",
        offload=offload,
    )

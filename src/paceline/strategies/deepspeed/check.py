"""Checks a config for `parallel.mode: deepspeed`."""

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.strategies.deepspeed.config import check_json, stage_of
from paceline.strategies.deepspeed.installation import check_installed
from paceline.strategies.fsdp.check import check_offload


def check_settings(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError for an unsupported ZeRO stage, offload or DeepSpeed JSON."""
    if stage_of(config.parallel) == 0:
        raise ConfigError(
            "`parallel.mode: deepspeed` is not supported with ZeRO stage 0: stage 0 shards nothing",
            code="deepspeed-stage-zero",
            allowed="stages 1, 2 and 3",
            fix="set `parallel.mode: ddp`, which does the same",
        )
    check_offload(config, dims)
    check_json(config, dims.size)


def check_package(config: Config) -> None:
    """Raise ConfigError if DeepSpeed is not installed."""
    check_installed(stage_of(config.parallel))

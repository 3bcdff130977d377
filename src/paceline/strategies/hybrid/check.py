"""Checks that a model's sizes fit the dimensions of a mesh, from its config alone."""

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.distributed.mesh import ParallelDims
from paceline.models.builtin import config_numbers
from paceline.models.tensor_plan.plan import check_sizes as check_heads
from paceline.strategies.pipeline.stages import check_sizes as check_layers
from paceline.strategies.pipeline.stages import num_chunks


def check_sizes(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError if the tensor ranks do not divide the heads, or if there are fewer layers
    than pipeline stages."""
    if config.task not in CAUSAL_TASKS or dims.shard * dims.tensor * dims.pipeline == 1:
        return
    numbers = config_numbers(config.model)
    check_heads(numbers, dims.tensor)
    if dims.pipeline > 1:
        settings = config.parallel
        chunks = num_chunks(settings.pipeline_schedule, settings.stages_per_rank)
        check_layers(numbers, dims.pipeline, chunks)

"""Check that a model can be divided among the ranks of a mesh, before the ranks exist."""

from typing import Any

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.models.blocks import find_blocks
from paceline.models.shape.trace import trace_model
from paceline.strategies.expert.division import check_experts
from paceline.strategies.pipeline.model_check import check_trace
from paceline.strategies.pipeline.runner import divide_model
from paceline.strategies.pipeline.stages import num_chunks
from paceline.strategies.tensor.model_check import check_split_step


def check_model(model: Any, config: Config, dims: ParallelDims) -> None:
    """Check a model on the meta device. The layers of the model are split in place.

    Raises:
        ConfigError: if it cannot be divided into stages, or a step with split layers fails.
    """
    if dims.expert > 1:
        check_experts(model, dims.expert)
    if dims.pipeline > 1:
        check_stages(model, config, dims.pipeline)
    if dims.tensor > 1:
        check_split_step(model, config, dims.tensor)


def check_stages(model: Any, config: Config, num_ranks: int) -> None:
    """Check that a model on the meta device can be divided into pipeline stages.

    Raises:
        ConfigError: if it cannot be divided.
    """
    trace = trace_model(model)
    if trace is not None and trace.error is not None:
        return  # some models cannot run forward on the meta device; the ranks check these
    blocks = find_blocks(model)
    check_trace(model, blocks, trace)
    chunks = num_chunks(config.parallel.pipeline_schedule, config.parallel.stages_per_rank)
    divide_model(model, blocks, num_ranks * chunks, trace)

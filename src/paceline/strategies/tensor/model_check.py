"""Check that a model still runs with its layers split for tensor parallelism, before the ranks
exist."""

from typing import Any

import torch
import torch.distributed as dist

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, first_line
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.models.blocks import base_model
from paceline.models.checks.step import step_failure
from paceline.strategies.tensor.shard import TensorParallelizer


class ShapeCommunicator(Communicator):
    """The communicator of rank 0 of several ranks that do not exist. Collectives leave tensors as
    they are, which is enough where only shapes are computed."""

    has_peers = False

    def __init__(self, axes: ParallelDims) -> None:
        env = RankEnv(0, axes.size, 0, axes.size)
        super().__init__(env, torch.device("meta"), axes)

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> dist.Work | None:
        return None

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> dist.Work | None:
        return None

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> dist.Work | None:
        return None


def check_split_step(model: Any, config: Config, num_ranks: int) -> None:
    """Split the layers of a model on the meta device in place, and run a step over made-up tokens.

    A model that also fails without the split passes: some cannot run on the meta device.

    Raises:
        ConfigError: the layers cannot be split, or the step fails because of the split.
    """
    fails_before = step_failure(model) is not None
    group = ShapeCommunicator(ParallelDims(tensor=num_ranks))
    TensorParallelizer(model, group, config.parallel)
    failure = None if fails_before else step_failure(model)
    if failure is not None:
        error = failure[1]
        raise ConfigError(
            "`parallel.tensor` is not supported with {kind}: with its layers split over"
            " {num_ranks} ranks, a step fails: {exception}: {reason}",
            code="failed-step",
            fix="leave `parallel.tensor` out, or describe another split in `parallel.tensor_plan`",
            kind=type(base_model(model)).__name__,
            num_ranks=num_ranks,
            exception=type(error).__name__,
            reason=first_line(error),
        )

"""How buckets of gradients are summed over the replicas, where the backend's all-reduce is not to
do it."""

from collections.abc import Mapping

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.collectives import run as collectives
from paceline.distributed.comm_thread import CommThread, PendingComm
from paceline.distributed.communicator import Communicator
from paceline.parallel.ddp.buckets import GradientBuckets
from paceline.parallel.loss_scale import LossScaler


class GradientReducer:
    """Sums each bucket by an all-reduce of our own, in a thread beside backward: the buckets in
    their order, on every rank.

    Args:
        config: of the run.
        world: all ranks. The sum is over its axis data. Making one is a collective.
    """

    #: What came up, as (level, text).
    notices: tuple[tuple[str, str], ...] = ()
    #: Gradients are summed by :meth:`clip_and_sum`, after backward, instead of bucket by bucket
    #: during it.
    late = False
    #: Of float16 training: the gradients in the buckets are multiplied by its scale.
    scaler: LossScaler | None = None

    def __init__(self, config: Config, world: Communicator) -> None:
        self.config = config
        self.world = world
        self.comm_thread = CommThread(world, "data", timeout_s=config.parallel.collective_timeout_s)

    def bind(self, buckets: GradientBuckets, trained: Mapping[str, nn.Parameter]) -> None:
        """Take the buckets, and the names of what lies in them; called once."""

    def start(self, number: int, flat: torch.Tensor) -> PendingComm:
        """Begin to sum bucket ``number``, in place. Buckets come in one order on every rank."""
        algorithm = self.config.parallel.all_reduce_algorithm
        return self.comm_thread.submit(lambda line: collectives.all_reduce(line, flat, algorithm))

    def end_step(self) -> None:
        """All buckets of a step are summed."""

    def clip_and_sum(self, max_norm: float) -> torch.Tensor:
        """Where :attr:`late`: as a strategy's ``clip_grad_norm``, and the sum over the replicas."""
        raise NotImplementedError

    def finish_step(self, made: bool) -> None:
        """The end of a step. Where its update was not ``made``, what is kept becomes what it was
        before."""

    def optimizer(self, built: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What makes the step, given what the engine would have make it."""
        return built

    def memory_tensors(self) -> list[torch.Tensor]:
        """What is kept from step to step."""
        return []

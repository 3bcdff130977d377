"""What may sum buckets of gradients over the replicas instead of the backend's all-reduce."""

from collections.abc import Mapping

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.comm_thread import CommThread, PendingComm
from paceline.distributed.communicator import Communicator
from paceline.parallel.buckets.gradients import GradientBuckets
from paceline.parallel.comm_profile import CommProfile, StrategyMetrics
from paceline.parallel.loss_scale import LossScaler
from paceline.parallel.state import StateReader, TensorShard, dropped_state_notices


class GradientReducer:
    """Base class of reducers. A reducer sums each bucket in a background thread during backward, in
    the same order on every rank.

    The constructor is a collective.

    Args:
        config: config of the run.
        world: communicator of all ranks. Gradients are summed over its data axis.
    """

    #: Notices as (level, message).
    notices: tuple[tuple[str, str], ...] = ()
    #: Whether gradients are summed by :meth:`clip_and_sum` after backward instead of bucket by
    #: bucket during it.
    late = False
    #: Loss scaler of float16 training; its scale is a factor of the gradients in the buckets.
    scaler: LossScaler | None = None

    def __init__(self, config: Config, world: Communicator) -> None:
        self.config = config
        self.world = world
        self.comm_thread = CommThread(world, "data", timeout_s=config.parallel.collective_timeout_s)

    def bind(self, buckets: GradientBuckets, trained: Mapping[str, nn.Parameter]) -> None:
        """Set the buckets to reduce and the parameters in them, by name. Called once."""

    def start(self, number: int, flat: torch.Tensor) -> PendingComm:
        """Start to sum bucket ``number`` in place. All ranks must call it in the same order."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Called after all buckets of a step have been summed."""

    def clip_and_sum(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients, sum them over the replicas and return their norm. Called only if
        :attr:`late`."""
        raise NotImplementedError

    def finish_step(self, updated: bool) -> None:
        """End a step. If the update was skipped, restore the state from before the step."""

    def optimizer(self, built: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that makes the update: the configured one, or a replacement."""
        return built

    @property
    def unscales(self) -> bool:
        """Whether buckets are divided by the loss scale before they are summed."""
        return False

    @property
    def needs_rollback_on_skip(self) -> bool:
        """Whether :meth:`finish_step` has state to restore after a skipped update."""
        return False

    # -- state and report
    def memory_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are kept from step to step."""
        return []

    def extra_state(self) -> list[TensorShard]:
        """Return the state of this rank that a resumed run needs."""
        return []

    def load_extra_state(self, source: StateReader) -> list[tuple[str, str]]:
        """Load :meth:`extra_state` from a checkpoint. Return notices as (level, text)."""
        return dropped_state_notices(source)

    @property
    def comm_profile(self) -> CommProfile | None:
        """What is sent, if it is less than plain ddp sends; else None."""
        return None

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        """Return sections of the report. A collective.

        Args:
            sent_bytes: bytes per step that the rank with the most traffic was measured to send.
        """
        return {}

"""What some strategies do beside the contract of :class:`~paceline.parallel.base.Strategy`. Users
ask with ``isinstance``."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class RankLoss:
    """A rank whose process has ended, and without which the others go on.

    Args:
        reason: for a person, as in ``was killed by SIGKILL``.
        replica, replicas: which share of the batch it had, of how many.
        steps_missed: of the steps made so far, the last ones in which its share was not trained on.
    """

    rank: int
    pid: int
    reason: str
    replica: int
    replicas: int
    steps_missed: int


@runtime_checkable
class SupportsElasticWorkers(Protocol):
    """Continues without ranks whose processes have ended."""

    def set_token_counts(self, local: float, total: Callable[[], torch.Tensor]) -> None:
        """Called before each ``forward_backward``: the count of this rank's share, and what returns
        the one that the loss is divided by."""

    def poll_rank_losses(self) -> list[RankLoss]:
        """Ranks that were lost since the last call; the same on every rank at the same place of the
        same step. From here on ``replica`` and ``num_replicas`` are those of the ranks left."""


@runtime_checkable
class HasServerRanks(Protocol):
    """Some ranks hold what others ask for, and train on no data."""

    def model_init_context(self) -> AbstractContextManager[None]:
        """Within it, a task's model is built as this rank can hold it."""

    def close(self) -> None:
        """End what was opened beside the process group; called once, at the end of a run that
        succeeded. A collective."""


@runtime_checkable
class SupportsConsolidation(Protocol):
    """The weights of a step are not those of a checkpoint."""

    def consolidated(self) -> AbstractContextManager[None]:
        """Within it, the weights are those that a checkpoint would hold under ``model/``: what is
        evaluated, and what is saved where rank 0 has the full model. A collective."""


def consolidated(strategy: object) -> AbstractContextManager[None]:
    """Within it, the strategy's weights are those of a checkpoint. A collective."""
    if isinstance(strategy, SupportsConsolidation):
        return strategy.consolidated()
    return nullcontext()


def model_init_context(strategy: object) -> AbstractContextManager[None]:
    """Within it, a task's model is built as this rank can hold it."""
    if isinstance(strategy, HasServerRanks):
        return strategy.model_init_context()
    return nullcontext()


def close_servers(strategy: object) -> None:
    """End what the strategy opened beside the process group. A collective."""
    if isinstance(strategy, HasServerRanks):
        strategy.close()

"""What some strategies do besides the contract of :class:`~paceline.parallel.base.Strategy`: the
protocols, and the functions that use them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.parallel.base import Strategy
from paceline.parallel.comm_profile import CommProfile, StrategyMetrics
from paceline.parallel.state import StateReader, TensorShard, local_tensor

#: Runs an evaluation batch through a module.
EvalFn = Callable[[nn.Module], dict[str, torch.Tensor]]


def parts_of(strategy: Strategy) -> list[object]:
    """Return the objects that may implement a protocol: the component that sums the strategy's
    gradients, if it has one, and the strategy."""
    reducer = getattr(strategy, "reducer", None)
    return [strategy] if reducer is None else [reducer, strategy]


# -- shares of the batch
@dataclass(frozen=True)
class RankLoss:
    """A rank whose process has ended, while the other ranks continue.

    Args:
        reason: why it ended, such as ``was killed by SIGKILL``.
        replica, replicas: the share of the batch that it had, and the number of shares.
        steps_missed: number of the latest steps whose updates do not include its share.
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

    @property
    def replica(self) -> int:
        """The share of the global batch that this rank works on."""

    @property
    def num_replicas(self) -> int:
        """Number of shares of the global batch: one for each remaining worker."""

    def set_token_counts(self, local: float, total: Callable[[], torch.Tensor]) -> None:
        """Receive, before each ``forward_backward``, the count of this rank's share and a function
        that returns the count that the loss is divided by."""

    def poll_rank_losses(self) -> list[RankLoss]:
        """Return the ranks lost since the last call; the same on every rank at the same point of
        the same step. It also updates ``replica`` and ``num_replicas``."""


def elastic_workers(strategy: Strategy) -> SupportsElasticWorkers | None:
    """Return the strategy if it continues without ranks whose processes have ended, else None."""
    return strategy if isinstance(strategy, SupportsElasticWorkers) else None


def replica_of(strategy: Strategy) -> tuple[int, int]:
    """Return the share of the global batch that this rank works on, and the number of shares."""
    if isinstance(strategy, SupportsElasticWorkers):
        return strategy.replica, strategy.num_replicas
    axes = strategy.world.axes
    return axes.replica(strategy.world.rank), axes.replicas


@runtime_checkable
class HasServerRanks(Protocol):
    """Some ranks are servers and train on no data."""

    @property
    def has_data(self) -> bool:
        """False on a rank that has no share of the batch."""

    def model_init_context(self) -> AbstractContextManager[None]:
        """Return a context in which a task's model is built without the tensors that this rank
        cannot hold."""

    def close(self) -> None:
        """Close connections other than the process group. A collective, called once at the end of
        a successful run."""


def has_data(strategy: Strategy) -> bool:
    """Return False on a rank that has no share of the batch."""
    return strategy.has_data if isinstance(strategy, HasServerRanks) else True


def reports_loss(strategy: Strategy) -> bool:
    """Return True on the one rank of each replica whose losses and counts are the replica's."""
    if isinstance(strategy, HasServerRanks):
        return strategy.has_data
    place = strategy.world.coordinates
    return place["tensor"] == 0 and place["pipeline"] == strategy.world.axes.pipeline - 1


def model_init_context(strategy: Strategy) -> AbstractContextManager[None]:
    """Return the context in which a task's model is built on this rank."""
    return strategy.model_init_context() if isinstance(strategy, HasServerRanks) else nullcontext()


def close_servers(strategy: Strategy) -> None:
    """Close the strategy's connections other than the process group. A collective."""
    if isinstance(strategy, HasServerRanks):
        strategy.close()


@runtime_checkable
class SupportsIndependentReplicas(Protocol):
    """Groups of ranks make steps without the other ranks."""

    @property
    def count_group(self) -> Communicator:
        """The ranks whose count, times the number of such groups in the world, divides the loss of
        this step."""

    @property
    def max_count_lag(self) -> int:
        """Maximum number of steps between a rank and the counts of the others, if ``count_group``
        is not all ranks."""

    @property
    def traffic_period(self) -> int:
        """Number of steps after which the traffic of a step repeats."""


def count_group(strategy: Strategy) -> Communicator:
    """Return the ranks whose count divides the loss of this step: all ranks for most strategies."""
    if isinstance(strategy, SupportsIndependentReplicas):
        return strategy.count_group
    return strategy.world


def max_count_lag(strategy: Strategy) -> int:
    """Return the maximum number of steps between a rank and the counts of the others."""
    return strategy.max_count_lag if isinstance(strategy, SupportsIndependentReplicas) else 1


def traffic_period(strategy: Strategy) -> int:
    """Return the number of steps after which the traffic of a step repeats. The traffic per step is
    a mean over them."""
    return strategy.traffic_period if isinstance(strategy, SupportsIndependentReplicas) else 1


# -- a step
@runtime_checkable
class UnscalesGradients(Protocol):
    """Can divide gradients by the loss scale itself."""

    @property
    def unscales(self) -> bool:
        """True if it does with these settings."""


def unscale_grads(strategy: Strategy) -> None:
    """Divide the gradients by the loss scale; called between ``forward_backward`` and
    ``clip_grad_norm``."""
    parts = parts_of(strategy)
    if strategy.scaler is None or any(
        isinstance(part, UnscalesGradients) and part.unscales for part in parts
    ):
        return
    parameters = [each for group in strategy.optimizer.param_groups for each in group["params"]]
    strategy.scaler.unscale(local_tensor(each.grad) for each in parameters if each.grad is not None)


@runtime_checkable
class SupportsUpdateRollback(Protocol):
    """Can have state that must be restored if an update is skipped."""

    @property
    def needs_rollback_on_skip(self) -> bool:
        """True if it has; then every rank must know at once whether the update is skipped."""


def needs_rollback_on_skip(strategy: Strategy) -> bool:
    """Return True if a skipped update must restore more than weights and optimizer."""
    return any(
        isinstance(part, SupportsUpdateRollback) and part.needs_rollback_on_skip
        for part in parts_of(strategy)
    )


@runtime_checkable
class SupportsLocalGradCheck(Protocol):
    """The gradients of a rank are available before they are added to those of the others."""

    def local_grad_finite(self) -> torch.Tensor | None:
        """Return a float32 scalar that is not finite if this rank's gradient of the last
        ``forward_backward`` was not, before it was added to the others'."""


def local_grad_finite(strategy: Strategy) -> torch.Tensor | None:
    """Return a scalar that is not finite if this rank's gradient was not. None if gradients are
    summed over ranks within backward."""
    if isinstance(strategy, SupportsLocalGradCheck):
        return strategy.local_grad_finite()
    return None


# -- evaluation and state
@runtime_checkable
class SupportsSharedEvaluation(Protocol):
    """The forward pass is a collective of a replica's ranks."""

    def evaluate(self, run: EvalFn, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """Run an evaluation batch of this replica. Returns None on ranks without the result."""


def evaluate(strategy: Strategy, run: EvalFn, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Run an evaluation batch of this replica: a collective within the replica. Returns None on
    ranks without the result (:func:`reports_loss` is true on the one that has it)."""
    if isinstance(strategy, SupportsSharedEvaluation):
        return strategy.evaluate(run, model)
    result = run(model)
    return result if reports_loss(strategy) else None


@runtime_checkable
class SupportsConsolidation(Protocol):
    """The weights in training differ from those in a checkpoint."""

    def consolidated(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are those that a checkpoint has under ``model/``.
        They are evaluated, and saved if rank 0 has the full model. A collective."""


def consolidated(strategy: Strategy) -> AbstractContextManager[None]:
    """Return a context in which the strategy's weights are those of a checkpoint. A collective."""
    if isinstance(strategy, SupportsConsolidation):
        return strategy.consolidated()
    return nullcontext()


@runtime_checkable
class SupportsExtraState(Protocol):
    """Has more state than parameters and the optimizer's state."""

    def extra_state(self) -> list[TensorShard]:
        """Return the other state of this rank that a resumed run needs, with the names of the
        checkpoint."""

    def load_extra_state(self, source: StateReader) -> list[tuple[str, str]]:
        """Read it, on every rank, after parameters and optimizer were read. State that does not fit
        is dropped. Returns notices."""


@runtime_checkable
class RefreshesWeights(Protocol):
    """The weights of the forward pass are not the tensors of ``tensor_shards``."""

    def after_load(self) -> None:
        """Update the weights of the forward pass after ``tensor_shards`` were written to."""


@runtime_checkable
class SavesOwnShards(Protocol):
    """Writes other values into a checkpoint than those of ``tensor_shards``."""

    def state_shards(self) -> list[TensorShard]:
        """As :func:`paceline.parallel.save_load.state_shards`."""


@runtime_checkable
class SupportsStateCheck(Protocol):
    """Cannot read every checkpoint."""

    def check_state(self, source: StateReader) -> None:
        """Raise ConfigError for a state that cannot be read."""


@runtime_checkable
class SupportsOptimizerStateMapping(Protocol):
    """The layout of the optimizer's state differs from that of the parameters."""

    def optimizer_entries(self, shard: TensorShard) -> dict[str, torch.Tensor]:
        """Return the optimizer's state of a shard, by entry."""

    def load_optimizer_entry(
        self, source: StateReader, name: str, shape: tuple[int, ...], shard: TensorShard
    ) -> torch.Tensor:
        """Read the tensor ``name`` of ``shape`` for a shard."""


@runtime_checkable
class SupportsTransientMemory(Protocol):
    """Temporarily has more tensors in a step than ``memory_tensors`` can list."""

    @property
    def transient_bytes(self) -> int:
        """Maximum number of bytes of them."""


# -- replicas and reports
@runtime_checkable
class SupportsReplicaCheck(Protocol):
    """Some ranks have the same bits after a step."""

    @property
    def replica_group(self) -> Communicator | None:
        """The ranks that have, after this step, the same bits of ``replicated_tensors``."""

    def replicated_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of this rank's parameters and their optimizer state, in the same
        order on every rank of ``replica_group``."""


def checkable_replicas(strategy: Strategy) -> SupportsReplicaCheck | None:
    """Return the strategy if some of its ranks have the same bits after this step, else None."""
    if isinstance(strategy, SupportsReplicaCheck) and strategy.replica_group is not None:
        return strategy
    return None


@runtime_checkable
class SupportsCommProfile(Protocol):
    """Can describe how the gradients of replicas are summed, and what that sends."""

    @property
    def comm_profile(self) -> CommProfile | None:
        """The description; None if nothing is sent."""


def comm_profile(strategy: Strategy) -> CommProfile | None:
    """Return how replicas are synchronized, if that is by plain ddp or by a method that sends less
    instead."""
    profiles = [
        part.comm_profile for part in parts_of(strategy) if isinstance(part, SupportsCommProfile)
    ]
    return profiles[0] if profiles else None


@runtime_checkable
class ReportsMetrics(Protocol):
    """Adds sections to the report."""

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        """Return sections of the report. A collective.

        Args:
            sent_bytes: measured bytes per step of the rank that sends most.
        """


def report_metrics(strategy: Strategy, sent_bytes: float | None) -> StrategyMetrics:
    """Return the strategy's sections of the report. A collective."""
    sections: StrategyMetrics = {}
    for part in parts_of(strategy):
        if isinstance(part, ReportsMetrics):
            sections.update(part.report_metrics(sent_bytes))
    return sections


@runtime_checkable
class SupportsTrafficEstimate(Protocol):
    """Sends outside its steps."""

    def sent_in_a_step(self, measured: int | None) -> int | None:
        """Return the mean bytes that this rank sends per step, given the bytes measured within its
        steps."""


def sent_in_a_step(strategy: Strategy, measured: int | None) -> int | None:
    """Return the mean bytes that this rank sends per step, given the bytes measured within its
    steps."""
    if isinstance(strategy, SupportsTrafficEstimate):
        return strategy.sent_in_a_step(measured)
    return measured

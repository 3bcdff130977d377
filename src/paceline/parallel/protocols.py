"""Optional protocols that some strategies implement in addition to
:class:`~paceline.parallel.base.Strategy`, and functions that use them with any strategy."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.models.weights import deferred_conversion
from paceline.parallel.base import Strategy
from paceline.parallel.comm_profile import CommProfile, StrategyMetrics
from paceline.parallel.state import StateReader, TensorShard, local_tensor

#: Runs an evaluation batch through a module.
EvalFn = Callable[[nn.Module], dict[str, torch.Tensor]]


def parts_of(strategy: Strategy) -> list[object]:
    """Return the objects that may implement a protocol for a strategy: its gradient reducer, if it
    has one, and the strategy itself."""
    reducer = getattr(strategy, "reducer", None)
    return [strategy] if reducer is None else [reducer, strategy]


# -- shares of the batch
@dataclass(frozen=True)
class RankLoss:
    """A rank that was lost while the other ranks continue.

    Args:
        reason: reason why its process ended, such as ``was killed by SIGKILL``.
        replica: number of its share of the global batch.
        replicas: number of shares of the global batch before the loss.
        steps_missed: number of recent steps whose updates do not include its share.
    """

    rank: int
    pid: int
    reason: str
    replica: int
    replicas: int
    steps_missed: int


@runtime_checkable
class SupportsElasticWorkers(Protocol):
    """A strategy that can continue after ranks were lost."""

    @property
    def replica(self) -> int:
        """Number of the share of the global batch that this rank processes."""

    @property
    def num_replicas(self) -> int:
        """Number of shares of the global batch, one for each remaining worker."""

    def set_token_counts(self, local: float, total: Callable[[], torch.Tensor]) -> None:
        """Set the token count of this rank's share, and a function that returns the count that the
        loss is divided by. Called before each ``forward_backward``."""

    def poll_rank_losses(self) -> list[RankLoss]:
        """Return the ranks lost since the last call, and update ``replica`` and ``num_replicas``.
        The result is the same on every rank at the same point of the same step."""


def set_token_counts(strategy: Strategy, local: float, total: Callable[[], torch.Tensor]) -> None:
    """Call ``set_token_counts`` if the strategy can continue after ranks were lost."""
    if isinstance(strategy, SupportsElasticWorkers):
        strategy.set_token_counts(local, total)


def poll_rank_losses(strategy: Strategy) -> list[RankLoss]:
    """Return the ranks lost since the last call: none, if the strategy cannot continue without
    them."""
    return strategy.poll_rank_losses() if isinstance(strategy, SupportsElasticWorkers) else []


def replica_of(strategy: Strategy) -> tuple[int, int]:
    """Return the number of the share of the global batch that this rank processes, and the number
    of shares."""
    if isinstance(strategy, SupportsElasticWorkers):
        return strategy.replica, strategy.num_replicas
    axes = strategy.world.axes
    return axes.replica(strategy.world.rank), axes.replicas


@runtime_checkable
class HasServerRanks(Protocol):
    """A strategy in which some ranks are servers and process no data."""

    @property
    def has_data(self) -> bool:
        """False on a rank that has no share of the batch."""

    def close(self) -> None:
        """Close all connections except those of the process group. A collective, called once at the
        end of a successful run."""


def has_data(strategy: Strategy) -> bool:
    """Return False on a rank that has no share of the batch."""
    return strategy.has_data if isinstance(strategy, HasServerRanks) else True


def reports_loss(strategy: Strategy) -> bool:
    """Return True on the rank that reports the losses and counts of its replica; exactly one rank
    of each replica does."""
    if isinstance(strategy, HasServerRanks):
        return strategy.has_data
    place = strategy.world.coordinates
    return place["tensor"] == 0 and place["pipeline"] == strategy.world.axes.pipeline - 1


@runtime_checkable
class HoldsPartOfModel(Protocol):
    """A strategy in which a rank holds a part of the model."""

    def model_init_context(self) -> AbstractContextManager[None]:
        """Return a context in which the task builds its model without using memory for tensors that
        do not fit on this rank."""


def model_init_context(strategy: Strategy) -> AbstractContextManager[None]:
    """Return the context in which the task builds its model on this rank."""
    if isinstance(strategy, HoldsPartOfModel):
        return strategy.model_init_context()
    # The weights are converted on the accelerator, to which they are copied one at a time.
    return nullcontext() if strategy.world.device.type == "cpu" else deferred_conversion()


def close_servers(strategy: Strategy) -> None:
    """Close the strategy's connections except those of the process group. A collective."""
    if isinstance(strategy, HasServerRanks):
        strategy.close()


@runtime_checkable
class SupportsIndependentReplicas(Protocol):
    """A strategy in which groups of ranks make steps independently of other groups."""

    @property
    def count_group(self) -> Communicator:
        """The group that this rank belongs to. Its token count, times the number of groups, divides
        the loss of this step."""

    @property
    def max_count_lag(self) -> int:
        """Maximum number of steps that a rank may be ahead of the counts of the other ranks, if
        ``count_group`` does not contain all ranks."""

    @property
    def traffic_period(self) -> int:
        """Number of steps after which the traffic of a step repeats."""


def count_group(strategy: Strategy) -> Communicator:
    """Return the group whose token count divides the loss of this step. For most strategies it
    contains all ranks."""
    if isinstance(strategy, SupportsIndependentReplicas):
        return strategy.count_group
    return strategy.world


def max_count_lag(strategy: Strategy) -> int:
    """Return the maximum number of steps that a rank may be ahead of the counts of the others."""
    return strategy.max_count_lag if isinstance(strategy, SupportsIndependentReplicas) else 1


def traffic_period(strategy: Strategy) -> int:
    """Return the number of steps after which the traffic of a step repeats. Reports contain the
    mean traffic over these steps."""
    return strategy.traffic_period if isinstance(strategy, SupportsIndependentReplicas) else 1


# -- a step
@runtime_checkable
class UnscalesGradients(Protocol):
    """A strategy that can divide the gradients by the loss scale itself."""

    @property
    def unscales(self) -> bool:
        """Whether the strategy does so with the current settings."""


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
    """A strategy that may have state that must be restored if an update is skipped."""

    @property
    def needs_rollback_on_skip(self) -> bool:
        """Whether it has such state. If so, every rank must know immediately whether the update is
        skipped."""


def needs_rollback_on_skip(strategy: Strategy) -> bool:
    """Return True if skipping an update must restore more than the weights and the optimizer."""
    return any(
        isinstance(part, SupportsUpdateRollback) and part.needs_rollback_on_skip
        for part in parts_of(strategy)
    )


@runtime_checkable
class SupportsLocalGradCheck(Protocol):
    """A strategy in which the gradients of a rank are available before they are reduced."""

    def local_grad_finite(self) -> torch.Tensor | None:
        """Return a float32 scalar that is finite only if this rank's gradient in the last
        ``forward_backward`` was finite before the reduction."""


def local_grad_finite(strategy: Strategy) -> torch.Tensor | None:
    """Return a scalar that is finite only if this rank's gradient was finite, or None if gradients
    are reduced within backward."""
    if isinstance(strategy, SupportsLocalGradCheck):
        return strategy.local_grad_finite()
    return None


# -- evaluation and state
@runtime_checkable
class SupportsSharedEvaluation(Protocol):
    """A strategy in which the forward pass is a collective of a replica's ranks."""

    def evaluate(self, run: EvalFn, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """Run an evaluation batch of this replica. Return None on ranks without the result."""


def evaluate(strategy: Strategy, run: EvalFn, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Run an evaluation batch of this replica. A collective of the replica's ranks. Return None on
    ranks without the result (:func:`reports_loss` is true on the rank that has it)."""
    if isinstance(strategy, SupportsSharedEvaluation):
        return strategy.evaluate(run, model)
    result = run(model)
    return result if reports_loss(strategy) else None


@runtime_checkable
class SupportsConsolidation(Protocol):
    """A strategy whose weights in training differ from those in a checkpoint."""

    def consolidated(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that a checkpoint stores under
        ``model/``. They are used for evaluation, and for the saved model if rank 0 has the full
        model. A collective."""


@contextmanager
def consolidated(strategy: Strategy) -> Iterator[None]:
    """Return a context in which the model has the weights that a checkpoint stores. A
    collective."""
    with averaged_weights(strategy):
        if isinstance(strategy, SupportsConsolidation):
            with strategy.consolidated():
                yield
        else:
            yield


@runtime_checkable
class SupportsExtraState(Protocol):
    """A strategy with state other than parameters, buffers and optimizer state."""

    def extra_state(self) -> list[TensorShard]:
        """Return the other state of this rank that a resumed run needs, under its names in the
        checkpoint."""

    def load_extra_state(self, source: StateReader) -> list[tuple[str, str]]:
        """Load this state from a checkpoint, on every rank, after parameters and optimizer state
        were loaded. State that does not fit is dropped. Return notices as (level, text)."""


@runtime_checkable
class RefreshesWeights(Protocol):
    """A strategy whose forward pass reads other tensors than those of ``tensor_shards``."""

    def after_load(self) -> None:
        """Update the weights that the forward pass reads after ``tensor_shards`` were loaded."""


@runtime_checkable
class SavesOwnShards(Protocol):
    """A strategy that saves other values in a checkpoint than those of ``tensor_shards``."""

    def state_shards(self) -> list[TensorShard]:
        """Return the shards to save; see :func:`paceline.parallel.save_load.state_shards`."""


@runtime_checkable
class SupportsStateCheck(Protocol):
    """A strategy that cannot load every checkpoint."""

    def check_state(self, source: StateReader) -> None:
        """Raise ConfigError if this checkpoint cannot be loaded."""


@runtime_checkable
class SupportsOptimizerStateMapping(Protocol):
    """A strategy whose optimizer state has another layout than its parameters."""

    def optimizer_entries(self, shard: TensorShard) -> dict[str, torch.Tensor]:
        """Return the optimizer state of a shard by key, such as ``exp_avg``."""

    def load_optimizer_entry(
        self, source: StateReader, name: str, shape: tuple[int, ...], shard: TensorShard
    ) -> torch.Tensor:
        """Read the tensor ``name`` of ``shape`` for a shard."""


@runtime_checkable
class ConvertsStoredState(Protocol):
    """An optimizer whose state has another form in memory than in a checkpoint."""

    def stored_state(
        self, key: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the state of a parameter in the form of a checkpoint, and values by entry that
        belong to this rank's part only, such as the scales of its quantized blocks."""

    def load_stored(self, key: torch.Tensor, scales: dict[str, torch.Tensor]) -> None:
        """Convert the state of a parameter, which was loaded in the form of a checkpoint.

        Args:
            scales: the values of this rank's part by entry; empty if the checkpoint was written
                with other parts.
        """


@runtime_checkable
class PlacesState(Protocol):
    """An optimizer whose state is not on the device of its parameters between steps."""

    state_device: torch.device


@runtime_checkable
class AveragesWeights(Protocol):
    """An optimizer that trains with other weights than those of the trained model."""

    def eval(self) -> None:
        """Replace the weights by those of the trained model."""

    def train(self) -> None:
        """Restore the weights of training."""


@contextmanager
def averaged_weights(strategy: Strategy) -> Iterator[None]:
    """Return a context in which the weights are those of the trained model, if the optimizer
    averages them. A collective for some strategies. After an exception, the weights that the
    optimizer updates are restored, but not what a strategy gathers from them: that is a collective,
    in which the other ranks may not take part."""
    optimizer = strategy.optimizer
    if not isinstance(optimizer, AveragesWeights):
        yield
        return
    try:
        optimizer.eval()
        refresh_weights(strategy)
        yield
    finally:
        optimizer.train()
    refresh_weights(strategy)


def refresh_weights(strategy: Strategy) -> None:
    """Update the weights that the forward pass reads after those of ``tensor_shards`` have
    changed."""
    if isinstance(strategy, RefreshesWeights):
        strategy.after_load()


@runtime_checkable
class SupportsTransientMemory(Protocol):
    """A strategy that temporarily allocates tensors in a step that ``memory_tensors`` cannot
    list."""

    @property
    def transient_bytes(self) -> int:
        """Maximum size of these tensors in bytes."""


# -- replicas and reports
@runtime_checkable
class SupportsReplicaCheck(Protocol):
    """A strategy in which some ranks must hold bit-identical tensors after a step."""

    @property
    def replica_group(self) -> Communicator | None:
        """The group of ranks whose ``replicated_tensors`` are bit-identical after this step."""

    def replicated_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of this rank's parameters and their optimizer state, in the same
        order on every rank of ``replica_group``."""


def checkable_replicas(strategy: Strategy) -> SupportsReplicaCheck | None:
    """Return the strategy if some of its ranks hold bit-identical tensors after this step, else
    None."""
    if isinstance(strategy, SupportsReplicaCheck) and strategy.replica_group is not None:
        return strategy
    return None


@runtime_checkable
class SupportsCommProfile(Protocol):
    """A strategy that can describe how it reduces the gradients of replicas and what it sends."""

    @property
    def comm_profile(self) -> CommProfile | None:
        """The description, or None if nothing is sent."""


def comm_profile(strategy: Strategy) -> CommProfile | None:
    """Return how replicas are synchronized, if plain ddp or a method that sends less than it is
    used; else None."""
    profiles = [
        part.comm_profile for part in parts_of(strategy) if isinstance(part, SupportsCommProfile)
    ]
    return profiles[0] if profiles else None


@runtime_checkable
class ReportsMetrics(Protocol):
    """A strategy that adds sections to the report."""

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        """Return the strategy's sections of the report. A collective.

        Args:
            sent_bytes: bytes per step that the rank with the most traffic was measured to send.
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
    """A strategy that also sends data outside of its steps."""

    def sent_in_a_step(self, measured: int | None) -> int | None:
        """Return the mean bytes that this rank sends per step, given the bytes measured within its
        steps."""


def sent_in_a_step(strategy: Strategy, measured: int | None) -> int | None:
    """Return the mean bytes that this rank sends per step, given the bytes measured within its
    steps."""
    if isinstance(strategy, SupportsTrafficEstimate):
        return strategy.sent_in_a_step(measured)
    return measured

"""What some strategies do besides the contract of :class:`~paceline.parallel.base.Strategy`, and
the functions that ask for it."""

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
    """What may implement a protocol: the component that sums the strategy's gradients, if it has
    one, and the strategy."""
    reducer = getattr(strategy, "reducer", None)
    return [strategy] if reducer is None else [reducer, strategy]


# -- shares of the batch
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

    @property
    def replica(self) -> int:
        """Which share of the global batch this rank works on."""

    @property
    def num_replicas(self) -> int:
        """Shares that the global batch is cut into: those of the ranks that are left."""

    def set_token_counts(self, local: float, total: Callable[[], torch.Tensor]) -> None:
        """Called before each ``forward_backward``: the count of this rank's share, and what returns
        the one that the loss is divided by."""

    def poll_rank_losses(self) -> list[RankLoss]:
        """Ranks that were lost since the last call; the same on every rank at the same place of the
        same step. From here on ``replica`` and ``num_replicas`` are those of the ranks left."""


def elastic_workers(strategy: Strategy) -> SupportsElasticWorkers | None:
    """The strategy, if it continues without ranks whose processes have ended."""
    return strategy if isinstance(strategy, SupportsElasticWorkers) else None


def replica_of(strategy: Strategy) -> tuple[int, int]:
    """Which share of the global batch this rank works on, and of how many."""
    elastic = elastic_workers(strategy)
    if elastic is not None:
        return elastic.replica, elastic.num_replicas
    axes = strategy.world.axes
    return axes.replica(strategy.world.rank), axes.replicas


@runtime_checkable
class HasServerRanks(Protocol):
    """Some ranks hold what others ask for, and train on no data."""

    @property
    def has_data(self) -> bool:
        """False on a rank that has no share of the batch at all."""

    def model_init_context(self) -> AbstractContextManager[None]:
        """Within it, a task's model is built as this rank can hold it."""

    def close(self) -> None:
        """End what was opened beside the process group; called once, at the end of a run that
        succeeded. A collective."""


def _served(strategy: Strategy) -> HasServerRanks | None:
    return strategy if isinstance(strategy, HasServerRanks) else None


def has_data(strategy: Strategy) -> bool:
    """False on a rank that has no share of the batch at all."""
    served = _served(strategy)
    return served is None or served.has_data


def reports_loss(strategy: Strategy) -> bool:
    """True on the one rank of each replica whose losses and counts stand for the replica."""
    served = _served(strategy)
    if served is not None:
        return served.has_data
    place = strategy.world.coordinates
    return place["tensor"] == 0 and place["pipeline"] == strategy.world.axes.pipeline - 1


def model_init_context(strategy: Strategy) -> AbstractContextManager[None]:
    """Within it, a task's model is built as this rank can hold it."""
    served = _served(strategy)
    return nullcontext() if served is None else served.model_init_context()


def close_servers(strategy: Strategy) -> None:
    """End what the strategy opened beside the process group. A collective."""
    served = _served(strategy)
    if served is not None:
        served.close()


@runtime_checkable
class SupportsIndependentReplicas(Protocol):
    """Groups of ranks make steps without the others."""

    @property
    def count_group(self) -> Communicator:
        """The ranks whose count divides the loss of this step, times how often such groups go into
        the world."""

    @property
    def max_count_lag(self) -> int:
        """How many steps a rank may be ahead of the others' counts, where ``count_group`` is not
        all ranks."""

    @property
    def traffic_period(self) -> int:
        """Steps after which the traffic of a step repeats."""


def _independent(strategy: Strategy) -> SupportsIndependentReplicas | None:
    return strategy if isinstance(strategy, SupportsIndependentReplicas) else None


def count_group(strategy: Strategy) -> Communicator:
    """The ranks whose count divides the loss of this step; all of them for most strategies."""
    independent = _independent(strategy)
    return strategy.world if independent is None else independent.count_group


def max_count_lag(strategy: Strategy) -> int:
    """How many steps a rank may be ahead of the others' counts."""
    independent = _independent(strategy)
    return 1 if independent is None else independent.max_count_lag


def traffic_period(strategy: Strategy) -> int:
    """Steps after which the traffic of a step repeats; what is sent in a step is measured as a mean
    over them."""
    independent = _independent(strategy)
    return 1 if independent is None else independent.traffic_period


# -- a step
@runtime_checkable
class UnscalesGradients(Protocol):
    """Divides gradients by the loss scale itself."""

    @property
    def unscales(self) -> bool:
        """Whether it does, with these settings."""


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
    """Keeps something from step to step that a skipped update has to restore."""

    @property
    def needs_rollback_on_skip(self) -> bool:
        """True where it does, so that it must be known at once whether the update is skipped."""


def needs_rollback_on_skip(strategy: Strategy) -> bool:
    """True where a skipped update leaves more to put back than weights and optimizer."""
    return any(
        isinstance(part, SupportsUpdateRollback) and part.needs_rollback_on_skip
        for part in parts_of(strategy)
    )


@runtime_checkable
class SupportsLocalGradCheck(Protocol):
    """Gradients of a rank can be seen before they meet those of the others."""

    def local_grad_finite(self) -> torch.Tensor | None:
        """A float32 scalar that is not finite where this rank's gradient of the last
        ``forward_backward`` was not, before it met that of the others."""


def local_grad_finite(strategy: Strategy) -> torch.Tensor | None:
    """A scalar that is not finite where this rank's gradient was not. None where gradients of ranks
    meet within backward."""
    if isinstance(strategy, SupportsLocalGradCheck):
        return strategy.local_grad_finite()
    return None


# -- evaluation and state
@runtime_checkable
class SupportsSharedEvaluation(Protocol):
    """The forward is a collective of a replica's ranks."""

    def evaluate(self, run: EvalFn, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """Run an evaluation batch of this replica. None on ranks that do not hold the result."""


def evaluate(strategy: Strategy, run: EvalFn, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Run an evaluation batch of this replica: a collective within the replica. None on ranks that
    do not hold the result (:func:`reports_loss` is true on the one that does)."""
    if isinstance(strategy, SupportsSharedEvaluation):
        return strategy.evaluate(run, model)
    result = run(model)
    return result if reports_loss(strategy) else None


@runtime_checkable
class SupportsConsolidation(Protocol):
    """The weights of a step are not those of a checkpoint."""

    def consolidated(self) -> AbstractContextManager[None]:
        """Within it, the weights are those that a checkpoint would hold under ``model/``: what is
        evaluated, and what is saved where rank 0 has the full model. A collective."""


def consolidated(strategy: Strategy) -> AbstractContextManager[None]:
    """Within it, the strategy's weights are those of a checkpoint. A collective."""
    if isinstance(strategy, SupportsConsolidation):
        return strategy.consolidated()
    return nullcontext()


@runtime_checkable
class SupportsExtraState(Protocol):
    """Keeps more than parameters and the optimizer's state."""

    def extra_state(self) -> list[TensorShard]:
        """What else of this rank's a resumed run needs; names as they stand in the checkpoint."""

    def load_extra_state(self, source: StateReader) -> list[tuple[str, str]]:
        """Read it, on every rank, after parameters and optimizer were read. What does not fit is
        dropped; returns notices."""


@runtime_checkable
class RefreshesWeights(Protocol):
    """The weights of the forward are not those of ``tensor_shards``."""

    def after_load(self) -> None:
        """Bring the weights to where the next forward wants them, after ``tensor_shards`` were
        written to."""


@runtime_checkable
class SavesOwnShards(Protocol):
    """Writes other values into a checkpoint than ``tensor_shards`` has."""

    def state_shards(self) -> list[TensorShard]:
        """As :func:`paceline.parallel.save_load.state_shards`."""


@runtime_checkable
class SupportsStateCheck(Protocol):
    """Cannot read every checkpoint."""

    def check_state(self, source: StateReader) -> None:
        """Raise ConfigError for a state that cannot be read."""


@runtime_checkable
class SupportsOptimizerStateMapping(Protocol):
    """The optimizer's state does not lie as the parameters do."""

    def optimizer_entries(self, shard: TensorShard) -> dict[str, torch.Tensor]:
        """What the optimizer keeps for a shard, by entry."""

    def load_optimizer_entry(
        self, source: StateReader, name: str, shape: tuple[int, ...], shard: TensorShard
    ) -> torch.Tensor:
        """Read the tensor ``name`` of ``shape`` for a shard."""


@runtime_checkable
class SupportsTransientMemory(Protocol):
    """Holds more for a while in a step than ``memory_tensors`` can name."""

    @property
    def transient_bytes(self) -> int:
        """Bytes, where they were most."""


# -- replicas and reports
@runtime_checkable
class SupportsReplicaCheck(Protocol):
    """Some ranks hold the same bits after a step."""

    @property
    def replica_group(self) -> Communicator | None:
        """The ranks that hold, after this step, the same bits of ``replicated_tensors``."""

    def replicated_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """By name, in one order on every rank of ``replica_group``: parameters as this rank holds
        them, and what the optimizer keeps for them."""


def checkable_replicas(strategy: Strategy) -> SupportsReplicaCheck | None:
    """The strategy, if some of its ranks hold the same bits after this step."""
    if isinstance(strategy, SupportsReplicaCheck) and strategy.replica_group is not None:
        return strategy
    return None


@runtime_checkable
class SupportsCommProfile(Protocol):
    """Knows how the gradients of replicas are summed, and what that sends."""

    @property
    def comm_profile(self) -> CommProfile | None:
        """None where nothing is sent."""


def comm_profile(strategy: Strategy) -> CommProfile | None:
    """How replicas come together, where that is by plain ddp or by what sends less instead."""
    profiles = [
        part.comm_profile for part in parts_of(strategy) if isinstance(part, SupportsCommProfile)
    ]
    return profiles[0] if profiles else None


@runtime_checkable
class ReportsMetrics(Protocol):
    """Has keys of its own in the report."""

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        """Sections of the report. A collective.

        Args:
            sent_bytes: measured, by the busiest rank in a step.
        """


def report_metrics(strategy: Strategy, sent_bytes: float | None) -> StrategyMetrics:
    """The strategy's own sections of the report. A collective."""
    sections: StrategyMetrics = {}
    for part in parts_of(strategy):
        if isinstance(part, ReportsMetrics):
            sections.update(part.report_metrics(sent_bytes))
    return sections


@runtime_checkable
class SupportsTrafficEstimate(Protocol):
    """Sends outside its steps."""

    def sent_in_a_step(self, measured: int | None) -> int | None:
        """Bytes that this rank usually sends in a step, from what was measured within its steps."""


def sent_in_a_step(strategy: Strategy, measured: int | None) -> int | None:
    """Bytes that this rank usually sends in a step, from what was measured within its steps."""
    if isinstance(strategy, SupportsTrafficEstimate):
        return strategy.sent_in_a_step(measured)
    return measured

"""Describe the work of a training step and its estimated cost. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.distributed.mesh import ParallelDims
from paceline.models.context.facts import AttentionFacts
from paceline.models.context.traffic import busiest_rank_bytes
from paceline.models.shape.activations import NO_ACTIVATIONS, Activations, trained_matrices
from paceline.models.shape.record import ModelShape, TensorShape, total_bytes


@dataclass(frozen=True)
class ContextWork:
    """How the ranks of a context group divide the rows of a step.

    Args:
        method: how they exchange keys and values.
        facts: the model's attention layers.
        item_bytes: bytes of an element of keys and values.
        rows: number of tokens of each sample, for some rows that stand for all.
    """

    method: str
    facts: AttentionFacts
    item_bytes: int
    rows: tuple[tuple[int, ...], ...]

    def traffic(self, dims: ParallelDims, micro_batches: int, forwards: float) -> dict[str, int]:
        """Return the bytes per step, by collective, that the rank of a context group sends that
        sends most.

        Args:
            forwards: how often the forward of a layer runs in a micro-batch.
        """
        layers = math.ceil(len(self.facts.windows) / dims.pipeline)
        per_row = busiest_rank_bytes(
            replace(self.facts, windows=self.facts.windows[:layers]),
            self.method,
            self.rows,
            dims.context,
            self.item_bytes,
            forwards,
        )
        return {kind: micro_batches * size_bytes for kind, size_bytes in per_row.items()}


@dataclass(frozen=True)
class Workload:
    """The work of one step on one replica.

    Args:
        micro_batches: number of micro-batches.
        positions: mean number of tokens in a micro-batch including padding, or of samples if the
            data has no tokens.
        activations: what one micro-batch stores on a rank that runs the full model. ``blocks`` is
            in the order of ``ModelShape.blocks``; empty if unknown.
        host_activation_bytes: bytes that the blocks keep in host memory for backward.
        distinct: mean number of distinct ids in a micro-batch for each embedding table, by server
            of the parameter server, counted in the data; empty if unknown.
        context: how rows are divided, with context parallelism.
        labels: mean number of tokens in a micro-batch whose logits are computed; None: all of them.
        exchanged_rows: mean numbers of hidden states that a rank sends to and receives from other
            ranks in a layer of experts, per micro-batch; None: each expert gets the same number.
    """

    micro_batches: int = 1
    positions: float = 0.0
    activations: Activations = NO_ACTIVATIONS
    host_activation_bytes: int = 0
    distinct: tuple[tuple[float, ...], ...] = ()
    context: ContextWork | None = None
    labels: float | None = None
    exchanged_rows: tuple[float, float] | None = None

    def activation_bytes(self, shape: ModelShape) -> int:
        """Return the peak bytes of the activations of one micro-batch, with what the trained
        matrices of a rank that holds ``shape`` in full add to them."""
        return self.activations.peak(trained_matrices(shape))


@dataclass(frozen=True)
class Cost:
    """The estimated cost of a step: bytes of memory on the rank that needs the most, and bytes per
    step of the rank that sends the most, by collective (all_reduce, reduce_scatter, all_gather,
    broadcast, send).

    Args:
        not_at_peak: bytes of the state that do not exist when the rank needs the most.
        traffic_is_bound: whether the traffic is an upper bound that may be far above the actual
            traffic.
        on_accelerator: the cost in a run on accelerators, if the rank that needs the most has none;
            None: this cost.
        host: bytes in host memory, with ``parallel.cpu_offload``.
        host_traffic: bytes per step to and from the host, by what is offloaded (activations,
            optimizer, parameters).
        updated: bytes of the trained weights that the rank updates; 0 for a strategy whose ranks
            cannot generate completions.
        gathered: bytes of the weights that the rank must gather to hold the whole model, beyond
            ``parameters``.
        rollout: peak bytes while the rank generates the completions that it trains on; 0 for tasks
            that generate none.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    not_at_peak: int = 0
    traffic: Mapping[str, int] = field(default_factory=dict)
    traffic_is_bound: bool = False
    on_accelerator: "Cost | None" = None
    host: int = 0
    host_traffic: Mapping[str, int] = field(default_factory=dict)
    updated: int = 0
    gathered: int = 0
    rollout: int = 0

    @property
    def state(self) -> int:
        """Bytes of the training state, including gradients."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Peak bytes."""
        return max(self.state + self.activations - self.not_at_peak, self.rollout)

    @property
    def traffic_per_step(self) -> int:
        return sum(self.traffic.values())


__all__ = ["Cost", "ModelShape", "TensorShape", "Workload", "total_bytes"]

"""The work of a step and its cost, as numbers. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.models.shape.record import ModelShape, TensorShape, total_bytes


@dataclass(frozen=True)
class Workload:
    """The work of one step on one replica.

    Args:
        micro_batches: their number.
        positions: mean number of tokens of a micro-batch with padding (of samples, if there are no
            tokens).
        activation_bytes: bytes kept for backward of one micro-batch through the full model on one
            rank; 0 if unknown.
        block_activation_bytes: the part of it for each block, in order of ``ModelShape.blocks``;
            empty if unknown.
        distinct: for each embedding table the mean number of distinct ids of a micro-batch, by
            server of the parameter server, counted in the data; empty if unknown.
    """

    micro_batches: int = 1
    positions: float = 0.0
    activation_bytes: int = 0
    block_activation_bytes: tuple[int, ...] = ()
    distinct: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Cost:
    """Bytes on the rank with the most, and bytes per step of the rank that sends most, by
    collective (all_reduce, reduce_scatter, all_gather, broadcast, send).

    Args:
        traffic_is_bound: the traffic is an upper bound, and may be much less.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    traffic: Mapping[str, int] = field(default_factory=dict)
    traffic_is_bound: bool = False

    @property
    def state(self) -> int:
        """Bytes of the training state, including gradients."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.activations

    @property
    def traffic_per_step(self) -> int:
        return sum(self.traffic.values())


__all__ = ["Cost", "ModelShape", "TensorShape", "Workload", "total_bytes"]

"""What a strategy's cost is declared from besides the model's shape, and the declaration itself.
Numbers alone: no torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.models.shape.record import ModelShape, TensorShape, total_bytes


@dataclass(frozen=True)
class Workload:
    """The work of one step on one replica.

    Args:
        micro_batches: how many.
        positions: tokens of a micro-batch with padding (samples, where there are no tokens); a
            mean.
        activation_bytes: kept for backward of one micro-batch through the whole model on one rank;
            0 where not known.
        block_activation_bytes: the share of it of each block, in order of ``ModelShape.blocks``;
            empty where not known.
        distinct: for each embedding table how many distinct ids a micro-batch has, by the server of
            a parameter server that has their rows; means, counted in the data; empty where not
            known.
    """

    micro_batches: int = 1
    positions: float = 0.0
    activation_bytes: int = 0
    block_activation_bytes: tuple[int, ...] = ()
    distinct: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Cost:
    """Bytes on the fullest rank, and bytes that the busiest rank sends in a step, by collective
    (all_reduce, reduce_scatter, all_gather, broadcast, send). ``traffic_is_bound``: that is at most
    sent, and may be much less."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    traffic: Mapping[str, int] = field(default_factory=dict)
    traffic_is_bound: bool = False

    @property
    def state(self) -> int:
        """Training state: what lasts from step to step, and the gradients."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.activations

    @property
    def traffic_per_step(self) -> int:
        return sum(self.traffic.values())


__all__ = ["Cost", "ModelShape", "TensorShape", "Workload", "total_bytes"]

"""The model of the time per step that `paceline bench scaling` fits, and its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Scaling = Literal["weak", "strong"]

#: The terms of the model in the order in which they are added: what they are multiplied with, as a
#: function of the ranks n and the micro-batches a that each rank computes per step. A ring
#: all-reduce sends 2(n-1)/n times the size of the gradient (Patarasuk and Yuan, "Bandwidth optimal
#: all-reduce algorithms for clusters of workstations", 2009); latency, and the wait for the slowest
#: of n ranks, grow with n.
TERMS = ("micro_batch_s", "transfer_s", "update_s", "rank_s")


def term(name: str, ranks: int, micro_batches: float) -> float:
    """Return the factor of a term in the time of a step."""
    factors = {
        "micro_batch_s": micro_batches,
        "transfer_s": 2 * (ranks - 1) / ranks,
        "update_s": 1.0,
        "rank_s": float(ranks - 1),
    }
    return factors[name]


@dataclass(frozen=True)
class Point:
    """A measurement: seconds per step of ``ranks`` ranks that compute ``micro_batches`` each."""

    ranks: int
    micro_batches: float
    seconds: float


@dataclass(frozen=True)
class StepModel:
    """t = Σ seconds of a term × its factor.

    Attributes:
        seconds: seconds of each term that could be fitted, 0 or more.
        residual: root mean square of (model - measured) / measured; None if there are no more
            points than terms.
    """

    seconds: dict[str, float]
    residual: float | None

    def time_s(self, ranks: int, micro_batches: float) -> float:
        return sum(
            seconds * term(name, ranks, micro_batches) for name, seconds in self.seconds.items()
        )

    def efficiency(
        self, scaling: Scaling, ranks: int, first_ranks: int, micro_batches: float
    ) -> float:
        """Return the efficiency relative to ``first_ranks`` ranks.

        Args:
            micro_batches: number per rank and step: with weak scaling of every rank, with strong
                scaling of each of the first ranks, whose share the more ranks divide.
        """
        first_s = self.time_s(first_ranks, micro_batches)
        if scaling == "weak":
            return first_s / self.time_s(ranks, micro_batches)
        return self.speedup(ranks, first_ranks, micro_batches) * first_ranks / ranks

    def speedup(self, ranks: int, first_ranks: int, micro_batches: float) -> float:
        """Return how much faster more ranks compute the same global batch."""
        share = micro_batches * first_ranks / ranks
        return self.time_s(first_ranks, micro_batches) / self.time_s(ranks, share)


def fit_model(points: Sequence[Point]) -> StepModel | None:
    """Fit the model by least squares of the relative error, with terms of 0 or more. A term is left
    out if the points cannot tell it from the others.

    Returns:
        None if all points have the same number of ranks.
    """
    import numpy as np
    from scipy.optimize import nnls

    num_ranks = len({point.ranks for point in points})
    if num_ranks < 2:
        return None
    num_batches = len({point.micro_batches for point in points})
    names = ["micro_batch_s", "transfer_s"]
    names += ["update_s"] if num_batches > 1 and len(points) > 2 else []
    names += ["rank_s"] if num_ranks > 2 and len(points) > len(names) else []
    rows = np.array(
        [
            [term(name, point.ranks, point.micro_batches) / point.seconds for name in names]
            for point in points
        ]
    )
    solution, _ = nnls(rows, np.ones(len(points)))
    errors = rows @ solution - 1
    residual = float(np.sqrt((errors**2).mean())) if len(points) > len(names) else None
    return StepModel(dict(zip(names, map(float, solution), strict=True)), residual)

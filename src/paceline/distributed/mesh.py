"""How the ranks are laid out: the sizes of the axes, and where a rank stands on them. No torch
here."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

#: Outermost first. Ranks that differ in the last axis alone are neighbours: tensor parallelism
#: talks most, so its ranks share a host; pipeline stages talk least.
AXES = ("pipeline", "data", "shard", "tensor")


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the mesh's axes; their product is the number of ranks.

    Args:
        data: replicas of what the other axes hold.
        shard: parts that parameters, gradients and optimizer state are cut into; each still has its
            own part of the batch.
        tensor: parts that each layer is cut into.
        pipeline: stages that the layers are dealt to.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        return self.data * self.shard * self.tensor * self.pipeline

    @property
    def replicas(self) -> int:
        """Ranks, or groups of ranks, that see a part of the batch of their own."""
        return self.data * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank on each axis."""
        places = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return places

    def rank_at(self, **places: int) -> int:
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + places.get(axis, 0)
        return rank

    def replica(self, rank: int) -> int:
        """Which of the :attr:`replicas` a rank belongs to."""
        at = self.coordinates(rank)
        return at["data"] * self.shard + at["shard"]

    def subgroups(self, axes: Iterable[str]) -> list[list[int]]:
        """The groups of ranks that differ in ``axes`` alone, each in order; every rank is in
        exactly one."""
        along = [axis for axis in AXES if axis in set(axes)]
        across = [axis for axis in AXES if axis not in along]
        result = []
        for fixed in product(*(range(getattr(self, axis)) for axis in across)):
            places = dict(zip(across, fixed, strict=True))
            moves = product(*(range(getattr(self, axis)) for axis in along))
            result.append(
                [self.rank_at(**places, **dict(zip(along, move, strict=True))) for move in moves]
            )
        return result

    def text(self) -> str:
        """``data 2 × tensor 2``; ``one rank`` where every axis is 1."""
        named = [
            f"{axis} {getattr(self, axis)}"
            for axis in ("data", "shard", "tensor", "pipeline")
            if getattr(self, axis) > 1
        ]
        return " × ".join(named) or "one rank"

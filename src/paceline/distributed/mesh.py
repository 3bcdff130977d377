"""The device mesh: the sizes of its axes and the coordinates of ranks. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass

#: Axes, outermost first. Ranks that differ only in the last axis are adjacent. Tensor parallelism
#: communicates most, so its ranks should share a host; pipeline stages communicate least.
AXES = ("pipeline", "data", "shard", "context", "tensor")


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the mesh's axes; their product is the number of ranks.

    Args:
        data: number of replicas; each replica spans the other axes.
        shard: number of shards of parameters, gradients and optimizer state. The ranks of each
            shard train on a separate part of the batch.
        tensor: number of parts of each tensor-parallel layer.
        pipeline: number of ranks that the pipeline stages are divided among.
        context: number of parts of each row of tokens.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def size(self) -> int:
        return self.data * self.shard * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        """Number of ranks, or groups of ranks, with a separate part of the batch."""
        return self.data * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis."""
        places = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return places

    def replica(self, rank: int) -> int:
        """Return the number of the replica that a rank belongs to."""
        at = self.coordinates(rank)
        return at["data"] * self.shard + at["shard"]

    def subgroups(self, axes: Iterable[str]) -> list[list[int]]:
        """Return the groups of ranks that differ only in ``axes``, each in ascending order."""
        fixed = set(AXES).difference(axes)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            coordinates = self.coordinates(rank)
            key = tuple(coordinates[axis] for axis in AXES if axis in fixed)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def text(self) -> str:
        """Return the sizes as text, such as ``data 2 × tensor 2``, or ``one rank``."""
        sizes = [
            f"{axis} {getattr(self, axis)}"
            for axis in ("data", "shard", "context", "tensor", "pipeline")
            if getattr(self, axis) > 1
        ]
        return " × ".join(sizes) or "one rank"

"""The device mesh: the sizes of its axes and the coordinates of ranks. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass

#: Axes, outermost first. Ranks that differ only in the last axis are adjacent. Tensor parallelism
#: communicates most, so its ranks should share a host; pipeline stages communicate least.
AXES = ("pipeline", "data", "shard", "context", "tensor")

#: Groups of ranks that no axis of the mesh describes; see :meth:`ParallelDims.subgroups`.
EXPERT, EXPERT_COPIES = "expert", "expert_copies"


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
        expert: number of ranks that the experts of a layer are divided among: adjacent ranks of the
            axes data, shard and context. It is not a factor of the number of ranks.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

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
        """Return the groups of ranks that differ only in ``axes``, each in ascending order. The
        name :data:`EXPERT` stands for the ranks that the experts are divided among, and
        :data:`EXPERT_COPIES` for the ranks that hold the same experts."""
        names = set(axes)
        if names in ({EXPERT}, {EXPERT_COPIES}):
            return self._expert_groups(names == {EXPERT_COPIES})
        fixed = set(AXES).difference(axes)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            coordinates = self.coordinates(rank)
            key = tuple(coordinates[axis] for axis in AXES if axis in fixed)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def _expert_groups(self, of_copies: bool) -> list[list[int]]:
        groups = []
        for ranks in self.subgroups(("data", "shard", "context")):
            size, count = self.expert, len(ranks) // self.expert
            if of_copies:
                groups += [ranks[first::size] for first in range(size)]
            else:
                groups += [ranks[first * size : (first + 1) * size] for first in range(count)]
        return groups

    def text(self) -> str:
        """Return the sizes as text, such as ``data 2 × tensor 2``, or ``one rank``."""
        sizes = [
            f"{axis} {getattr(self, axis)}"
            for axis in ("data", "shard", "context", "tensor", "pipeline")
            if getattr(self, axis) > 1
        ]
        sizes += [f"expert {self.expert}"] if self.expert > 1 else []
        return " × ".join(sizes) or "one rank"

"""The device mesh: the subgroups along each set of dimensions partition the ranks, and collectives
stay within a subgroup."""

import itertools

import pytest
import torch
from ranks import run_ranks

from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import AXES, ParallelDims
from paceline.distributed.traffic import log_calls


@pytest.mark.parametrize(
    "sizes", [(2, 1, 2, 1), (1, 2, 2, 2), (3, 1, 1, 2), (1, 1, 1, 1), (2, 2, 2, 2)]
)
def test_subgroups_partition_the_ranks(sizes: tuple[int, int, int, int]) -> None:
    axes = ParallelDims(*sizes)
    for count in range(len(AXES) + 1):
        for names in itertools.combinations(AXES, count):
            groups = axes.subgroups(names)
            assert sorted(rank for group in groups for rank in group) == list(range(axes.size))
            for group in groups:
                coordinates_of_group = [axes.coordinates(rank) for rank in group]
                for axis in AXES:
                    assert len({coordinates[axis] for coordinates in coordinates_of_group}) == (
                        getattr(axes, axis) if axis in names else 1
                    )
    assert len({tuple(axes.coordinates(rank).values()) for rank in range(axes.size)}) == axes.size
    assert sorted({axes.replica(rank) for rank in range(axes.size)}) == list(range(axes.replicas))


def test_tensor_ranks_are_adjacent_and_share_a_replica() -> None:
    axes = ParallelDims(data=2, tensor=2)
    assert axes.subgroups(["tensor"]) == [[0, 1], [2, 3]]
    assert axes.subgroups(["data"]) == [[0, 2], [1, 3]]
    assert [axes.replica(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert axes.text() == "data 2 × tensor 2"
    assert ParallelDims().text() == "one rank"


def run_collectives(world: Communicator) -> dict[str, object]:
    mesh = Communicator(world.env, world.device, ParallelDims(data=2, tensor=2))
    before = world.traffic.total
    results: dict[str, object] = {
        "tensor": mesh.subgroup("tensor").sum(world.rank)[0],
        "data": mesh.subgroup("data").sum(world.rank)[0],
    }
    results["pipeline"] = mesh.subgroup("pipeline").sum(world.rank)[0]
    # two all-reduces of one float64 between two ranks each
    results["bytes"] = world.traffic.total - before
    results["same_group"] = mesh.subgroup("data", "tensor") is mesh
    group = mesh.subgroup("data")
    results["object"] = group.broadcast_object(world.rank)
    results["gathered_objects"] = group.gather_objects(world.rank)
    value = torch.tensor([float(world.rank)])
    group.broadcast([value])
    results["broadcast"] = value.item()
    gathered, part = torch.empty(2), torch.empty(1)
    group.wait(group.all_gather(gathered, torch.tensor([float(world.rank)])))
    group.wait(group.reduce_scatter(part, torch.tensor([1.0, 10.0]) * (world.rank + 1)))
    results["gathered"], results["part"] = gathered.tolist(), part.item()
    world.barrier()
    return results


def test_collectives_stay_within_their_subgroup() -> None:
    for rank, result in enumerate(run_ranks(run_collectives, 4)):
        peers = [rank % 2, rank % 2 + 2]
        assert result["tensor"] == (1 if rank < 2 else 5)
        assert result["data"] == sum(peers)
        assert result["pipeline"] == rank
        assert result["bytes"] == 2 * 8
        assert result["same_group"]
        assert result["object"] == peers[0] == result["broadcast"]
        assert result["gathered_objects"] == peers == result["gathered"]
        assert result["part"] == sum(peer + 1 for peer in peers) * (1 if rank < 2 else 10)


def broadcast_two_dtypes(world: Communicator) -> tuple[int, list[float]]:
    counts = [torch.tensor(world.rank) for _ in range(3)]
    means = [torch.full((2,), float(world.rank)) for _ in range(3)]
    with log_calls() as calls:
        world.broadcast(itertools.chain(*zip(means, counts, strict=True)))
    return len(calls), [float(tensor.sum()) for tensor in [*means, *counts]]


def test_one_broadcast_for_each_dtype() -> None:
    assert run_ranks(broadcast_two_dtypes, 2) == [(2, [0.0] * 6)] * 2

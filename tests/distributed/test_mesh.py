"""The mesh: every rank on exactly one line along each set of axes, and sums along a line are those
of its ranks."""

import itertools

import pytest
import torch
from ranks import run_ranks

from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import AXES, ParallelDims


@pytest.mark.parametrize(
    "sizes", [(2, 1, 2, 1), (1, 2, 2, 2), (3, 1, 1, 2), (1, 1, 1, 1), (2, 2, 2, 2)]
)
def test_lines_part_the_ranks(sizes: tuple[int, int, int, int]) -> None:
    axes = ParallelDims(*sizes)
    for count in range(len(AXES) + 1):
        for names in itertools.combinations(AXES, count):
            lines = axes.subgroups(names)
            assert sorted(rank for line in lines for rank in line) == list(range(axes.size))
            for line in lines:
                places = [axes.coordinates(rank) for rank in line]
                for axis in AXES:
                    assert len({place[axis] for place in places}) == (
                        getattr(axes, axis) if axis in names else 1
                    )
    assert len({tuple(axes.coordinates(rank).values()) for rank in range(axes.size)}) == axes.size
    assert sorted({axes.replica(rank) for rank in range(axes.size)}) == list(range(axes.replicas))


def test_tensor_ranks_are_neighbours_and_replicas_share_their_batch() -> None:
    axes = ParallelDims(data=2, tensor=2)
    assert axes.subgroups(["tensor"]) == [[0, 1], [2, 3]]
    assert axes.subgroups(["data"]) == [[0, 2], [1, 3]]
    assert [axes.replica(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert axes.text() == "data 2 × tensor 2"
    assert ParallelDims().text() == "one rank"


def sums(world: Communicator) -> dict[str, object]:
    mesh = Communicator(world.env, world.device, ParallelDims(data=2, tensor=2))
    before = world.traffic.total
    results: dict[str, object] = {
        "tensor": mesh.subgroup("tensor").sum(world.rank)[0],
        "data": mesh.subgroup("data").sum(world.rank)[0],
    }
    results["one"] = mesh.subgroup("pipeline").sum(world.rank)[0]
    # two all-reduces of one float64 among two ranks
    results["bytes"] = world.traffic.total - before
    results["same"] = mesh.subgroup("data", "tensor") is mesh
    line = mesh.subgroup("data")
    results["object"] = line.broadcast_object(world.rank)
    results["all"] = line.gather_objects(world.rank)
    value = torch.tensor([float(world.rank)])
    line.broadcast([value])
    results["broadcast"] = value.item()
    gathered, part = torch.empty(2), torch.empty(1)
    line.wait(line.all_gather(gathered, torch.tensor([float(world.rank)])))
    line.wait(line.reduce_scatter(part, torch.tensor([1.0, 10.0]) * (world.rank + 1)))
    results["gathered"], results["part"] = gathered.tolist(), part.item()
    world.barrier()
    return results


def test_collectives_stay_on_their_line() -> None:
    for rank, result in enumerate(run_ranks(sums, 4)):
        mates = [rank % 2, rank % 2 + 2]
        assert result["tensor"] == (1 if rank < 2 else 5)
        assert result["data"] == sum(mates)
        assert result["one"] == rank
        assert result["bytes"] == 2 * 8
        assert result["same"]
        assert result["object"] == mates[0] == result["broadcast"]
        assert result["all"] == mates == result["gathered"]
        assert result["part"] == sum(mate + 1 for mate in mates) * (1 if rank < 2 else 10)

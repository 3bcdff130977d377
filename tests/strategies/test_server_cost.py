"""Predicted traffic of a parameter server: from the distinct ids in the data if they are counted,
else an upper bound."""

import numpy as np
import pytest
from server_config import make_config

from paceline.distributed.mesh import ParallelDims
from paceline.models.recommend import ClickModel
from paceline.models.shape.outline import outline
from paceline.models.shape.record import ModelShape
from paceline.parallel.cost import Workload
from paceline.parallel.registry import estimate_cost
from paceline.strategies.parameter_server.cost import assign_servers, distinct_ids

TABLES, DIM = (10, 6), 4


def test_distinct_ids_are_counted_per_server() -> None:
    first = [np.array([0, 0, 4, 5, 9]), np.array([2, 2, 2, 3, 3])]
    second = [np.array([1, 1, 1, 1, 1]), np.array([0, 1, 2, 3, 4])]
    assert distinct_ids([first, second], TABLES, 2) == ((1.5, 1.0), (2.0, 1.5))
    assert distinct_ids([first], TABLES, 1) == ((4.0,), (2.0,))


@pytest.mark.parametrize("dense", ["ddp", "server"])
def test_traffic_is_a_bound_without_id_counts(dense: str) -> None:
    config = make_config("parameter_server", "adagrad", 2, dense=dense)
    shape = outline(ClickModel(2, TABLES, DIM, [6], [8]), config)
    batch = Workload(micro_batches=3, positions=100.0)
    bound = estimate_cost("parameter_server", shape, ParallelDims(data=2), batch, config)
    counts = ((2.0, 1.0), (1.0, 0.5))
    counted = estimate_cost(
        "parameter_server", shape, ParallelDims(data=2), Workload(3, 100.0, distinct=counts), config
    )
    assert bound.traffic_is_bound
    assert not counted.traffic_is_bound
    assert counted.traffic_per_step < bound.traffic_per_step
    dense_bytes = sum(_dense_sizes(shape))
    ids, bound_ids = 3 * 4.5, 3 * (10 + 6)  # a batch of 100 samples can have every id
    for cost, count in ((counted, ids), (bound, bound_ids)):
        rows = {"pull": 8 * count, "push": (8 + 4 * DIM) * count}
        if dense == "ddp":
            assert cost.traffic == {"all_reduce": dense_bytes, **rows}
        elif cost is bound:  # a worker sends more than any server
            assert cost.traffic == {"pull": rows["pull"], "push": rows["push"] + dense_bytes}
        else:
            # The first server sends most: both workers pull 3 rows of every micro-batch, and its
            # half of the other parameters.
            assert cost.traffic == {"pull": 2 * 3 * 4 * DIM * (2 + 1) + 2 * _larger_half(shape)}


def _larger_half(shape: ModelShape) -> int:
    sizes = _dense_sizes(shape)
    owners = assign_servers(sizes, 2)
    first = sum(size for size, owner in zip(sizes, owners, strict=True) if owner == 0)
    return max(first, sum(sizes) - first)


def _dense_sizes(shape: ModelShape) -> list[int]:
    return [4 * tensor.numel for tensor in shape.trained if not tensor.name.startswith("tables.")]


@pytest.mark.parametrize("servers", [1, 50])
def test_only_workers_use_the_memory_of_accelerators(servers: int) -> None:
    config = make_config("parameter_server", "adam", servers, dense="ddp")
    shape = outline(ClickModel(2, (1000,), DIM, [6], [8]), config)
    cost = estimate_cost("parameter_server", shape, ParallelDims(data=2), Workload(), config)
    on_accelerator = cost.on_accelerator or cost
    assert (cost.on_accelerator is not None) == (servers == 1), (
        "one server needs more than a worker"
    )
    dense_bytes = sum(_dense_sizes(shape))
    assert (on_accelerator.parameters, on_accelerator.gradients) == (dense_bytes, dense_bytes)


def test_parameters_are_assigned_to_servers_by_size() -> None:
    # 9 to the first server, 5 and 4 to the second, 4 to the first, 1 to the second
    assert assign_servers([5, 1, 9, 4, 4], 2) == [1, 1, 0, 1, 0]
    assert assign_servers([3], 4) == [0]

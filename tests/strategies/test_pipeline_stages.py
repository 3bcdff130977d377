"""Assigning blocks to pipeline stages from names and sizes, without the model."""

import random
from itertools import combinations, pairwise

import pytest
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.models.shape.activations import Activations
from paceline.models.shape.record import ModelShape, TensorShape
from paceline.parallel.cost import Workload
from paceline.strategies.pipeline.cost import pipeline_cost
from paceline.strategies.pipeline.stages import check_sizes, divide


def make_sizes(layers: int, layer: int, embedding: int, head: int) -> dict[str, int]:
    return {
        "model.embed.weight": embedding,
        **{f"model.layers.{number}.weight": layer for number in range(layers)},
        "model.norm.weight": 1,
        "head.weight": head,
    }


def block_names(layers: int) -> list[str]:
    return [f"model.layers.{number}" for number in range(layers)]


def test_stage_with_a_large_head_gets_fewer_layers() -> None:
    even = divide(make_sizes(12, 10, 0, 0), block_names(12), 4)
    assert [end - first for first, end in even.blocks] == [3, 3, 3, 3]
    uneven = divide(make_sizes(12, 10, 5, 30), block_names(12), 4)
    loads = [end - first for first, end in uneven.blocks]
    assert sum(loads) == 12
    assert loads[-1] < min(loads[:-1])
    assert uneven.stages["model.embed.weight"] == (0,)
    assert uneven.stages["model.norm.weight"] == uneven.stages["head.weight"] == (3,)


def test_tied_weight_is_on_first_and_last_stage() -> None:
    sizes = make_sizes(4, 10, 5, 0)
    del sizes["head.weight"]
    division = divide(sizes, block_names(4), 2, aliases={"head.weight": "model.embed.weight"})
    assert division.stages["model.embed.weight"] == division.stages["head.weight"] == (0, 1)


def test_modules_are_placed_by_name() -> None:
    sizes = {
        "d.embed_tokens.weight": 4,
        "d.final_layer_norm.weight": 1,
        "d.layers.0.w": 9,
        "d.layers.1.w": 9,
        "d.scale": 1,
    }
    division = divide(
        sizes, ["d.layers.0", "d.layers.1"], 2, buffers=["d.layers.1.mask", "d.rotary.inv_freq"]
    )
    assert division.regions == {
        "d.embed_tokens": "before",
        "d.final_layer_norm": "after",
        "d.scale": "after",
    }
    assert division.stages["d.layers.1.mask"] == (1,)
    assert division.stages["d.rotary.inv_freq"] == (0, 1)


def find_best_loads_exhaustively(
    costs: list[int], num_stages: int, before: int, after: int
) -> tuple[int, int]:
    """Return the largest load and the sum of squared loads of the best division, found by trying
    every set of cuts."""
    results = []
    for cuts in combinations(range(1, len(costs)), num_stages - 1):
        bounds = [0, *cuts, len(costs)]
        loads = [sum(costs[first:end]) for first, end in pairwise(bounds)]
        if all(loads):
            loads[0] += before
            loads[-1] += after
            results.append((max(loads), sum(load * load for load in loads)))
    return min(results)


def test_division_is_optimal() -> None:
    rng = random.Random(0)
    for _ in range(300):
        costs = [rng.choice([0, 1, 2, 5, 5, 13]) for _ in range(rng.randint(2, 9))]
        with_parameters = sum(cost > 0 for cost in costs)
        if not with_parameters:
            continue
        num_stages = rng.randint(1, with_parameters)
        before, after = rng.choice([0, 4, 30]), rng.choice([0, 4, 30])
        sizes = {
            "embed.w": before,
            **{f"h.{number}.w": cost for number, cost in enumerate(costs)},
            "norm.w": after,
        }
        result = divide(sizes, [f"h.{number}" for number in range(len(costs))], num_stages)
        loads = [sum(costs[first:end]) for first, end in result.blocks]
        assert all(loads)
        loads[0] += before
        loads[-1] += after
        assert (max(loads), sum(load * load for load in loads)) == find_best_loads_exhaustively(
            costs, num_stages, before, after
        )


@pytest.mark.parametrize(("layers", "stages"), [(80, 64), (126, 120), (80, 79)])
def test_division_into_many_stages_is_fast(layers: int, stages: int) -> None:
    """A search without memory of infeasible divisions does not finish for these sizes."""
    result = divide(make_sizes(layers, 856, 1050, 1050), block_names(layers), stages)
    assert result.num_stages == stages
    counts = [end - first for first, end in result.blocks]
    assert sum(counts) == layers
    assert set(counts) <= {1, 2}


def test_every_stage_has_parameters() -> None:
    sizes = {"0.w": 100, "2.w": 1, "5.w": 1}
    division = divide(sizes, [str(number) for number in range(7)], 3)
    assert division.blocks == ((0, 2), (2, 5), (5, 7))
    with raises_error(ConfigError, code="too-many-stages"):
        divide(sizes, [str(number) for number in range(7)], 4)


def test_many_layers_are_divided_evenly() -> None:
    division = divide(make_sizes(128, 100, 120, 120), block_names(128), 16)
    loads = [end - first for first, end in division.blocks]
    assert sum(loads) == 128
    assert max(loads) - min(loads) <= 3


def test_rejects_more_stages_than_layers_before_loading() -> None:
    check_sizes({"num_hidden_layers": 8}, 4, 2)
    check_sizes({"model_type": "unknown"}, 400)
    with raises_error(ConfigError, code="too-many-stages", naming="parallel.pipeline"):
        check_sizes({"text_config": {"num_hidden_layers": 8}}, 8, 2)


def test_cost_has_bytes_sent_and_activations_by_rank() -> None:
    names = make_sizes(8, 10, 4, 4)
    shape = ModelShape(
        parameters=tuple(TensorShape(name, (size,), 4, True) for name, size in names.items()),
        blocks=tuple(block_names(8)),
        block_output_elements=(16,) * 8,
    )
    work = Workload(micro_batches=6, positions=10.0, activations=Activations((100,) * 8))
    boundary = 6 * 10 * 16 * 4
    cost = pipeline_cost(shape, 4, 2, "1f1b", work)
    assert cost.send_bytes == (boundary, 2 * boundary, 2 * boundary, boundary)
    assert [each.peak() for each in cost.activations] == [800, 600, 400, 200]
    interleaved = pipeline_cost(shape, 4, 2, "interleaved_1f1b", work)
    assert interleaved.send_bytes == (3 * boundary, 4 * boundary, 4 * boundary, 3 * boundary)
    assert max(interleaved.send_bytes) == 4 * boundary
    assert interleaved.parameters[0] == (
        "model.embed.weight",
        "model.layers.0.weight",
        "model.layers.4.weight",
    )


def test_boundary_after_colwise_layer_sends_sharded_features() -> None:
    names = {"0.weight": (32, 64), "1.weight": (32, 32), "2.weight": (10, 32)}
    shape = ModelShape(
        parameters=tuple(TensorShape(name, size, 4, True) for name, size in names.items()),
        blocks=("0", "1", "2"),
        block_output_elements=(32, 32, 10),
        tensor_plan={"0": "colwise", "1": "rowwise"},
    )
    work = Workload(micro_batches=2, positions=5.0)
    boundary = 2 * 5 * 32 * 4
    assert pipeline_cost(shape, 2, 1, "1f1b", work).send_bytes == (boundary, boundary)
    assert pipeline_cost(shape, 2, 1, "1f1b", work).parameters[0] == ("0.weight",)
    assert pipeline_cost(shape, 2, 1, "1f1b", work, tensor_ranks=2).send_bytes == (
        boundary // 2,
        boundary // 2,
    )
    # the output of the rowwise layer is sent in full
    assert pipeline_cost(shape, 3, 1, "1f1b", work, tensor_ranks=2).send_bytes[2] == boundary

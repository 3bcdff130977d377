"""Dealing blocks to stages, from names and sizes alone."""

import random
from itertools import combinations, pairwise

import pytest

from paceline.core.errors import ConfigError
from paceline.models.shape.record import ModelShape, TensorShape
from paceline.parallel.cost import Workload
from paceline.parallel.pipeline.cost import pipeline_cost
from paceline.parallel.pipeline.stages import check_sizes, divide


def sizes_of(layers: int, layer: int, embedding: int, head: int) -> dict[str, int]:
    return {
        "model.embed.weight": embedding,
        **{f"model.layers.{number}.weight": layer for number in range(layers)},
        "model.norm.weight": 1,
        "head.weight": head,
    }


def blocks_of(layers: int) -> list[str]:
    return [f"model.layers.{number}" for number in range(layers)]


def test_a_heavy_head_gets_fewer_layers_beside_it() -> None:
    even = divide(sizes_of(12, 10, 0, 0), blocks_of(12), 4)
    assert [beyond - first for first, beyond in even.blocks] == [3, 3, 3, 3]
    heavy = divide(sizes_of(12, 10, 5, 30), blocks_of(12), 4)
    loads = [beyond - first for first, beyond in heavy.blocks]
    assert sum(loads) == 12
    assert loads[-1] < min(loads[:-1])
    assert heavy.stages["model.embed.weight"] == (0,)
    assert heavy.stages["model.norm.weight"] == heavy.stages["head.weight"] == (3,)


def test_a_tied_weight_stands_at_both_ends_and_belongs_to_the_first() -> None:
    sizes = sizes_of(4, 10, 5, 0)
    del sizes["head.weight"]
    division = divide(sizes, blocks_of(4), 2, aliases={"head.weight": "model.embed.weight"})
    assert division.stages["model.embed.weight"] == division.stages["head.weight"] == (0, 1)


def test_names_tell_what_registration_does_not() -> None:
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


def best_loads_by_exhaustion(
    costs: list[int], num_stages: int, before: int, after: int
) -> tuple[int, int]:
    """(largest, sum of squares) of the best division, found by trying every set of cuts."""
    results = []
    for cuts in combinations(range(1, len(costs)), num_stages - 1):
        bounds = [0, *cuts, len(costs)]
        loads = [sum(costs[first:end]) for first, end in pairwise(bounds)]
        if all(loads):
            loads[0] += before
            loads[-1] += after
            results.append((max(loads), sum(load * load for load in loads)))
    return min(results)


def test_the_division_is_the_best_of_all() -> None:
    chance = random.Random(0)
    for _ in range(300):
        costs = [chance.choice([0, 1, 2, 5, 5, 13]) for _ in range(chance.randint(2, 9))]
        with_parameters = sum(cost > 0 for cost in costs)
        if not with_parameters:
            continue
        num_stages = chance.randint(1, with_parameters)
        before, after = chance.choice([0, 4, 30]), chance.choice([0, 4, 30])
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
        assert (max(loads), sum(load * load for load in loads)) == best_loads_by_exhaustion(
            costs, num_stages, before, after
        )


@pytest.mark.parametrize(("layers", "stages"), [(80, 64), (126, 120), (80, 79)])
def test_many_stages_are_divided_without_searching_dead_ends(layers: int, stages: int) -> None:
    """A search that meets the infeasible divisions again and again does not end for these."""
    result = divide(sizes_of(layers, 856, 1050, 1050), blocks_of(layers), stages)
    assert result.num_stages == stages
    counts = [beyond - first for first, beyond in result.blocks]
    assert sum(counts) == layers
    assert set(counts) <= {1, 2}


def test_no_stage_is_left_without_parameters() -> None:
    sizes = {"0.w": 100, "2.w": 1, "5.w": 1}
    division = divide(sizes, [str(number) for number in range(7)], 3)
    assert division.blocks == ((0, 2), (2, 5), (5, 7))
    with pytest.raises(ConfigError, match="4 stages, but the model has 3 layers"):
        divide(sizes, [str(number) for number in range(7)], 4)


def test_many_layers_are_dealt_quickly_and_evenly() -> None:
    division = divide(sizes_of(128, 100, 120, 120), blocks_of(128), 16)
    loads = [beyond - first for first, beyond in division.blocks]
    assert sum(loads) == 128
    assert max(loads) - min(loads) <= 3


def test_more_stages_than_layers_are_refused_before_anything_is_loaded() -> None:
    check_sizes({"num_hidden_layers": 8}, 4, 2)
    check_sizes({"model_type": "unknown"}, 400)
    with pytest.raises(
        ConfigError, match=r"needs 16 stages, but the model has 8 layers.*parallel\.pipeline: 4"
    ):
        check_sizes({"text_config": {"num_hidden_layers": 8}}, 8, 2)


def test_cost_says_who_sends_how_much() -> None:
    names = sizes_of(8, 10, 4, 4)
    shape = ModelShape(
        parameters=tuple(TensorShape(name, (size,), 4, True) for name, size in names.items()),
        blocks=tuple(blocks_of(8)),
        block_output_elements=(16,) * 8,
    )
    work = Workload(micro_batches=6, positions=10.0, block_activation_bytes=(100,) * 8)
    boundary = 6 * 10 * 16 * 4
    cost = pipeline_cost(shape, 4, 2, "1f1b", work)
    assert cost.send_bytes == (boundary, 2 * boundary, 2 * boundary, boundary)
    assert cost.activation_bytes == (800, 600, 400, 200)
    looped = pipeline_cost(shape, 4, 2, "interleaved_1f1b", work)
    assert looped.send_bytes == (3 * boundary, 4 * boundary, 4 * boundary, 3 * boundary)
    assert max(looped.send_bytes) == 4 * boundary
    assert looped.parameters[0] == (
        "model.embed.weight",
        "model.layers.0.weight",
        "model.layers.4.weight",
    )


def test_between_a_column_and_its_row_layer_a_part_of_the_features_is_sent() -> None:
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
    # after the row layer: whole
    assert pipeline_cost(shape, 3, 1, "1f1b", work, tensor_ranks=2).send_bytes[2] == boundary

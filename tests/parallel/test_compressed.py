"""Training with compressed gradients: it learns, resumes from a checkpoint to the bit, costs what
is predicted, or is rejected."""

import pytest
import torch
from communicating import packed, train, unpacked
from ranks import run_ranks
from states import assemble
from training import Plain

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.collectives.schedules import all_reduce_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.compression.cost import (
    break_even_ratio,
    communication_cost,
    compression_notice,
)
from paceline.parallel.cost import TensorShape
from paceline.parallel.registry import check_strategy

#: by name: settings, and the loss that 60 steps must reach; plain ddp goes from 3.35 to 0.09
LEARNS = {
    "bf16": ({"method": "bf16"}, 0.15),
    "fp16": ({"method": "fp16"}, 0.15),
    "int8": ({"method": "int8"}, 0.15),
    "topk": ({"method": "topk", "ratio": 0.05}, 0.7),
    "randomk": ({"method": "randomk", "ratio": 0.05}, 1.6),
    "powersgd": ({"method": "powersgd", "rank": 4}, 1.3),
    "signsgd": ({"method": "signsgd"}, 0.7),
    "topk + bf16": ({"method": ["topk", "bf16"], "ratio": 0.05}, 0.7),
    "powersgd + bf16": ({"method": ["powersgd", "bf16"], "rank": 4}, 1.3),
}


def learn(world):
    results = {}
    for name, (settings, _) in LEARNS.items():
        results[name] = train(
            world, Plain, 60, parallel={"bucket_cap_mb": 0.02}, compression=settings
        )
        del results[name]["parts"]
    world.barrier()
    return results


@pytest.mark.soak
def test_each_method_trains_to_the_stated_loss_and_costs_what_is_predicted():
    first, second = run_ranks(learn, 2)
    for name, (_, goal) in LEARNS.items():
        ours = first[name]
        assert ours["losses"][0] > 3.3, name
        assert ours["losses"][-1] < goal, (name, ours["losses"][-1])
        for key, weight in ours["weights"].items():
            assert torch.equal(weight, second[name]["weights"][key]), (name, key)
        assert ours["traffic"] == dict(ours["cost"].traffic), name
        assert abs(ours["cost"].state / ours["state"] - 1) < 0.02, name
        figures = ours["figures"]["communication"]
        assert figures == second[name]["figures"]["communication"]
        assert figures["method"] == name
        assert (figures["residual_norm"] is None) == (name in ("bf16", "fp16", "int8", "signsgd"))
    ratios = {name: first[name]["figures"]["communication"]["ratio_sent"] for name in LEARNS}
    assert ratios["bf16"] == pytest.approx(2.0, rel=0.01)
    assert ratios["int8"] == pytest.approx(4.0, rel=0.01)
    # 5 %, each with an index as large as its value
    assert ratios["topk"] == pytest.approx(10.0, rel=0.02)
    assert ratios["signsgd"] == pytest.approx(32.0, rel=0.02)


#: methods with state, or with random numbers
KEEPS = {
    "topk": {"compression": {"method": "topk", "ratio": 0.05, "warmup_steps": 4}},
    "topk sgd": {
        "compression": {"method": ["topk", "int8"], "ratio": 0.05},
        "optim": "sgd",
        "momentum": 0.9,
    },
    "topk plain": {"compression": {"method": "topk", "ratio": 0.05, "local_moments": False}},
    "randomk": {"compression": {"method": "randomk", "ratio": 0.05}, "optim": "adam"},
    "powersgd": {"compression": {"method": "powersgd", "rank": 2}, "optim": "rmsprop"},
    "int8": {"compression": {"method": "int8"}},
    "signsgd": {"compression": {"method": "signsgd"}},
}


def run_each(world, steps, first, raw):
    results, sources = {}, unpacked(raw) if raw else {}
    for name, settings in KEEPS.items():
        result = train(world, Plain, steps, first=first, source=sources.get(name), **settings)
        results[name] = {key: result[key] for key in ("parts", "losses", "notices")}
    world.barrier()
    return results


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 3])
def test_resuming_from_the_state_is_bitwise_equal(world_size):
    full = run_ranks(run_each, world_size, 5, 0, None)
    half = run_ranks(run_each, world_size, 2, 0, None)
    sources = {name: assemble([rank[name]["parts"] for rank in half]) for name in KEEPS}
    resumed = run_ranks(run_each, world_size, 3, 2, packed(sources))
    for name in KEEPS:
        ours, theirs = (
            assemble([rank[name]["parts"] for rank in results]).full for results in (full, resumed)
        )
        assert set(ours) == set(theirs), name
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), (name, key)
        assert full[0][name]["losses"][2:] == resumed[0][name]["losses"], name
        assert not [text for level, text in resumed[0][name]["notices"] if level == "warning"]
    names = set(sources["topk"].full)
    for rank in range(world_size):
        assert {
            f"compression/1.weight/rank-{rank}/{kind}" for kind in ("residual", "exp_avg_sq")
        } <= names
    assert not any(name.startswith("optimizer/") for name in names)


def change(world, raw):
    """Resume with a different number of ranks, a different method, or none."""
    sources = unpacked(raw)
    topk, powersgd = ({"compression": {"method": name}} for name in ("topk", "powersgd"))
    results = {
        "topk to topk": train(world, Plain, 2, first=2, source=sources["topk"], **topk),
        "topk to ddp": train(world, Plain, 2, first=2, source=sources["topk"]),
        "topk to zero1": train(world, Plain, 2, first=2, source=sources["topk"], mode="zero1"),
        "ddp to topk": train(world, Plain, 2, first=2, source=sources["ddp"], **topk),
        "ddp to powersgd": train(world, Plain, 2, first=2, source=sources["ddp"], **powersgd),
        "ddp to ddp": train(world, Plain, 2, first=2, source=sources["ddp"]),
    }
    world.barrier()
    return {
        name: {key: result[key] for key in ("losses", "notices", "parts")}
        for name, result in results.items()
    }


def begin(world):
    return {
        "topk": train(world, Plain, 2, compression={"method": "topk"})["parts"],
        "ddp": train(world, Plain, 2)["parts"],
    }


@pytest.mark.soak
def test_state_of_other_ranks_is_dropped_with_a_notice():
    begun = run_ranks(begin, 2)
    sources = {name: assemble([rank[name] for rank in begun]) for name in begun[0]}
    results = run_ranks(change, 3, packed(sources))[0]
    for name, result in results.items():
        # NaN is not less
        assert all(loss < 4.0 for loss in result["losses"]), (name, result["losses"])
        dropped = [text for _, text in result["notices"] if "dropped" in text]
        assert bool(dropped) == name.startswith("topk"), name
        if dropped:
            assert "moments" in dropped[0]
    # Local moments start from the common ones: the first steps are those of ddp, not those of an
    # Adam that starts from zero.
    ages = {part.name: part.tensor for part in results["ddp to topk"]["parts"]}
    assert int(ages["compression/age"]) == 4
    assert abs(results["ddp to topk"]["losses"][0] - results["ddp to ddp"]["losses"][0]) < 1e-5


def with_parts(world):
    axes = ParallelDims(data=2, tensor=2)
    sizes = {"data": 2, "tensor": 2, "tensor_plan": {"1": "colwise", "3": "rowwise"}}
    results = []
    for method in ("none", "bf16", "powersgd"):
        result = train(
            world,
            Plain,
            10,
            mode="hybrid",
            axes=axes,
            parallel=sizes,
            compression={"method": method, "rank": 4},
        )
        results.append(
            (
                result["losses"],
                result["traffic"],
                dict(result["cost"].traffic),
                result["state"] / result["cost"].state,
                result["parts"],
            )
        )
    world.barrier()
    return results


@pytest.mark.soak
def test_the_data_axis_of_a_hybrid_with_methods_for_sharded_replicas():
    results = run_ranks(with_parts, 4)
    plain, bf16, powersgd = results[0]
    torch.testing.assert_close(bf16[0], plain[0], rtol=5e-3, atol=0)
    assert powersgd[0][-1] < powersgd[0][0]
    for number in range(3):
        for kind in ("all_to_all", "all_gather"):
            assert results[0][number][1].get(kind, 0) == results[0][number][2].get(kind, 0)
        assert results[0][number][3] == pytest.approx(1.0, abs=0.02)
        assemble([rank[number][4] for rank in results])  # every element is written once


# -- rejected
@pytest.mark.parametrize(
    ("mode", "axes", "method", "allowed"),
    [
        ("zero1", ParallelDims(data=2), "topk", "ddp"),
        ("zero3", ParallelDims(shard=2), "bf16", "ddp"),
        ("zero2", ParallelDims(shard=2), "powersgd", "ddp"),
        ("dp", ParallelDims(data=2), "int8", "ddp"),
        ("single", ParallelDims(), "bf16", "ddp"),
        ("tensor", ParallelDims(tensor=2), "powersgd", "parallel.data"),
        ("pipeline", ParallelDims(pipeline=2), "bf16", "parallel.data"),
        ("hybrid", ParallelDims(data=2, shard=2), "bf16", "ddp"),
        ("hybrid", ParallelDims(data=2, pipeline=2), "topk", "powersgd"),
        ("hybrid", ParallelDims(data=2, tensor=2), ["powersgd", "bf16"], "powersgd"),
        ("ddp", ParallelDims(data=1), "topk", "two ranks"),
    ],
)
def test_unsupported_modes_are_rejected_with_the_supported_ones(mode, axes, method, allowed):
    config = Config(model="m", dataset="d", parallel={"mode": mode}, compression={"method": method})
    with pytest.raises(ConfigError, match=r"compression\.method") as caught:
        check_strategy(mode, config, axes)
    assert allowed in caught.value.allowed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel": {"all_reduce_algorithm": "ring"}}, "all_reduce"),
        (
            {"train_args": {"optim": "adagrad"}, "compression": {"local_moments": True}},
            "local_moments",
        ),
        ({"compression": {"momentum_correction": True}}, "momentum_correction"),
    ],
)
def test_unsupported_combinations_of_settings_are_rejected(settings, message):
    compression = {"method": "topk", **settings.get("compression", {})}
    config = Config(model="m", dataset="d", **{**settings, "compression": compression})
    with pytest.raises(ConfigError, match=message):
        check_strategy("ddp", config, ParallelDims(data=2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "topk", "ratio": 0},
        {"method": "topk", "ratio": 1.5},
        {"method": "powersgd", "rank": 0},
        {"method": "gzip"},
        {"method": ["bf16", "topk"]},
        {"method": ["powersgd", "int8"]},
        {"method": ["topk", "bf16", "int8"]},
        {"method": []},
        {"method": ["none", "topk"]},
        {"method": "topk", "warmup_steps": -1},
    ],
)
def test_the_schema_rejects_values_out_of_range(wrong):
    with pytest.raises(ValueError, match="compression"):
        Config(model="m", dataset="d", compression=wrong)


@pytest.mark.parametrize("method", ["topk", ["topk", "bf16"], ["topk", "int8"], "randomk"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ratio_that_saves_nothing_is_reported(method, ranks):
    """At the break-even ratio as many bytes are sent as by `ddp` without compression."""

    def config(ratio):
        return Config(model="m", dataset="d", compression={"method": method, "ratio": ratio})

    limit = break_even_ratio(config(0.01), ranks)
    trained = [TensorShape("w", (1000, 64), 4, trainable=True)]
    sent = communication_cost(trained, config(limit), ranks).traffic
    assert sum(sent.values()) == pytest.approx(all_reduce_bytes(4 * 64_000, ranks), rel=0.01)
    level, text = compression_notice(config(limit), ranks)
    assert level == "warning"
    assert f"break-even ratio {limit:.3g}" in text
    assert "as many bytes as" in text
    assert compression_notice(config(0.9 * limit), ranks) is None
    if method == "topk":
        assert limit == 1 / ranks
        assert "2 times the bytes" in compression_notice(config(min(1, 2 * limit)), ranks)[1]


def test_other_methods_have_no_ratio():
    for method in ("none", "bf16", "int8", "powersgd", "signsgd"):
        assert (
            compression_notice(
                Config(model="m", dataset="d", compression={"method": method, "ratio": 1.0}), 2
            )
            is None
        )

"""`zero2`, `zero3`: the same losses as one rank, from weights, gradients and state in shards."""

import pytest
import torch
from ranks import run_ranks
from states import assemble
from torch import nn
from training import VOCABULARY, Adapted, Net, Plain, largest_difference, train

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.cost import ModelShape, TensorShape, Workload
from paceline.parallel.fsdp.cost import shard_dim
from paceline.parallel.fsdp.sharding import FSDPSharding
from paceline.parallel.registry import check_strategy, estimate_cost


class SingleUse(Net):
    """Each block runs once, so that traffic is what a cost can know."""

    def __init__(self):
        super().__init__(twice=False)


def train_alone(world):
    return {
        "whole": train(world, "single", steps=20, micro_batches=4),
        "half": train(world, "single", steps=3, micro_batches=4),
        "six": train(world, "single", steps=6, micro_batches=4),
        "one_rank": train(world, "zero3", steps=3, micro_batches=4),
    }


def two_ranks(world, source):
    axes = ParallelDims(shard=2)
    results = {mode: train(world, mode, axes, steps=20) for mode in ("zero2", "zero3")}
    for mode in ("zero2", "zero3"):
        half = assemble(world.gather_objects(train(world, mode, axes, steps=3)["parts"]))
        results[f"{mode} resumed"] = train(world, mode, axes, steps=3, first=3, source=half)
        results[f"{mode} unbroken"] = train(world, mode, axes, steps=6)
        results[f"{mode} moved"] = train(world, mode, axes, steps=3, first=3, source=source)
    # A state goes from strategy to strategy, through all of them.
    for mode, next_axes in (("zero3", axes), ("zero1", None), ("zero2", axes), ("ddp", None)):
        last = train(
            world, mode, next_axes, steps=1, first=results.get("steps", 0) + 3, source=source
        )
        source = assemble(world.gather_objects(last["parts"]))
        results["steps"] = results.get("steps", 0) + 1
        results.setdefault("chain", []).extend(last["losses"])
    results["held"] = [
        train(world, mode, axes, steps=2, net=net, bf16=low)
        for mode in ("zero2", "zero3")
        for net, low in (
            (Plain, False),
            (Plain, True),
            (Adapted, False),
            (Adapted, True),
            (SingleUse, False),
        )
    ]
    return results


def four_ranks(world):
    hybrid = ParallelDims(data=2, shard=2)
    results = {
        mode: train(world, mode, hybrid, steps=6, net=SingleUse, micro_batches=1)
        for mode in ("zero2", "zero3")
    }
    for mode in ("zero2", "zero3"):
        results[f"{mode} accumulated"] = train(world, mode, hybrid, steps=6)
    results["zero3 bf16"] = train(world, "zero3", hybrid, steps=2, net=Plain, bf16=True)
    results["zero3 wide"] = train(
        world, "zero3", ParallelDims(shard=4), steps=2, net=Adapted, micro_batches=1
    )
    results["ddp"] = train(world, "ddp", steps=2, net=Plain, micro_batches=1)
    results["zero3 plain"] = train(
        world, "zero3", ParallelDims(shard=4), steps=2, net=Plain, micro_batches=1
    )
    return results


@pytest.fixture(scope="module")
def alone():
    return run_ranks(train_alone, 1, timeout_s=120.0)[0]


@pytest.fixture(scope="module")
def two(alone):
    return run_ranks(two_ranks, 2, assemble([alone["half"]["parts"]]), timeout_s=180.0)


@pytest.fixture(scope="module")
def four():
    return run_ranks(four_ranks, 4, timeout_s=120.0)


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_losses_norms_and_weights_are_those_of_one_rank(mode, alone, two):
    for result in two:
        assert result[mode]["losses"] == pytest.approx(alone["whole"]["losses"], rel=1e-6)
        assert result[mode]["norms"] == pytest.approx(alone["whole"]["norms"], rel=1e-5)
        torch.testing.assert_close(
            result[mode]["logits"], alone["whole"]["logits"], rtol=1e-4, atol=1e-4
        )
    assert (
        largest_difference(
            assemble([rank[mode]["parts"] for rank in two]), assemble([alone["whole"]["parts"]])
        )
        < 1e-5
    )


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_going_on(mode, alone, two):
    """Bitwise in the same layout; from one rank's state to rounding."""
    unbroken = assemble([rank[f"{mode} unbroken"]["parts"] for rank in two]).full
    resumed = assemble([rank[f"{mode} resumed"]["parts"] for rank in two]).full
    for name, value in unbroken.items():
        assert torch.equal(value, resumed[name]), name
    assert two[0][f"{mode} unbroken"]["losses"][3:] == two[0][f"{mode} resumed"]["losses"]
    assert two[0][f"{mode} moved"]["losses"] == pytest.approx(alone["six"]["losses"][3:], rel=1e-6)


def test_a_state_goes_through_all_strategies(alone, two):
    assert two[0]["chain"] == pytest.approx(alone["whole"]["losses"][3:7], rel=1e-6)


@pytest.mark.soak
def test_state_and_traffic_are_what_the_cost_says(two, four):
    results = [[rank["held"][number] for rank in two] for number in range(len(two[0]["held"]))]
    results += [
        [rank[key] for rank in four] for key in ("zero2", "zero3", "zero3 bf16", "zero3 wide")
    ]
    for ranks in results:
        cost = ranks[0]["cost"]
        assert max(rank["state"] for rank in ranks) == pytest.approx(cost.state, rel=0.02)
        assert max(sum(rank["traffic"].values()) for rank in ranks) == pytest.approx(
            cost.traffic_per_step, rel=0.02
        )
        assert all(rank["state_after_evaluation"] == rank["state"] for rank in ranks)


@pytest.mark.parametrize("low", [False, True])
def test_frozen_weights_are_sent_by_zero3_only(low, two):
    """The formulas of docs/strategies.md with A = 2 micro-batches on N = 2 ranks, against what was
    measured."""
    trained, frozen = 3 * 2 * 48 * 2, 2 * 48 * VOCABULARY + 3 * 49 * 48
    size = 2 if low else 4
    expected = {
        "zero2": (1 + 2) * size * trained / 2,
        "zero3": 3 * 2 * size * trained / 2 + 2 * 2 * size * frozen / 2,
    }
    state = {
        "zero2": (size + 16 / 2) * trained + size * frozen,
        "zero3": 16 / 2 * trained + 4 / 2 * frozen,
    }
    for offset, mode in ((0, "zero2"), (5, "zero3")):
        result = two[0]["held"][offset + (3 if low else 2)]
        assert sum(result["traffic"].values()) == pytest.approx(expected[mode], rel=0.02)
        assert result["state"] == pytest.approx(state[mode], rel=0.02)


def test_a_quarter_of_the_state_on_four_ranks(four):
    assert max(rank["zero3 plain"]["state"] for rank in four) <= 0.27 * four[0]["ddp"]["state"]


def test_shards_that_are_repeated(alone, four):
    """Two replicas of two shards: one writer for each element, one all-reduce of a shard a step."""
    for mode in ("zero2", "zero3"):
        state = assemble([rank[mode]["parts"] for rank in four])
        assert set(state.full) == set(assemble([alone["half"]["parts"]]).full)
        assert len({tuple(rank[mode]["losses"]) for rank in four}) == 1
    assert four[0]["zero2"]["losses"] == pytest.approx(four[0]["zero3"]["losses"], rel=1e-6)
    reduced = four[0]["zero3"]["traffic"]["all_reduce"]
    assert reduced == pytest.approx(four[0]["zero3"]["cost"].gradients, rel=0.02)


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_replicas_of_shards_train_as_one_rank_does(mode, alone, four):
    results = [rank[f"{mode} accumulated"] for rank in four]
    for result in results:
        assert result["losses"] == pytest.approx(alone["six"]["losses"], rel=1e-6)
        assert result["norms"] == pytest.approx(alone["six"]["norms"], rel=1e-5)
    difference = largest_difference(
        assemble([rank["parts"] for rank in results]), assemble([alone["six"]["parts"]])
    )
    assert difference < 1e-5


def test_one_rank_shards_nothing_and_trains_the_same(alone):
    assert alone["one_rank"]["losses"] == pytest.approx(alone["whole"]["losses"][:3], rel=1e-6)
    assert alone["one_rank"]["traffic"] == {}


def as_a_component(world):
    """As the hybrids use it: a module of plain parameters, blocks given, norms over some of the
    parameters."""
    world = Communicator(world.env, world.device, ParallelDims(shard=2))
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    sharding = FSDPSharding(model, world, reshard_after_forward=True, blocks=[model[0]])
    sharding.begin_step()
    model(torch.full((2, 6), world.rank + 1.0)).sum().backward()
    sharding.end_step()
    norms = [sharding.squared_norm(), sharding.squared_norm(names={"2.bias"})]
    sharding.scale(torch.tensor(0.5))
    return (
        world.sum(*map(float, norms)),
        world.sum(float(sharding.squared_norm()))[0],
        len(sharding.units),
    )


def test_as_a_component():
    (total, bias), scaled, units = run_ranks(as_a_component, 2)[0]
    assert bias == pytest.approx(3 * 4.0**2)
    assert scaled == pytest.approx(total / 4, rel=1e-5)
    assert units == 2


def test_cut_along_the_dimension_that_wastes_least():
    assert shard_dim((8, 64), 4) == 0
    assert shard_dim((7, 64), 4) == 0  # padding of one row
    assert shard_dim((2, 64), 4) == 1
    assert shard_dim((2, 5), 4) == 0


@pytest.mark.parametrize(
    ("strategy", "gigabytes", "volume"), [("zero2", 16.6, 2), ("zero3", 1.9, 3)]
)
def test_formulas_of_the_paper(strategy, gigabytes, volume):
    """7.5 B parameters on 64 ranks, mixed precision Adam (Rajbhandari et al., 2020, figure 1 and
    section 7)."""
    config = Config(model="m", dataset="d", train_args={"precision": "bf16-mixed"})
    shape = ModelShape((TensorShape("w", (7_500_000, 1000), 4, True),), low_bytes=2)
    cost = estimate_cost(strategy, shape, ParallelDims(shard=64), Workload(), config)
    assert cost.state / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert cost.traffic_per_step == pytest.approx(volume * 7.5e9 * 2 * 63 / 64, rel=1e-3)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train_args": {"optim": "adafactor"}}, "adamw"),
        ({"evaluation": {"mode": "rank0"}}, "mode: distributed"),
        ({"parallel": {"cpu_offload": "optimizer"}}, "deepspeed"),
        ({"parallel": {"cpu_offload": "all", "device": "cpu"}}, "accelerator"),
    ],
)
def test_what_does_not_fit_is_refused(section, message):
    for mode in ("zero2", "zero3"):
        with pytest.raises(ConfigError, match=message):
            check_strategy(mode, Config(model="m", dataset="d", **section), ParallelDims(shard=2))


def test_parameters_of_several_types_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ConfigError, match="float32, float64"):
        run_ranks_alone(model)


def run_ranks_alone(model):
    from paceline.distributed.environment import RankEnv

    return FSDPSharding(model, Communicator(RankEnv(), torch.device("cpu")))

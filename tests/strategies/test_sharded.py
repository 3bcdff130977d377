"""`zero2` and `zero3`: training with shards matches one rank, at the predicted memory and
traffic."""

import pytest
import torch
from raised import raises_error
from ranks import run_ranks
from states import assemble
from strategy_training import VOCABULARY, Adapted, Net, Plain, largest_difference, train
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.cost import ModelShape, TensorShape, Workload
from paceline.parallel.registry import check_strategy, estimate_cost
from paceline.strategies.fsdp.cost import shard_dim
from paceline.strategies.fsdp.sharding import FSDPSharding


class SingleUse(Net):
    """A variant in which each block runs once, as the cost model assumes."""

    def __init__(self):
        super().__init__(twice=False)


def train_on_one_rank(world):
    return {
        "twenty_steps": train(world, "single", steps=20, micro_batches=4),
        "three_steps": train(world, "single", steps=3, micro_batches=4),
        "six_steps": train(world, "single", steps=6, micro_batches=4),
        "zero3": train(world, "zero3", steps=3, micro_batches=4),
    }


def train_on_two_ranks(world, source):
    axes = ParallelDims(shard=2)
    results = {mode: train(world, mode, axes, steps=20) for mode in ("zero2", "zero3")}
    for mode in ("zero2", "zero3"):
        saved = assemble(world.gather_objects(train(world, mode, axes, steps=3)["shards"]))
        results[f"{mode} resumed"] = train(world, mode, axes, steps=3, first_step=3, source=saved)
        results[f"{mode} uninterrupted"] = train(world, mode, axes, steps=6)
        results[f"{mode} moved"] = train(world, mode, axes, steps=3, first_step=3, source=source)
    # One state is resumed by each of the strategies in turn.
    for mode, next_axes in (("zero3", axes), ("zero1", None), ("zero2", axes), ("ddp", None)):
        last = train(
            world, mode, next_axes, steps=1, first_step=results.get("steps", 0) + 3, source=source
        )
        source = assemble(world.gather_objects(last["shards"]))
        results["steps"] = results.get("steps", 0) + 1
        results.setdefault("chain", []).extend(last["losses"])
    results["costs"] = {
        (mode, net.__name__, reduce_dtype): train(
            world,
            mode,
            axes,
            steps=2,
            net=net,
            bf16=reduce_dtype is not None,
            reduce_dtype=reduce_dtype or "float32",
        )
        for mode in ("zero2", "zero3")
        for net, reduce_dtype in (
            (Plain, None),
            (Plain, "float32"),
            (Plain, "auto"),
            (Adapted, None),
            (Adapted, "float32"),
            (Adapted, "auto"),
            (SingleUse, None),
        )
    }
    return results


def train_on_four_ranks(world):
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
def one_rank():
    return run_ranks(train_on_one_rank, 1, timeout_s=120.0)[0]


@pytest.fixture(scope="module")
def two_ranks(one_rank):
    return run_ranks(
        train_on_two_ranks, 2, assemble([one_rank["three_steps"]["shards"]]), timeout_s=180.0
    )


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(train_on_four_ranks, 4, timeout_s=120.0)


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_losses_norms_and_weights_match_one_rank(mode, one_rank, two_ranks):
    for result in two_ranks:
        assert result[mode]["losses"] == pytest.approx(one_rank["twenty_steps"]["losses"], rel=1e-6)
        assert result[mode]["norms"] == pytest.approx(one_rank["twenty_steps"]["norms"], rel=1e-5)
        torch.testing.assert_close(
            result[mode]["logits"], one_rank["twenty_steps"]["logits"], rtol=1e-4, atol=1e-4
        )
    assert (
        largest_difference(
            assemble([rank[mode]["shards"] for rank in two_ranks]),
            assemble([one_rank["twenty_steps"]["shards"]]),
        )
        < 1e-5
    )


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_resume_is_exact(mode, one_rank, two_ranks):
    """Resuming is exact to the bit in the same layout, and up to rounding from the state of one
    rank."""
    uninterrupted = assemble([rank[f"{mode} uninterrupted"]["shards"] for rank in two_ranks]).full
    resumed = assemble([rank[f"{mode} resumed"]["shards"] for rank in two_ranks]).full
    for name, value in uninterrupted.items():
        assert torch.equal(value, resumed[name]), name
    assert (
        two_ranks[0][f"{mode} uninterrupted"]["losses"][3:]
        == two_ranks[0][f"{mode} resumed"]["losses"]
    )
    assert two_ranks[0][f"{mode} moved"]["losses"] == pytest.approx(
        one_rank["six_steps"]["losses"][3:], rel=1e-6
    )


def test_state_resumes_in_all_strategies(one_rank, two_ranks):
    assert two_ranks[0]["chain"] == pytest.approx(one_rank["twenty_steps"]["losses"][3:7], rel=1e-6)


@pytest.mark.soak
def test_state_and_traffic_match_the_cost_model(two_ranks, four_ranks):
    results = [[rank["costs"][case] for rank in two_ranks] for case in two_ranks[0]["costs"]]
    results += [
        [rank[key] for rank in four_ranks] for key in ("zero2", "zero3", "zero3 bf16", "zero3 wide")
    ]
    for ranks in results:
        cost = ranks[0]["cost"]
        assert max(rank["state"] for rank in ranks) == pytest.approx(cost.state, rel=0.02)
        assert max(sum(rank["traffic"].values()) for rank in ranks) == pytest.approx(
            cost.traffic_per_step, rel=0.02
        )
        assert all(rank["state_after_evaluation"] == rank["state"] for rank in ranks)


@pytest.mark.parametrize("reduce_dtype", [None, "float32", "auto"])
def test_only_zero3_sends_frozen_weights(reduce_dtype, two_ranks):
    """The measured traffic follows the formulas of docs/strategies.md, with A = 2 micro-batches on
    N = 2 ranks. Embedding and head are frozen and belong to the root, which stays gathered for
    backward. ``reduce_dtype`` is None in float32, and else that of mixed precision."""
    trained, root = 3 * 2 * 48 * 2, 2 * 48 * VOCABULARY
    frozen = root + 3 * 49 * 48
    size = 4 if reduce_dtype is None else 2
    reduced = 2 if reduce_dtype == "auto" else 4
    expected = {
        "zero2": (size + 2 * reduced) * trained / 2,
        "zero3": 2 * (2 * size + reduced) * trained / 2 + 2 * size * (2 * frozen - root) / 2,
    }
    state = {
        "zero2": (size + 16 / 2) * trained + size * frozen,
        "zero3": 16 / 2 * trained + 4 / 2 * frozen,
    }
    for mode in ("zero2", "zero3"):
        result = two_ranks[0]["costs"][mode, "Adapted", reduce_dtype]
        assert sum(result["traffic"].values()) == pytest.approx(expected[mode], rel=0.02)
        assert result["state"] == pytest.approx(state[mode], rel=0.02)


def test_four_ranks_hold_a_quarter_of_the_state_each(four_ranks):
    assert (
        max(rank["zero3 plain"]["state"] for rank in four_ranks)
        <= 0.27 * four_ranks[0]["ddp"]["state"]
    )


def test_replicas_of_shards_write_each_element_once(one_rank, four_ranks):
    """With two replicas of two shards, one rank writes each element, and each step has one
    all-reduce of a shard."""
    for mode in ("zero2", "zero3"):
        state = assemble([rank[mode]["shards"] for rank in four_ranks])
        assert set(state.full) == set(assemble([one_rank["three_steps"]["shards"]]).full)
        assert len({tuple(rank[mode]["losses"]) for rank in four_ranks}) == 1
    assert four_ranks[0]["zero2"]["losses"] == pytest.approx(
        four_ranks[0]["zero3"]["losses"], rel=1e-6
    )
    reduced = four_ranks[0]["zero3"]["traffic"]["all_reduce"]
    assert reduced == pytest.approx(four_ranks[0]["zero3"]["cost"].gradients, rel=0.02)


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_replicas_of_shards_match_one_rank(mode, one_rank, four_ranks):
    results = [rank[f"{mode} accumulated"] for rank in four_ranks]
    for result in results:
        assert result["losses"] == pytest.approx(one_rank["six_steps"]["losses"], rel=1e-6)
        assert result["norms"] == pytest.approx(one_rank["six_steps"]["norms"], rel=1e-5)
    difference = largest_difference(
        assemble([rank["shards"] for rank in results]), assemble([one_rank["six_steps"]["shards"]])
    )
    assert difference < 1e-5


def test_one_rank_sends_nothing_and_matches_single(one_rank):
    assert one_rank["zero3"]["losses"] == pytest.approx(
        one_rank["twenty_steps"]["losses"][:3], rel=1e-6
    )
    assert one_rank["zero3"]["traffic"] == {}


def use_as_component(world):
    """Use FSDPSharding as the hybrid strategy does: on a module with plain parameters, with
    explicit blocks, and with norms over some of the parameters."""
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


def test_sharding_as_a_component():
    (total, bias), scaled, units = run_ranks(use_as_component, 2)[0]
    assert bias == pytest.approx(3 * 4.0**2)
    assert scaled == pytest.approx(total / 4, rel=1e-5)
    assert units == 2


def sums_of_gradients(world):
    """Add up gradients of 256 and 1 over the ranks, in float32 and in bfloat16."""
    world, sums = Communicator(world.env, world.device, ParallelDims(shard=2)), []
    for reduces_in_float32 in (True, False):
        model = nn.Linear(1, 2, bias=False)
        sharding = FSDPSharding(
            model, world, low_dtype=torch.bfloat16, reduces_in_float32=reduces_in_float32
        )
        sharding.begin_step()
        model(torch.full((1, 1), 1.0 + 255 * world.rank).bfloat16()).sum().backward()
        sharding.end_step()
        sums.append(float(sharding.pieces[0].values.grad))
    return sums


def test_small_gradients_are_not_lost_in_a_sum():
    """In bfloat16, 256 + 1 is 256."""
    assert run_ranks(sums_of_gradients, 2) == [[257.0, 256.0]] * 2


def test_shard_dim_needs_the_least_padding():
    assert shard_dim((8, 64), 4) == 0
    assert shard_dim((7, 64), 4) == 0  # padding of one row
    assert shard_dim((2, 64), 4) == 1
    assert shard_dim((2, 5), 4) == 0


@pytest.mark.parametrize(
    ("strategy", "gigabytes", "volume"), [("zero2", 16.6, 2), ("zero3", 1.9, 3)]
)
def test_cost_matches_the_zero_paper(strategy, gigabytes, volume):
    """Memory and traffic of mixed-precision Adam with 7.5 B parameters on 64 ranks match
    Rajbhandari et al. (2020), figure 1 and section 7."""
    config = Config(
        model="m",
        dataset="d",
        parallel={"reduce_dtype": "auto"},
        train_args={"precision": "bf16-mixed"},
    )
    weight = TensorShape("block.w", (7_500_000, 1000), 4, True)
    shape = ModelShape((weight,), low_bytes=2, blocks=("block",))
    cost = estimate_cost(strategy, shape, ParallelDims(shard=64), Workload(), config)
    assert cost.state / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert cost.traffic_per_step == pytest.approx(volume * 7.5e9 * 2 * 63 / 64, rel=1e-3)


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"train_args": {"optim": "adafactor"}}, ("not-supported", "train_args.optim")),
        ({"evaluation": {"mode": "rank0"}}, ("not-supported", "evaluation.mode")),
        ({"parallel": {"cpu_offload": "optimizer"}}, ("not-supported", "parallel.cpu_offload")),
        (
            {"parallel": {"cpu_offload": "all", "device": "cpu"}},
            ("offload-on-cpu", "parallel.cpu_offload"),
        ),
    ],
)
def test_rejects_unsupported_settings(section, error):
    for mode in ("zero2", "zero3"):
        with raises_error(ConfigError, code=error[0], naming=error[1]):
            check_strategy(mode, Config(model="m", dataset="d", **section), ParallelDims(shard=2))


def test_rejects_parameters_of_several_dtypes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with raises_error(ConfigError, code="mixed-dtypes"):
        shard_on_one_rank(model)


def shard_on_one_rank(model):
    from paceline.distributed.environment import RankEnv

    return FSDPSharding(model, Communicator(RankEnv(), torch.device("cpu")))

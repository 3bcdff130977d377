"""`zero1`: training with a sharded optimizer state matches one rank, at the predicted memory and
traffic."""

import pytest
import torch
from raised import raises_error
from ranks import run_ranks
from states import assemble
from strategy_training import Adapted, Plain, largest_difference, train
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.buckets.layout import lay_out
from paceline.parallel.cost import ModelShape, TensorShape, Workload
from paceline.parallel.registry import check_strategy, estimate_cost
from paceline.strategies.zero1.buckets import ShardedBuckets
from paceline.train.optimizers.build import build_optimizer


def train_on_three_ranks(world, source):
    """Train on three ranks: uninterrupted, resumed from the state of the same layout and of one
    rank, with other models, and with running statistics in training mode."""
    twenty_steps = train(world, "zero1", steps=20)
    saved = train(world, "zero1", steps=3)
    gathered = world.gather_objects(saved["shards"])
    resumed = train(world, "zero1", steps=3, first_step=3, source=assemble(gathered))
    uninterrupted = train(world, "zero1", steps=6)
    resumed_from_one_rank = train(world, "zero1", steps=3, first_step=3, source=source)
    costs = [
        train(world, "zero1", steps=2, net=net, bf16=bf16, reduce_dtype=reduce_dtype)
        for net in (Plain, Adapted)
        for bf16, reduce_dtype in ((False, "float32"), (True, "float32"), (True, "auto"))
    ]
    training_mode = train(world, "zero1", steps=2, train_mode=True)
    return {
        "twenty_steps": twenty_steps,
        "resumed": resumed,
        "uninterrupted": uninterrupted,
        "resumed_from_one_rank": resumed_from_one_rank,
        "costs": costs,
        "training_mode": training_mode,
    }


@pytest.fixture(scope="module")
def one_rank():
    return run_ranks(train_on_one_rank, 1)[0]


def train_on_one_rank(world):
    return {
        "twenty_steps": train(world, "single", steps=20, micro_batches=6),
        "three_steps": train(world, "single", steps=3, micro_batches=6),
        "six_steps": train(world, "single", steps=6, micro_batches=6),
        "zero1": train(world, "zero1", steps=20, micro_batches=6),
    }


@pytest.fixture(scope="module")
def three_ranks(one_rank):
    return run_ranks(
        train_on_three_ranks, 3, assemble([one_rank["three_steps"]["shards"]]), timeout_s=120.0
    )


def test_losses_norms_and_weights_match_one_rank(one_rank, three_ranks):
    for ranks in (three_ranks, [{"twenty_steps": one_rank["zero1"]}]):
        for result in ranks:
            assert result["twenty_steps"]["losses"] == pytest.approx(
                one_rank["twenty_steps"]["losses"], rel=1e-6
            )
            assert result["twenty_steps"]["norms"] == pytest.approx(
                one_rank["twenty_steps"]["norms"], rel=1e-5
            )
            torch.testing.assert_close(
                result["twenty_steps"]["logits"],
                one_rank["twenty_steps"]["logits"],
                rtol=1e-4,
                atol=1e-4,
            )
        ours = assemble([result["twenty_steps"]["shards"] for result in ranks])
        assert largest_difference(ours, assemble([one_rank["twenty_steps"]["shards"]])) < 1e-5


def test_resume_in_the_same_layout_is_bitwise_exact(three_ranks):
    uninterrupted = assemble([result["uninterrupted"]["shards"] for result in three_ranks]).full
    resumed = assemble([result["resumed"]["shards"] for result in three_ranks]).full
    assert set(uninterrupted) == set(resumed)
    for name, value in uninterrupted.items():
        assert torch.equal(value, resumed[name]), name
    assert three_ranks[0]["uninterrupted"]["losses"][3:] == three_ranks[0]["resumed"]["losses"]


def test_resume_from_one_rank_has_the_same_losses(one_rank, three_ranks):
    assert three_ranks[0]["resumed_from_one_rank"]["losses"] == pytest.approx(
        one_rank["six_steps"]["losses"][3:], rel=1e-6
    )


def test_state_and_traffic_match_the_cost_model(three_ranks):
    for number in range(len(three_ranks[0]["costs"])):
        results = [result["costs"][number] for result in three_ranks]
        cost = results[0]["cost"]
        assert max(result["state"] for result in results) == pytest.approx(cost.state, rel=0.02)
        assert max(sum(result["traffic"].values()) for result in results) == pytest.approx(
            cost.traffic_per_step, rel=0.02
        )


def test_running_statistics_are_those_of_rank_zero(three_ranks):
    shards = [
        shard
        for shard in three_ranks[0]["training_mode"]["shards"]
        if shard.name == "buffer/statistics.running_mean"
    ]
    assert len(shards) == 1
    assert shards[0].tensor.abs().sum() > 0
    for result in three_ranks[1:]:
        assert not any(
            shard.name.startswith("buffer/") for shard in result["training_mode"]["shards"]
        )
        torch.testing.assert_close(
            result["training_mode"]["logits"],
            three_ranks[0]["training_mode"]["logits"],
            rtol=0,
            atol=0,
        )


def test_buckets_are_sharded_evenly_and_hold_each_tensor_once():
    tensors = [(5, 4, "a"), (17, 4, "a"), (300, 4, "a"), (1, 2, "b"), (40, 2, "b")]
    layouts = lay_out(tensors, 128, shards=3)
    assert [layout.members for layout in layouts] == [(4, 3), (2,), (1, 0)]
    for layout in layouts:
        step = 64 // tensors[layout.members[0]][1]
        assert layout.size % (3 * step) == 0
        assert all(offset % step == 0 for offset in layout.offsets)
    assert sorted(member for layout in layouts for member in layout.members) == list(range(5))


def step_in_float16(world):
    """Make a step in float16 with a gradient scaler. On four ranks, one shard is only padding."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    buckets = ShardedBuckets(dict(model.named_parameters()), 2**20, world, torch.float16)
    assert model.weight.dtype == torch.float16
    optimizer = torch.optim.AdamW([piece.values for piece in buckets.pieces], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    buckets.zero()
    buckets.start_reducing()
    scaler.scale(model(torch.ones(1, 3, dtype=torch.float16)).sum() / world.size).backward()
    buckets.finish()
    scaler.unscale_(optimizer)
    norm = float(buckets.norm())
    scaler.step(optimizer)
    buckets.gather()
    world.barrier()
    return norm, model.weight.detach().float(), len(buckets.pieces)


def test_float16_step_with_a_shard_of_padding():
    results = run_ranks(step_in_float16, 4)
    torch.manual_seed(0)
    start = nn.Linear(3, 2).weight.detach()
    for norm, weight, pieces in results:
        assert pieces >= 1
        assert norm == pytest.approx(8**0.5, rel=1e-3)
        torch.testing.assert_close(weight, start * (1 - 0.1 * 0.01) - 0.1, rtol=2e-3, atol=2e-3)


def sum_of_gradients(world, reduces_in_float32):
    """Add up gradients of 256 and 1 over two micro-batches and over the ranks."""
    model = nn.Linear(1, 1, bias=False)
    buckets = ShardedBuckets(
        dict(model.named_parameters()),
        2**20,
        world,
        torch.bfloat16,
        reduces_in_float32=reduces_in_float32,
    )
    buckets.zero()
    for number in range(2):
        if number == 1:
            buckets.start_reducing()
        model(torch.full((1, 1), 256.0 if number == world.rank else 1.0).bfloat16()).backward()
    buckets.finish()
    return float(buckets.norm())


def sums_of_gradients(world):
    return sum_of_gradients(world, True), sum_of_gradients(world, False)


def test_small_gradients_are_not_lost_in_a_sum():
    """In bfloat16, 256 + 1 is 256."""
    assert run_ranks(sums_of_gradients, 2) == [(514.0, 512.0)] * 2


def test_cost_matches_the_zero_paper():
    """Memory and traffic of mixed-precision Adam with 7.5 B parameters on 64 ranks match
    Rajbhandari et al. (2020), figure 1: 31.4 GB per rank, traffic of 2Ψ."""
    config = Config(
        model="m",
        dataset="d",
        parallel={"reduce_dtype": "auto"},
        train_args={"precision": "bf16-mixed"},
    )
    shape = ModelShape((TensorShape("w", (7_500_000_000,), 4, True),), low_bytes=2)
    cost = estimate_cost("zero1", shape, ParallelDims(data=64), Workload(), config)
    assert cost.state / 1e9 == pytest.approx(31.4, rel=0.005)
    assert cost.traffic_per_step == pytest.approx(2 * 7.5e9 * 2 * 63 / 64, rel=1e-3)


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"train_args": {"optim": "adafactor"}}, ("not-supported", "train_args.optim")),
        ({"parallel": {"cpu_offload": "all"}}, ("not-supported", "parallel.cpu_offload")),
    ],
)
def test_rejects_unsupported_settings(section, error):
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        check_strategy("zero1", Config(model="m", dataset="d", **section), ParallelDims(data=2))


def test_weight_decay_applies_only_to_matrices():
    named = [("a", nn.Parameter(torch.zeros(4))), ("b", nn.Parameter(torch.zeros(4)))]
    args = Config(model="m", dataset="d", train_args={"weight_decay": 0.1}).train_args
    groups = build_optimizer(args, 1e-3, named, frozenset({"a"})).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [
        (1, 0.1),
        (1, 0.0),
    ]

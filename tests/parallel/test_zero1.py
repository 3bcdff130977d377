"""`zero1`: the same losses as one rank, from state that is cut into shards."""

import pytest
import torch
from ranks import run_ranks
from states import assemble
from torch import nn
from training import Adapted, Plain, largest_difference, train

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.cost import ModelShape, TensorShape, Workload
from paceline.parallel.ddp.layout import lay_out
from paceline.parallel.registry import check_strategy, estimate_cost
from paceline.parallel.zero1.buckets import ShardedBuckets
from paceline.train.optimizer import build_optimizer


def chain(world, source):
    """All that three ranks are asked, in one start: a run without a break, its second half from its
    own middle and from another's, and what runs of other kinds hold."""
    complete = train(world, "zero1", steps=20)
    half = train(world, "zero1", steps=3)
    gathered = world.gather_objects(half["parts"])
    resumed = train(world, "zero1", steps=3, first=3, source=assemble(gathered))
    unbroken = train(world, "zero1", steps=6)
    moved = train(world, "zero1", steps=3, first=3, source=source)
    costs = [
        train(world, "zero1", steps=2, net=net, bf16=low)
        for net in (Plain, Adapted)
        for low in (False, True)
    ]
    moving = train(world, "zero1", steps=2, train_mode=True)
    return {
        "whole": complete,
        "resumed": resumed,
        "unbroken": unbroken,
        "moved": moved,
        "held": costs,
        "moving": moving,
    }


@pytest.fixture(scope="module")
def alone():
    return run_ranks(train_alone, 1)[0]


def train_alone(world):
    return {
        "whole": train(world, "single", steps=20, micro_batches=6),
        "half": train(world, "single", steps=3, micro_batches=6),
        "six": train(world, "single", steps=6, micro_batches=6),
        "one_rank": train(world, "zero1", steps=20, micro_batches=6),
    }


@pytest.fixture(scope="module")
def three(alone):
    return run_ranks(chain, 3, assemble([alone["half"]["parts"]]), timeout_s=120.0)


def test_losses_norms_and_weights_are_those_of_one_rank(alone, three):
    for ranks in (three, [{"whole": alone["one_rank"]}]):
        for result in ranks:
            assert result["whole"]["losses"] == pytest.approx(alone["whole"]["losses"], rel=1e-6)
            assert result["whole"]["norms"] == pytest.approx(alone["whole"]["norms"], rel=1e-5)
            torch.testing.assert_close(
                result["whole"]["logits"], alone["whole"]["logits"], rtol=1e-4, atol=1e-4
            )
        ours = assemble([result["whole"]["parts"] for result in ranks])
        assert largest_difference(ours, assemble([alone["whole"]["parts"]])) < 1e-5


def test_going_on_in_the_same_layout_is_bitwise(three):
    unbroken = assemble([result["unbroken"]["parts"] for result in three]).full
    resumed = assemble([result["resumed"]["parts"] for result in three]).full
    assert set(unbroken) == set(resumed)
    for name, value in unbroken.items():
        assert torch.equal(value, resumed[name]), name
    assert three[0]["unbroken"]["losses"][3:] == three[0]["resumed"]["losses"]


def test_going_on_from_one_rank(alone, three):
    assert three[0]["moved"]["losses"] == pytest.approx(alone["six"]["losses"][3:], rel=1e-6)


def test_state_and_traffic_are_what_the_cost_says(three):
    for number in range(len(three[0]["held"])):
        results = [result["held"][number] for result in three]
        cost = results[0]["cost"]
        assert max(result["state"] for result in results) == pytest.approx(cost.state, rel=0.02)
        assert max(sum(result["traffic"].values()) for result in results) == pytest.approx(
            cost.traffic_per_step, rel=0.02
        )


def test_running_statistics_are_the_first_rank_s_everywhere(three):
    shards = [
        part
        for part in three[0]["moving"]["parts"]
        if part.name == "buffer/statistics.running_mean"
    ]
    assert len(shards) == 1
    assert shards[0].tensor.abs().sum() > 0
    for result in three[1:]:
        assert not any(part.name.startswith("buffer/") for part in result["moving"]["parts"])
        torch.testing.assert_close(
            result["moving"]["logits"], three[0]["moving"]["logits"], rtol=0, atol=0
        )


def test_buckets_are_cut_evenly_and_hold_each_tensor_once():
    tensors = [(5, 4, "a"), (17, 4, "a"), (300, 4, "a"), (1, 2, "b"), (40, 2, "b")]
    layouts = lay_out(tensors, 128, shards=3)
    assert [layout.members for layout in layouts] == [(4, 3), (2,), (1, 0)]
    for layout in layouts:
        step = 64 // tensors[layout.members[0]][1]
        assert layout.size % (3 * step) == 0
        assert all(offset % step == 0 for offset in layout.offsets)
    assert sorted(member for layout in layouts for member in layout.members) == list(range(5))


def overflowing(world):
    """float16: the gradient scaler finds what overflowed on another rank's shard; a rank that holds
    padding alone takes part."""
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


def test_float16_with_a_scaler_and_a_rank_without_elements():
    results = run_ranks(overflowing, 4)
    torch.manual_seed(0)
    start = nn.Linear(3, 2).weight.detach()
    for norm, weight, pieces in results:
        assert pieces >= 1
        assert norm == pytest.approx(8**0.5, rel=1e-3)
        torch.testing.assert_close(weight, start * (1 - 0.1 * 0.01) - 0.1, rtol=2e-3, atol=2e-3)


def test_formula_of_the_paper():
    """7.5 B parameters on 64 ranks, mixed precision Adam (Rajbhandari et al., 2020, figure 1): 31.4
    GB a rank, 2Ψ of traffic."""
    config = Config(model="m", dataset="d", train_args={"precision": "bf16-mixed"})
    shape = ModelShape((TensorShape("w", (7_500_000_000,), 4, True),), low_bytes=2)
    cost = estimate_cost("zero1", shape, ParallelDims(data=64), Workload(), config)
    assert cost.state / 1e9 == pytest.approx(31.4, rel=0.005)
    assert cost.traffic_per_step == pytest.approx(2 * 7.5e9 * 2 * 63 / 64, rel=1e-3)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train_args": {"optim": "adafactor"}}, "adamw"),
        ({"parallel": {"cpu_offload": "all"}}, "zero3"),
    ],
)
def test_what_does_not_fit_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        check_strategy("zero1", Config(model="m", dataset="d", **section), ParallelDims(data=2))


def test_weight_decay_falls_on_pieces_of_matrices_alone():
    named = [("a", nn.Parameter(torch.zeros(4))), ("b", nn.Parameter(torch.zeros(4)))]
    args = Config(model="m", dataset="d", train_args={"weight_decay": 0.1}).train_args
    groups = build_optimizer(args, 1e-3, named, frozenset({"a"})).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [
        (1, 0.1),
        (1, 0.0),
    ]

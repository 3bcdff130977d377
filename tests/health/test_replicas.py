"""Replicas are compared by their bits, and one that differs is reported."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.health.replicas import bit_sum, compare, find_divergence
from paceline.parallel.strategy import make_strategy


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_flipping_a_bit_changes_the_sum(dtype):
    values = torch.randint(0, 2, (13,), generator=torch.Generator().manual_seed(0)).to(dtype)
    original = int(bit_sum(values))
    raw = values.view(torch.uint8)
    for byte_index in range(raw.numel()):
        for bit in range(1 if dtype == torch.bool else 8):
            raw[byte_index] ^= 1 << bit
            assert int(bit_sum(values)) != original
            raw[byte_index] ^= 1 << bit
    assert int(bit_sum(values)) == original


def test_bit_sum_is_independent_of_strides_and_alignment():
    values = torch.randn(40, 7, generator=torch.Generator().manual_seed(1))
    transposed = torch.empty(7, 40).t().copy_(values)  # with other strides
    # at an address that is not a multiple of eight bytes
    unaligned = torch.cat([torch.zeros(1), values.reshape(-1)])[1:].view(40, 7)
    assert int(bit_sum(values)) == int(bit_sum(transposed)) == int(bit_sum(unaligned))
    assert int(bit_sum(torch.zeros(0))) == 0
    assert int(bit_sum(torch.tensor(1.5))) != int(bit_sum(torch.tensor(-1.5)))
    assert int(bit_sum(torch.tensor(float("nan")))) == int(bit_sum(torch.tensor(float("nan"))))


@pytest.mark.parametrize(
    ("rows", "divergent", "others"),
    [
        ([(1, 2), (1, 2), (1, 3)], (6,), (2, 4)),
        ([(1, 2), (1, 3)], (2, 4), ()),
        ([(1, 2), (1, 2), (1, 3), (1, 3)], (2, 4, 6, 8), ()),
        ([(1, 3), (1, 2), (1, 2), (1, 4)], (2, 4, 6, 8), ()),
        ([(1, 3), (1, 2), (1, 2), (1, 2), (0, 2)], (2, 10), (4, 6, 8)),
    ],
)
def test_minority_is_divergent(rows, divergent, others):
    ranks = [2, 4, 6, 8, 10][: len(rows)]
    divergence = find_divergence(rows, ["first", "second"], ranks)
    assert (divergence.ranks, divergence.others) == (divergent, others)
    assert divergence.parameter == ("first" if len({row[0] for row in rows}) > 1 else "second")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.last = nn.Linear(9, 2)

    def forward(self, x):
        return self.last(self.frozen(torch.tanh(self.first(x))))


def find_divergences(world, mode, axes, flipped_name, settings):
    """Return the divergence of equal replicas, and that after a bit of the tensor ``flipped_name``
    is flipped on rank 1."""
    world = Communicator(world.env, world.device, axes)
    config = Config(model="m", dataset="d", parallel={"mode": mode}, **settings)
    strategy = make_strategy(mode, config, world)
    torch.manual_seed(world.rank)
    model = strategy.setup(Net())
    strategy.setup_optimizer(
        lambda named: torch.optim.AdamW([param for _, param in named], lr=1e-2)
    )
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + strategy.replica))
        strategy.forward_backward(lambda number, module, x=x: module(x).square().mean(), 1)
        strategy.clip_grad_norm(1.0)
        strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
    before = compare(strategy)
    replicated = dict(strategy.replicated_tensors())
    if world.rank == 1:
        with torch.no_grad():
            tensor = replicated[flipped_name].detach()
            local = getattr(tensor, "_local_tensor", tensor)
            # the last bit of the first element
            local.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    after = compare(strategy)
    world.barrier()
    del model
    return before, after


CASES = {
    "ddp": (3, "ddp", None, "last.weight", {}),
    "optimizer state": (3, "ddp", None, "first.weight/exp_avg", {}),
    "frozen": (3, "ddp", None, "frozen.bias", {}),
    "zero1": (3, "zero1", None, "last.weight", {}),
    "hybrid sharding": (4, "zero3", ParallelDims(data=2, shard=2), "first.weight", {}),
    "compressed": (3, "ddp", None, "first.bias", {"compression": {"method": "topk", "ratio": 0.2}}),
    "deepspeed": (2, "deepspeed", None, "last.weight", {}),
    "a worker": (
        4,
        "local_sgd",
        None,
        "last.weight",
        {"local_sgd": {"sync_every": 2, "workers": 2}},
    ),
    "synchronized workers": (
        4,
        "diloco",
        None,
        "last.weight",
        {"local_sgd": {"sync_every": 3, "workers": 4}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_flipped_bit_is_reported(name):
    world_size, mode, axes, flipped_name, settings = CASES[name]
    by_rank = run_ranks(find_divergences, world_size, mode, axes, flipped_name, settings)
    assert [before for before, _ in by_rank] == [None] * world_size
    group = {"hybrid sharding": [1, 3], "a worker": [0, 1]}.get(name, list(range(world_size)))
    for rank, (_, divergence) in enumerate(by_rank):
        if rank not in group:
            assert divergence is None
            continue
        assert divergence.parameter == flipped_name
        assert divergence.num_differing == 1
        assert divergence.ranks == ((1,) if len(group) > 2 else tuple(group))


def compare_shards(world, mode, settings):
    config = Config(model="m", dataset="d", parallel={"mode": mode, **settings})
    strategy = make_strategy(mode, config, world)
    torch.manual_seed(world.rank)
    strategy.setup(Net())
    strategy.setup_optimizer(
        lambda named: torch.optim.AdamW([param for _, param in named], lr=1e-2)
    )
    return compare(strategy)


@pytest.mark.parametrize(
    ("mode", "settings"), [("zero3", {}), ("zero2", {}), ("deepspeed", {"deepspeed_stage": 3})]
)
def test_unreplicated_shards_are_not_compared(mode, settings):
    assert run_ranks(compare_shards, 2, mode, settings) == [None, None]

"""`ddp`: gradients are the sum over ranks, whatever the buckets; state goes out and comes back bit
for bit."""

import pytest
import torch
from ranks import run_ranks
from states import assemble, copied
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.parallel.ddp.strategy import DDPStrategy
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import load_state, memory_bytes, state_shards


class Net(nn.Module):
    """A weight used twice, a frozen layer, a layer that only rank 0's batches reach, and running
    statistics."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.rare = nn.Linear(7, 7)
        self.never = nn.Linear(3, 3)
        self.out = nn.Linear(7, 1)

    def forward(self, x, rare):
        x = self.inner(torch.tanh(self.inner(x)))
        x = self.norm(self.frozen(x))
        return self.out(self.rare(x) if rare else x)


def make(world, cap_mb=25.0, optimizer=torch.optim.AdamW):
    torch.manual_seed(world.rank)  # different weights on purpose: rank 0's must win
    config = Config(model="m", dataset="d", parallel={"bucket_cap_mb": cap_mb})
    strategy = DDPStrategy(config, world)
    model = strategy.setup(Net())
    made = strategy.setup_optimizer(
        lambda named: optimizer([parameter for _, parameter in named], lr=1e-2)
    )
    return strategy, model, made


def batch(rank, micro, step):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(5, 7, generator=generator)


def gradients(world, cap_mb):
    strategy, model, _ = make(world, cap_mb)
    model.eval()
    strategy.forward_backward(
        lambda micro, module: module(batch(world.rank, micro, 0), world.rank == 0).square().sum(), 2
    )
    grads = {name: parameter.grad.clone() for name, parameter in strategy.trained.items()}
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return grads, weights, strategy.clip_grad_norm(0.0), len(strategy.buckets.buckets)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("cap_mb", [25.0, 0.00001])
def test_gradient_is_the_sum_over_ranks_and_micro_batches(world_size, cap_mb):
    results = run_ranks(gradients, world_size, cap_mb)
    torch.manual_seed(0)
    alone = Net()
    alone.eval()
    for rank in range(world_size):
        for micro in range(2):
            alone(batch(rank, micro, 0), rank == 0).square().sum().backward()
    expected = {
        name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for name, parameter in alone.named_parameters()
    }
    for grads, weights, norm, buckets in results:
        assert "frozen.weight" not in grads
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-5)
        for name, weight in alone.named_parameters():
            assert torch.equal(weights[name], weight)
        total = torch.stack([grads[name].norm() for name in grads]).norm()
        torch.testing.assert_close(norm, total, rtol=1e-5, atol=1e-6)
        assert buckets == (1 if cap_mb > 1 else len(grads))


def train_some(world, steps, state=None, first=0):
    strategy, model, optimizer = make(world, cap_mb=0.0002)
    if state is not None:
        load_state(strategy, state)
    for step in range(first, first + steps):
        strategy.forward_backward(
            lambda micro, module, step=step: (
                module(batch(world.rank, micro, step), step % 2 == 0).square().mean()
            ),
            2,
        )
        strategy.clip_grad_norm(0.5)
        optimizer.step()
    statistics = model.norm.running_mean.clone()
    world.barrier()
    return copied(state_shards(strategy)), statistics


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 3])
def test_going_on_from_the_state_is_bitwise_equal(world_size):
    unbroken = run_ranks(train_some, world_size, 6)
    half = run_ranks(train_some, world_size, 3)
    resumed = run_ranks(train_some, world_size, 3, assemble([parts for parts, _ in half]), 3)
    ours, theirs = (assemble([parts for parts, _ in ranks]).full for ranks in (unbroken, resumed))
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert all(not parts for parts, _ in unbroken[1:])  # the first rank writes it all
    for _, statistics in unbroken[1:]:
        # running statistics are the same on every rank
        assert torch.equal(statistics, unbroken[0][1])


def test_state_names():
    names = set(assemble([run_ranks(train_some, 1, 1)[0][0]]).full)
    assert {
        "model/inner.weight",
        "optimizer/inner.weight/exp_avg",
        "buffer/norm.running_mean",
    } <= names
    assert not any(name.startswith("model/frozen") for name in names)


def test_state_bytes_and_traffic_are_what_the_cost_says():
    strategy, model, optimizer = make(Communicator(RankEnv(), torch.device("cpu")))
    shape = outline(model, strategy.config)
    strategy.forward_backward(lambda micro, module: module(batch(0, 0, 0), True).sum(), 1)
    optimizer.step()
    cost = estimate_cost("ddp", shape, ParallelDims(data=4), Workload(), strategy.config)
    elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert cost.gradients == 4 * elements
    assert cost.optimizer == 8 * elements
    assert cost.traffic_per_step == all_reduce_bytes(4 * elements, 4) == round(1.5 * 4 * elements)
    assert (
        estimate_cost("single", shape, ParallelDims(), Workload(), strategy.config).traffic_per_step
        == 0
    )
    # buckets align each gradient to 64 bytes; Adam keeps a step count a parameter
    padding = 64 * len(shape.trained)
    assert cost.state <= memory_bytes(strategy) <= cost.state + padding + 4 * len(shape.trained)


def uneven(world):
    strategy, _, _ = make(world, cap_mb=0.0001)
    for step in range(3):
        strategy.forward_backward(
            lambda micro, module, step=step: module(
                batch(world.rank, 0, step), world.rank == 1
            ).sum(),
            1,
        )
    return [flat.clone() for flat in strategy.buckets.flats]


def test_one_order_of_collectives_whatever_order_gradients_come_in():
    # Rank 0 never reaches `rare`, rank 1 does: were buckets sent as they fill, the ranks would
    # issue different collectives.
    left, right = run_ranks(uneven, 2)
    for value, other in zip(left, right, strict=True):
        assert torch.equal(value, other)

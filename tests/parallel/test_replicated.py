"""`ddp`: gradients are summed over ranks for any bucket size, and resuming is exact to the bit."""

import pytest
import torch
from ranks import run_ranks
from states import assemble, copy_shards
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import load_state, memory_bytes
from paceline.strategies.ddp.strategy import DDPStrategy


class Net(nn.Module):
    """A model with a weight that is used twice, a frozen layer, a layer that only batches of rank 0
    reach, and running statistics."""

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


def make_strategy(world, cap_mb=25.0, optimizer=torch.optim.AdamW):
    torch.manual_seed(world.rank)  # `setup` must replace these weights by those of rank 0
    config = Config(model="m", dataset="d", parallel={"bucket_cap_mb": cap_mb})
    strategy = DDPStrategy(config, world)
    model = strategy.setup(Net())
    optimizer_of_run = strategy.setup_optimizer(
        lambda named: optimizer([parameter for _, parameter in named], lr=1e-2)
    )
    return strategy, model, optimizer_of_run


def make_batch(rank, micro, step):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(5, 7, generator=generator)


def compute_gradients(world, cap_mb):
    strategy, model, _ = make_strategy(world, cap_mb)
    model.eval()
    strategy.forward_backward(
        lambda micro, module: (
            module(make_batch(world.rank, micro, 0), world.rank == 0).square().sum()
        ),
        2,
    )
    grads = {name: parameter.grad.clone() for name, parameter in strategy.trained.items()}
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return grads, weights, strategy.clip_grad_norm(0.0), len(strategy.buckets.buckets)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("cap_mb", [25.0, 0.00001])
def test_gradient_is_summed_over_ranks_and_micro_batches(world_size, cap_mb):
    results = run_ranks(compute_gradients, world_size, cap_mb)
    torch.manual_seed(0)
    single_rank_net = Net()
    single_rank_net.eval()
    for rank in range(world_size):
        for micro in range(2):
            single_rank_net(make_batch(rank, micro, 0), rank == 0).square().sum().backward()
    expected = {
        name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for name, parameter in single_rank_net.named_parameters()
    }
    for grads, weights, norm, buckets in results:
        assert "frozen.weight" not in grads
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-5)
        for name, weight in single_rank_net.named_parameters():
            assert torch.equal(weights[name], weight)
        total = torch.stack([grads[name].norm() for name in grads]).norm()
        torch.testing.assert_close(norm, total, rtol=1e-5, atol=1e-6)
        assert buckets == (1 if cap_mb > 1 else len(grads))


def train_steps(world, steps, state=None, first_step=0):
    strategy, model, optimizer = make_strategy(world, cap_mb=0.0002)
    if state is not None:
        load_state(strategy, state)
    for step in range(first_step, first_step + steps):
        strategy.forward_backward(
            lambda micro, module, step=step: (
                module(make_batch(world.rank, micro, step), step % 2 == 0).square().mean()
            ),
            2,
        )
        strategy.clip_grad_norm(0.5)
        optimizer.step()
    statistics = model.norm.running_mean.clone()
    world.barrier()
    return copy_shards(strategy.state_shards()), statistics


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 3])
def test_resume_is_bitwise_exact(world_size):
    uninterrupted = run_ranks(train_steps, world_size, 6)
    interrupted = run_ranks(train_steps, world_size, 3)
    resumed = run_ranks(
        train_steps, world_size, 3, assemble([shards for shards, _ in interrupted]), 3
    )
    ours, theirs = (
        assemble([shards for shards, _ in ranks]).full for ranks in (uninterrupted, resumed)
    )
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert all(not shards for shards, _ in uninterrupted[1:])  # rank 0 writes the full state
    for _, statistics in uninterrupted[1:]:
        # running statistics are equal on all ranks
        assert torch.equal(statistics, uninterrupted[0][1])


def test_names_of_state_tensors():
    names = set(assemble([run_ranks(train_steps, 1, 1)[0][0]]).full)
    assert {
        "model/inner.weight",
        "optimizer/inner.weight/exp_avg",
        "buffer/norm.running_mean",
    } <= names
    assert not any(name.startswith("model/frozen") for name in names)


def test_state_and_traffic_match_the_cost_model():
    strategy, model, optimizer = make_strategy(Communicator(RankEnv(), torch.device("cpu")))
    shape = outline(model, strategy.config)
    strategy.forward_backward(lambda micro, module: module(make_batch(0, 0, 0), True).sum(), 1)
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
    # buckets align each gradient to 64 bytes, and Adam has a step count for each parameter
    padding = 64 * len(shape.trained)
    assert cost.state <= memory_bytes(strategy) <= cost.state + padding + 4 * len(shape.trained)


def train_unevenly(world):
    strategy, _, _ = make_strategy(world, cap_mb=0.0001)
    for step in range(3):
        strategy.forward_backward(
            lambda micro, module, step=step: module(
                make_batch(world.rank, 0, step), world.rank == 1
            ).sum(),
            1,
        )
    return [flat.clone() for flat in strategy.buckets.flats]


def test_order_of_collectives_is_independent_of_gradient_order():
    # Only rank 1 uses `rare`. If buckets were sent as soon as they are full, the ranks would issue
    # different collectives.
    first_rank, second_rank = run_ranks(train_unevenly, 2)
    for value, other in zip(first_rank, second_rank, strict=True):
        assert torch.equal(value, other)

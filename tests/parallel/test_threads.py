"""`dp`: the losses of `single`, one process, replicas that share nothing, and the traffic it
declares."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.parallel.ddp.strategy import SingleDeviceStrategy
from paceline.parallel.ddp.threads import ThreadedDPStrategy
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import memory_bytes, state_shards


class Tied(nn.Module):
    """A tied weight, a layer used twice, a frozen layer, one without gradient, running statistics
    and a counter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.twice = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        hidden = self.norm(self.embed(x).mean(1))
        return self.head(self.frozen(self.twice(torch.tanh(self.twice(hidden)))))


def configured(num_gpus="auto", **train_args):
    return Config(
        model="m", dataset="d", parallel={"mode": "dp", "num_gpus": num_gpus}, train_args=train_args
    )


def train(strategy, steps, micro_batches, eval_norm):
    torch.manual_seed(0)
    model = strategy.setup(Tied())
    model.norm.train(not eval_norm)
    if eval_norm:
        model.eval()
    optimizer = strategy.setup_optimizer(
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)
    )
    losses = []
    for step in range(steps):
        seen = {}

        def micro_step(number, module, step=step, seen=seen):
            tokens = torch.randint(
                0, 20, (4, 5), generator=torch.Generator().manual_seed(100 * step + number)
            )
            loss = nn.functional.cross_entropy(module(tokens), tokens[:, 0], reduction="sum")
            seen[number] = loss.item()
            return loss / (4 * micro_batches)

        strategy.forward_backward(micro_step, micro_batches)
        strategy.clip_grad_norm(1.0)
        strategy.optimizer_step(lambda optimizer: bool(optimizer.step()) or True)
        losses.append(sum(seen[number] for number in sorted(seen)))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return losses, weights, optimizer


def trained_both_ways(world, num_devices, micro_batches):
    alone, weights, _ = train(
        SingleDeviceStrategy(configured(), world), 20, micro_batches, eval_norm=True
    )
    results = []
    for _ in range(2):
        strategy = ThreadedDPStrategy(configured(), world)
        strategy.num_devices = num_devices
        results.append(train(strategy, 20, micro_batches, eval_norm=True)[:2])
    return alone, weights, results


@pytest.mark.parametrize(("num_devices", "micro_batches"), [(2, 4), (3, 7)])
def test_losses_are_those_of_single_and_repeat_to_the_bit(num_devices, micro_batches):
    alone, weights, (first, again) = run_ranks(trained_both_ways, 1, num_devices, micro_batches)[0]
    assert alone[-1] < alone[0]
    torch.testing.assert_close(first[0], alone, rtol=1e-5, atol=0)
    for name, value in weights.items():
        torch.testing.assert_close(first[1][name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(first[1][name], again[1][name]), name
    assert first[0] == again[0]


def measured(world):
    strategy = ThreadedDPStrategy(configured(num_gpus=3), world)
    before = world.traffic.bytes_by_collective.get("copy", 0)
    train(strategy, 1, 3, eval_norm=False)
    copied = world.traffic.bytes_by_collective["copy"] - before
    cost = estimate_cost(
        strategy.name,
        outline(Tied(), strategy.config),
        ParallelDims(data=3),
        Workload(3),
        strategy.config,
    )
    model, *replicas = strategy.replicas
    storages = [
        {parameter.untyped_storage().data_ptr() for parameter in each.parameters()}
        for each in strategy.replicas
    ]
    shared = storages[0] & storages[1] | storages[1] & storages[2] | storages[0] & storages[2]
    tied = all(each.head.weight is each.embed.weight for each in strategy.replicas)
    statistics = model.norm.num_batches_tracked.item()
    names = sorted(part.name for part in state_shards(strategy))
    return (
        copied,
        cost,
        memory_bytes(strategy),
        len(replicas),
        shared,
        tied,
        statistics,
        names,
        strategy.notices,
    )


def test_cost_and_replicas():
    copied, cost, state_bytes, replicas, shared, tied, statistics, names, notices = run_ranks(
        measured, 1
    )[0]
    # A parameter without gradient moves no gradient: `never`, 12 elements, from two replicas.
    assert copied + 2 * 12 * 4 == cost.traffic["copy"] == cost.traffic_per_step
    assert state_bytes == pytest.approx(cost.state, rel=0.02)
    assert (replicas, shared, tied) == (2, set(), True)
    assert statistics == 1  # device 0 keeps its own running statistics, as DataParallel does
    assert "model/embed.weight" in names
    assert "model/head.weight" not in names
    assert "buffer/norm.running_mean" in names
    assert "optimizer/twice.weight/exp_avg" in names
    assert any("ddp" in text for _, text in notices)


class Broken(Exception):
    pass


def failing(world):
    strategy = ThreadedDPStrategy(configured(num_gpus=2), world)
    strategy.setup(Tied())
    ended = []

    def micro_step(number, module):
        if number == 0:
            raise Broken("the task fails")
        loss = module(torch.zeros(4, 5, dtype=torch.long)).sum()
        ended.append(number)
        return loss

    try:
        strategy.forward_backward(micro_step, 2)
    except Broken as error:
        return str(error), ended
    return None, ended


def test_an_error_in_a_thread_is_raised_when_all_have_ended():
    assert run_ranks(failing, 1)[0] == ("the task fails", [1])

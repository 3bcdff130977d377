"""`dp`: losses of `single`, independent replicas in one process, and the predicted traffic."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import memory_bytes
from paceline.strategies.data_parallel.strategy import ThreadedDPStrategy
from paceline.strategies.ddp.strategy import SingleDeviceStrategy


class Tied(nn.Module):
    """A model with a tied weight, a layer that is used twice, a frozen layer, one without gradient,
    running statistics and a counter."""

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


def make_config(num_gpus="auto", **train_args):
    return Config(
        model="m", dataset="d", parallel={"mode": "dp", "num_gpus": num_gpus}, train_args=train_args
    )


def train(strategy, steps, micro_batches, eval_mode):
    torch.manual_seed(0)
    model = strategy.setup(Tied())
    model.norm.train(not eval_mode)
    if eval_mode:
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


def train_in_both_modes(world, num_devices, micro_batches):
    single_losses, weights, _ = train(
        SingleDeviceStrategy(make_config(), world), 20, micro_batches, eval_mode=True
    )
    results = []
    for _ in range(2):
        strategy = ThreadedDPStrategy(make_config(), world)
        strategy.num_devices = num_devices
        results.append(train(strategy, 20, micro_batches, eval_mode=True)[:2])
    return single_losses, weights, results


@pytest.mark.parametrize(("num_devices", "micro_batches"), [(2, 4), (3, 7)])
def test_losses_match_single_and_are_reproducible(num_devices, micro_batches):
    single_losses, weights, (first, second) = run_ranks(
        train_in_both_modes, 1, num_devices, micro_batches
    )[0]
    assert single_losses[-1] < single_losses[0]
    torch.testing.assert_close(first[0], single_losses, rtol=1e-5, atol=0)
    for name, value in weights.items():
        torch.testing.assert_close(first[1][name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(first[1][name], second[1][name]), name
    assert first[0] == second[0]


def measure_cost(world):
    strategy = ThreadedDPStrategy(make_config(num_gpus=3), world)
    before = world.traffic.bytes_by_collective.get("copy", 0)
    train(strategy, 1, 3, eval_mode=False)
    copied_bytes = world.traffic.bytes_by_collective["copy"] - before
    cost = estimate_cost(
        strategy.name,
        outline(Tied(), strategy.config),
        ParallelDims(data=3),
        Workload(3),
        strategy.config,
    )
    model, *replicas = strategy.replicas
    storages = [
        {parameter.untyped_storage().data_ptr() for parameter in replica.parameters()}
        for replica in strategy.replicas
    ]
    shared = storages[0] & storages[1] | storages[1] & storages[2] | storages[0] & storages[2]
    tied = all(replica.head.weight is replica.embed.weight for replica in strategy.replicas)
    statistics = model.norm.num_batches_tracked.item()
    names = sorted(part.name for part in strategy.state_shards())
    return (
        copied_bytes,
        cost,
        memory_bytes(strategy),
        len(replicas),
        shared,
        tied,
        statistics,
        names,
        strategy.notices,
    )


def test_replicas_are_independent_and_cost_is_predicted():
    copied_bytes, cost, state_bytes, replicas, shared, tied, statistics, names, notices = run_ranks(
        measure_cost, 1
    )[0]
    # `never`, with 12 elements, has no gradient that two replicas would copy.
    assert copied_bytes + 2 * 12 * 4 == cost.traffic["copy"] == cost.traffic_per_step
    assert state_bytes == pytest.approx(cost.state, rel=0.02)
    assert (replicas, shared, tied) == (2, set(), True)
    assert statistics == 1  # the running statistics are those of device 0, as in DataParallel
    assert "model/embed.weight" in names
    assert "model/head.weight" not in names
    assert "buffer/norm.running_mean" in names
    assert "optimizer/twice.weight/exp_avg" in names
    assert any("ddp" in text for _, text in notices)


class TaskError(Exception):
    pass


def fail_in_thread(world):
    strategy = ThreadedDPStrategy(make_config(num_gpus=2), world)
    strategy.setup(Tied())
    finished = []

    def micro_step(number, module):
        if number == 0:
            raise TaskError("the task fails")
        loss = module(torch.zeros(4, 5, dtype=torch.long)).sum()
        finished.append(number)
        return loss

    try:
        strategy.forward_backward(micro_step, 2)
    except TaskError as error:
        return str(error), finished
    return None, finished


def test_error_in_a_thread_is_raised_after_all_have_finished():
    assert run_ranks(fail_in_thread, 1)[0] == ("the task fails", [1])

"""`parameter_server` with a table that exceeds the memory of one process."""

import pytest
import torch
from ranks import run_ranks
from server_config import make_config
from torch.nn import functional

from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.models.recommend import ClickModel
from paceline.observe.memory import split_state
from paceline.parallel.strategy import make_strategy
from paceline.train.optimizers.build import build_optimizer, matrices_of


def train_large_table(world, rows, dim, spare_bytes):
    """Train on a table that exceeds the memory of one process. Return whether it did, the losses,
    and the bytes of this rank's shard."""
    import resource

    with open("/proc/self/status") as handle:
        used_bytes = next(
            int(line.split()[1]) * 1024 for line in handle if line.startswith("VmData")
        )
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + spare_bytes, used_bytes + spare_bytes))
    try:
        torch.empty(rows, dim)
        exceeds_limit = False
    except RuntimeError:
        exceeds_limit = True
    world = Communicator(world.env, world.device, ParallelDims(data=1))
    config = make_config("parameter_server", "sgd", world.size - 1)
    strategy = make_strategy("parameter_server", config, world)
    torch.manual_seed(0)
    with strategy.model_init_context():
        model = ClickModel(0, (rows, 3), dim, [], [])
    matrices = matrices_of(model)
    strategy.setup(model)
    optimizer = strategy.setup_optimizer(
        lambda named: build_optimizer(config.train_args, 0.5, named, matrices)
    )
    ids = [torch.tensor([0, rows // 2, rows - 1]), torch.tensor([0, 1, 2])]
    losses = []
    for _ in range(3):

        def micro_step(number, module, losses=losses):
            logits = module(torch.zeros(3, 0), ids, [torch.arange(4), torch.arange(4)])
            loss = functional.binary_cross_entropy_with_logits(logits, torch.ones(3))
            losses.append(float(loss.detach()))
            return loss

        strategy.forward_backward(micro_step, 1 if strategy.has_data else 0)
        strategy.clip_grad_norm(0.0)
        strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
    table_bytes = sum(
        shard.tensor.nbytes
        for shard in strategy.state_shards()
        if shard.name == "model/tables.0.weight"
    )
    assert optimizer is strategy.optimizer
    world.barrier()
    strategy.close()
    return exceeds_limit, losses, table_bytes


@pytest.mark.parametrize(
    ("rows", "spare_bytes"),
    [(8_000_000, 400 << 20), pytest.param(24_000_000, 800 << 20, marks=pytest.mark.soak)],
)
def test_table_exceeds_memory_of_one_process(rows: int, spare_bytes: int) -> None:
    """The table has 0.5 GB (1.5 GB); each process may allocate 0.4 GB (0.8 GB) besides the memory
    that it uses at the start."""
    dim = 16
    results = run_ranks(train_large_table, 5, rows, dim, spare_bytes, timeout_s=400.0)
    assert all(exceeds_limit for exceeds_limit, _, _ in results)
    # in bytes: a quarter of the elements, four bytes each
    assert [table_bytes for _, _, table_bytes in results] == [0] + [rows * dim] * 4
    losses = results[0][1]
    assert losses[0] > losses[1] > losses[2]


def split_memory(world: Communicator) -> tuple[bool, dict[str, int], int]:
    """Train two steps with dense parameters on the servers. Return whether this rank is a server,
    its memory by kind, and the bytes of the dense parameters that it updates."""
    world = Communicator(world.env, world.device, ParallelDims(data=1))
    config = make_config("parameter_server", "adam", world.size - 1, dense="server")
    strategy = make_strategy("parameter_server", config, world)
    torch.manual_seed(0)
    with strategy.model_init_context():
        model = ClickModel(2, (8, 3), 4, [64], [64])
    matrices = matrices_of(model)
    strategy.setup(model)
    strategy.setup_optimizer(lambda named: build_optimizer(config.train_args, 0.5, named, matrices))
    ids = [torch.tensor([0, 4, 7]), torch.tensor([0, 1, 2])]

    def micro_step(number: int, module: torch.nn.Module) -> torch.Tensor:
        logits = module(torch.ones(3, 2), ids, [torch.arange(4), torch.arange(4)])
        return functional.binary_cross_entropy_with_logits(logits, torch.ones(3))

    for _ in range(2):
        strategy.forward_backward(micro_step, 1 if strategy.has_data else 0)
        strategy.clip_grad_norm(0.0)
        strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
    sizes = split_state(strategy, model, world.device)
    dense_bytes = sum(parameter.nbytes for parameter in strategy.trained.values())
    world.barrier()
    strategy.close()
    return not strategy.has_data, sizes, dense_bytes


def test_dense_moments_of_a_server_count_as_optimizer_state() -> None:
    results = run_ranks(split_memory, 2)
    [(_, sizes, dense_bytes)] = [result for result in results if result[0]]
    assert dense_bytes > 0
    # Adam's two moments of the dense parameters, and of a few rows.
    assert sizes["optimizer"] >= 2 * dense_bytes
    assert sizes["parameters"] < sizes["optimizer"]

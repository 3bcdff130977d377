"""`parameter_server` with a table that exceeds the memory of one process."""

import pytest
import torch
from ranks import run_ranks
from server_config import make_config
from torch.nn import functional

from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.models.recommend import ClickModel
from paceline.parallel.base import make_strategy
from paceline.parallel.protocols import has_data
from paceline.parallel.save_load import state_shards
from paceline.train.optimizer import build_optimizer, matrices_of


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

        strategy.forward_backward(micro_step, 1 if has_data(strategy) else 0)
        strategy.clip_grad_norm(0.0)
        strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
    table_bytes = sum(
        shard.tensor.nbytes
        for shard in state_shards(strategy)
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

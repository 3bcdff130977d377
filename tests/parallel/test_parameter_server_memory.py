"""`parameter_server` with a table that is too large for one process."""

import pytest
import torch
from ranks import run_ranks
from serving import make_config
from torch.nn import functional

from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.models.recommend import ClickModel
from paceline.parallel.base import make_strategy
from paceline.parallel.protocols import has_data
from paceline.parallel.save_load import state_shards
from paceline.train.optimizer import build_optimizer, matrices_of


def large(world, rows, dim, spare_bytes):
    """Train on a table that is too large for one process. Returns whether it was, the losses, and
    the bytes of this rank's part."""
    import resource

    with open("/proc/self/status") as handle:
        used = next(int(line.split()[1]) * 1024 for line in handle if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + spare_bytes, used + spare_bytes))
    try:
        torch.empty(rows, dim)
        out_of_reach = False
    except RuntimeError:
        out_of_reach = True
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
    return out_of_reach, losses, table_bytes


@pytest.mark.parametrize(
    ("rows", "spare_bytes"),
    [(8_000_000, 400 << 20), pytest.param(24_000_000, 800 << 20, marks=pytest.mark.soak)],
)
def test_a_table_larger_than_a_process_may_have(rows: int, spare_bytes: int) -> None:
    """0.5 GB (1.5 GB), on four servers with a limit of 0.4 GB (0.8 GB) more than at the start."""
    dim = 16
    results = run_ranks(large, 5, rows, dim, spare_bytes, timeout_s=400.0)
    assert all(out_of_reach for out_of_reach, _, _ in results)
    # bytes: a quarter of the elements, four bytes each
    assert [table_bytes for _, _, table_bytes in results] == [0] + [rows * dim] * 4
    losses = results[0][1]
    assert losses[0] > losses[1] > losses[2]

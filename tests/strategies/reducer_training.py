"""A training loop for the tests of compressed gradients and of Paceline's own all-reduce."""

import io

import torch
from states import MemorySource, copy_shards
from strategy_training import ROWS, VOCABULARY
from torch.nn import functional

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import load_state, memory_bytes
from paceline.parallel.strategy import make_strategy
from paceline.train.optimizers.build import build_optimizer, matrices_of


def serialize(sources):
    """Return sources by name as bytes. Tensors sent to a process directly would take a file
    descriptor each."""
    buffer = io.BytesIO()
    torch.save({name: source.full for name, source in sources.items()}, buffer)
    return buffer.getvalue()


def deserialize(serialized):
    return {
        name: MemorySource(tensors) for name, tensors in torch.load(io.BytesIO(serialized)).items()
    }


def train(
    world,
    net,
    steps,
    *,
    mode="ddp",
    axes=None,
    source=None,
    first_step=0,
    learning_rate=3e-3,
    parallel=None,
    compression=None,
    **args,
):
    """Train for ``steps`` steps from ``first_step`` on. The initial weights differ between ranks.

    Returns:
        Among others the losses of the global batch, the tensor shards and weights of this rank, the
        measured state in bytes, the estimated cost, and the bytes sent in the last step.
    """
    if axes is not None:
        world = Communicator(world.env, world.device, axes)
    config = Config(
        model="m",
        dataset="d",
        parallel={"mode": mode, "bucket_cap_mb": 0.004, **(parallel or {})},
        compression=compression or {},
        train_args={"weight_decay": 0.1, **args},
    )
    strategy = make_strategy(mode, config, world)
    torch.manual_seed(world.rank)
    built = net().eval()
    shape, matrices = outline(built, config), matrices_of(built)
    model = strategy.setup(built)
    strategy.setup_optimizer(
        lambda named: build_optimizer(config.train_args, learning_rate, named, matrices)
    )
    if source is not None:
        load_state(strategy, source)
    losses, norms, traffic = [], [], {}
    rows = ROWS // world.axes.replicas
    for step in range(first_step, first_step + steps):
        tokens = torch.randint(
            0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(step)
        )
        inputs = tokens[strategy.replica * rows : (strategy.replica + 1) * rows]
        seen = []

        def micro_step(number, module, inputs=inputs, seen=seen):
            loss = (
                functional.cross_entropy(
                    module(inputs), (inputs * 7 + 1) % VOCABULARY, reduction="sum"
                )
                / ROWS
            )
            seen.append(float(loss.detach()))
            return loss

        before = dict(world.traffic.bytes_by_collective)
        strategy.forward_backward(micro_step, 1)
        norms.append(float(strategy.clip_grad_norm(1.0)))
        assert strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
        traffic = {
            name: size - before.get(name, 0)
            for name, size in world.traffic.bytes_by_collective.items()
        }
        losses.append(world.sum(sum(seen) if strategy.reports_loss else 0.0)[0])
    result = {
        "losses": losses,
        "norms": norms,
        "shards": copy_shards(strategy.state_shards()),
        "weights": {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        },
        "state": memory_bytes(strategy),
        "cost": estimate_cost(strategy.name, shape, world.axes, Workload(), config),
        "traffic": {name: size for name, size in traffic.items() if size},
        "metrics": strategy.report_metrics(float(sum(traffic.values()))),
        "notices": strategy.notices,
    }
    world.barrier()
    return result

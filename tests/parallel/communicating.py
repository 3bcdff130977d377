"""Training with gradients summed otherwise than by the backend: shared by the tests of it."""

import io

import torch
from states import MemorySource, copied
from torch.nn import functional
from training import ROWS, VOCABULARY

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.models.shape.outline import outline
from paceline.parallel.base import make_strategy
from paceline.parallel.cost import Workload
from paceline.parallel.protocols import replica_of, report_metrics, reports_loss
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import load_state, memory_bytes, state_shards
from paceline.train.optimizer import build_optimizer, matrices_of


def packed(sources):
    """Sources by name as bytes: handed to a process as they are, each of their tensors would take a
    file descriptor."""
    buffer = io.BytesIO()
    torch.save({name: source.full for name, source in sources.items()}, buffer)
    return buffer.getvalue()


def unpacked(raw):
    return {name: MemorySource(tensors) for name, tensors in torch.load(io.BytesIO(raw)).items()}


def train(
    world,
    net,
    steps,
    *,
    mode="ddp",
    axes=None,
    source=None,
    first=0,
    rate=3e-3,
    parallel=None,
    compression=None,
    **args,
):
    """Train ``steps`` steps from step ``first`` on. Every rank starts from weights of its own.
    Returns losses (of the whole batch), norms, parts, weights, state bytes measured, cost, traffic
    of the last step, figures, notices."""
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
        lambda named: build_optimizer(config.train_args, rate, named, matrices)
    )
    if source is not None:
        load_state(strategy, source)
    losses, norms, traffic = [], [], {}
    rows = ROWS // world.axes.replicas
    for step in range(first, first + steps):
        tokens = torch.randint(
            0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(step)
        )
        inputs = tokens[replica_of(strategy)[0] * rows : (replica_of(strategy)[0] + 1) * rows]
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
        losses.append(world.sum(sum(seen) if reports_loss(strategy) else 0.0)[0])
    result = {
        "losses": losses,
        "norms": norms,
        "parts": copied(state_shards(strategy)),
        "weights": {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        },
        "state": memory_bytes(strategy),
        "cost": estimate_cost(strategy.name, shape, world.axes, Workload(), config),
        "traffic": {name: size for name, size in traffic.items() if size},
        "figures": report_metrics(strategy, float(sum(traffic.values()))),
        "notices": strategy.notices,
    }
    world.barrier()
    return result

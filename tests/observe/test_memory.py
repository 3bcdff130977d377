"""The measured memory by category matches the estimate of each strategy."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.models.shape.outline import outline
from paceline.observe.memory import split_state
from paceline.observe.metrics import peak_since, restart_peak
from paceline.parallel.cost import Workload
from paceline.parallel.registry import estimate_cost, layout
from paceline.parallel.save_load import memory_bytes
from paceline.parallel.strategy import make_strategy
from paceline.train.optimizers.build import build_optimizer, matrices_of

VOCAB_SIZE, ROWS = 24, 24


class SmallModel(nn.Sequential):
    """Wide enough that step counters and padding are negligible."""

    def __init__(self) -> None:
        super().__init__(
            nn.Embedding(VOCAB_SIZE, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, VOCAB_SIZE)
        )


def _measure_and_estimate(
    world: Communicator, mode: str, settings: dict[str, Any]
) -> tuple[dict[str, int], dict[str, int], int]:
    """Return the measured bytes, the estimated bytes and the strategy's total after two steps."""
    config = Config(model="m", dataset="d", **{"parallel": {"mode": mode}, **settings})
    world = Communicator(
        world.env,
        world.device,
        layout(config.parallel, world.size).axes,
        world.group,
        world.ranks,
        world.waits,
    )
    strategy = make_strategy(mode, config, world)
    model = SmallModel()
    shape, matrices = outline(model, config), matrices_of(model)
    model = strategy.setup(model)
    strategy.setup_optimizer(
        lambda named: build_optimizer(config.train_args, 1e-3, named, matrices)
    )
    batch = torch.arange(ROWS) % VOCAB_SIZE
    for _ in range(2):
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=config.train_args.precision == "bf16-mixed"
        ):
            strategy.forward_backward(
                lambda _, module: functional.cross_entropy(module(batch).float(), batch), 1
            )
        strategy.clip_grad_norm(1.0)
        strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
    cost = estimate_cost(strategy.name, shape, world.axes, Workload(positions=ROWS), config)
    sizes = split_state(strategy, model, world.device)
    world.barrier()
    return sizes, {kind: getattr(cost, kind) for kind in sizes}, memory_bytes(strategy)


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("ddp", {}),
        # error feedback counts as optimizer state
        ("ddp", {"compression": {"method": "powersgd", "rank": 2}}),
        ("zero1", {}),
        # float32 master weights count as parameters
        ("zero1", {"train_args": {"precision": "bf16-mixed"}}),
        ("zero2", {}),  # gathered weights count as parameters
        ("zero3", {}),
        ("diloco", {}),  # outer parameters count as optimizer state
    ],
)
def test_measured_memory_matches_estimate(mode: str, settings: dict[str, Any]) -> None:
    for measured, estimated, total_bytes in run_ranks(_measure_and_estimate, 2, mode, settings):
        assert sum(measured.values()) == total_bytes
        for kind, size in estimated.items():
            assert measured[kind] == pytest.approx(size, rel=0.05), (kind, measured, estimated)


def test_cpu_has_no_resettable_memory_peak() -> None:
    device = torch.device("cpu")
    restart_peak(device)
    assert peak_since(device) is None

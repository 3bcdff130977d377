"""A strategy from a user's file: the one in `examples/`."""

from pathlib import Path

import pytest
import torch

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.base import make_strategy
from paceline.parallel.registry import check_strategy, layout

MODE = f"{Path(__file__).parents[2] / 'examples' / 'my_strategy.py'}:SPEC"


def test_example_strategy_trains_a_step() -> None:
    config = Config(model="m", dataset="d", parallel={"mode": MODE})
    assert layout(config.parallel, 2).axes == ParallelDims(data=2)
    check_strategy(MODE, config, ParallelDims(data=2))
    strategy = make_strategy(MODE, config, Communicator(RankEnv(), torch.device("cpu")))
    assert strategy.name == "normalized"
    model = strategy.setup(torch.nn.Linear(3, 1, bias=False))
    before = model.weight.detach().clone()
    strategy.setup_optimizer(lambda named: torch.optim.SGD([param for _, param in named], lr=1.0))
    strategy.forward_backward(lambda _, module: module(torch.ones(1, 3)).sum() * 7, 1)
    assert strategy.clip_grad_norm(0.0).item() == pytest.approx(7 * 3**0.5)
    strategy.optimizer_step(lambda optimizer: optimizer.step() is None)
    assert (before - model.weight).norm().item() == pytest.approx(1.0, rel=1e-5)


def test_example_strategy_rejects_unsupported_settings() -> None:
    config = Config(
        model="m",
        dataset="d",
        parallel={"mode": MODE},
        train_args={"precision": "fp16-mixed"},
        compression={"method": "topk"},
    )
    with pytest.raises(ConfigError, match=r"is not supported with `parallel\.mode: normalized`"):
        check_strategy(MODE, config, ParallelDims(data=2))

"""A strategy from a user's file: the one in `examples/`."""

import sys
from pathlib import Path

import pytest
import torch
from commands import MICRO, run
from raised import raises_error

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.registry import check_strategy, layout
from paceline.parallel.strategy import make_strategy

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


INCOMPLETE = """
from paceline.parallel.spec import StrategySpec
from paceline.parallel.strategy import Strategy

class Incomplete(Strategy):
    def setup(self, model):
        return model

    def forward_backward(self, micro_step, num_micro_batches):
        pass

    def clip_grad_norm(self, max_norm):
        pass

    def memory_tensors(self):
        return []

class Other:
    pass

MISSING = StrategySpec(name="incomplete", implementation="incomplete:Incomplete")
OTHER = StrategySpec(name="other", implementation="incomplete:Other")
ABSENT = StrategySpec(name="absent", implementation="incomplete:Absent")
"""


@pytest.fixture
def incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "incomplete.py"
    file.write_text(INCOMPLETE)
    monkeypatch.delitem(sys.modules, "incomplete", raising=False)
    return file


def test_incomplete_class_is_refused_before_the_start(incomplete: Path) -> None:
    output = incomplete.parent / "out"
    settings = (
        f"parallel.mode={incomplete}:MISSING",
        "parallel.num_gpus=2",
        f"output_dir={output}",
    )
    for verb_args in ((), ("--dry-run",)):
        result = run(*MICRO, *settings, *verb_args, expect=2)
        assert "Incomplete does not define `tensor_shards`" in result.stderr
    assert not output.exists()


def test_class_that_is_no_strategy_is_refused(incomplete: Path) -> None:
    for spec in ("OTHER", "ABSENT"):
        mode = f"{incomplete}:{spec}"
        config = Config(model="m", dataset="d", parallel={"mode": mode})
        with raises_error(ConfigError, code="implementation-not-a-strategy"):
            check_strategy(mode, config, ParallelDims(data=2))


def test_example_strategy_rejects_unsupported_settings() -> None:
    config = Config(
        model="m",
        dataset="d",
        parallel={"mode": MODE},
        train_args={"precision": "fp16-mixed"},
        compression={"method": "topk"},
    )
    with raises_error(ConfigError, code="not-supported", naming="train_args.precision"):
        check_strategy(MODE, config, ParallelDims(data=2))

"""Evaluation over ranks gives the same loss as one process over the full dataset, even if the rows
do not divide evenly."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from paceline.config.schema import Config
from paceline.data.loader_process import LoaderOptions
from paceline.distributed.communicator import Communicator
from paceline.distributed.timing.progress import PROGRESS
from paceline.strategies.ddp.strategy import DDPStrategy
from paceline.tasks.base import Task
from paceline.train.evaluation import EvalResult, evaluate
from paceline.train.precision import Precision


class Rows(Dataset):  # type: ignore[type-arg]
    """Row i has 1 + i % 4 items, each with a target. If it has ``lengths``, the loader balances
    batches by length."""

    def __init__(self, num_rows: int, ragged: bool) -> None:
        self.num_rows = num_rows
        if ragged:
            import numpy as np

            self.lengths = np.array([1 + row % 4 for row in range(num_rows)])

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(row)
        x = torch.randn(1 + row % 4, 3, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, 2, (1 + row % 4,), generator=generator)


class TokenTask(Task):
    def collate(self, samples: Any) -> Any:
        return torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        assert not model.training
        assert not torch.is_grad_enabled()
        num_correct = (model(batch[0]).argmax(-1) == batch[1]).sum()
        return {"loss": self.loss(model, batch), "accuracy": num_correct}


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).double()


def evaluate_on_rank(
    world: Communicator, num_rows: int, ragged: bool, mode: str
) -> tuple[EvalResult, bool]:
    config = Config(
        model="m",
        dataset="d",
        evaluation={"mode": mode},
        train_args={"per_device_eval_batch_size": 2},
    )
    model = make_model().train()
    precision = Precision(config.train_args, world)
    options = LoaderOptions()
    strategy = DDPStrategy(config, world)
    strategy.setup(model)
    rows, task = Rows(num_rows, ragged), TokenTask(config)
    result = evaluate(task, model, strategy, rows, config, precision, options, PROGRESS)
    return result, model.training


def evaluate_full_dataset(num_rows: int) -> tuple[float, float, int]:
    """Evaluate all rows as one batch in one process, without Paceline."""
    rows = Rows(num_rows, False)
    x = torch.cat([rows[row][0] for row in range(num_rows)])
    y = torch.cat([rows[row][1] for row in range(num_rows)])
    model = make_model().eval()
    with torch.no_grad():
        logits = model(x)
    return (
        float(functional.cross_entropy(logits, y)),
        float((logits.argmax(-1) == y).double().mean()),
        len(y),
    )


@pytest.mark.parametrize("mode", ["distributed", "rank0"])
@pytest.mark.parametrize(
    ("world_size", "num_rows"),
    [
        (3, 13),
        *(
            pytest.param(*sizes, marks=pytest.mark.soak)
            for sizes in ((1, 7), (2, 7), (3, 7), (3, 1), (2, 12))
        ),
    ],
)
def test_result_matches_single_process(world_size: int, num_rows: int, mode: str) -> None:
    for ragged in (False, True):
        loss, accuracy, count = evaluate_full_dataset(num_rows)
        for result, was_training in run_ranks(evaluate_on_rank, world_size, num_rows, ragged, mode):
            assert result.count == count
            assert result.loss == pytest.approx(loss, rel=1e-12)
            assert result.metrics == {"accuracy": pytest.approx(accuracy, rel=1e-12)}
            assert was_training  # restored

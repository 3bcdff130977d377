"""The task that `paceline explain recovery` trains: a small regression, in which a rank can kill
its own process once."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.tasks.base import Task


class LostRankTask(Task):
    """A regression. With the task argument ``flag`` (a file), rank ``rank`` kills its process with
    SIGKILL in step ``step`` and writes the time to the file before, so that it does so once."""

    def build_datasets(self) -> tuple[TensorDataset, None]:
        x = torch.linspace(-3, 3, 400).unsqueeze(1)
        return TensorDataset(x, x.sin()), None

    def build_model(self) -> nn.Module:
        self._steps = 0
        return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        if model.training:
            self._steps += 1
            self._end_process()
        total: torch.Tensor = (model(x) - y).square().sum()
        return total

    def _end_process(self) -> None:
        args = self.config.task_args
        if "flag" not in args or self._steps != args["step"] or Path(str(args["flag"])).exists():
            return
        if os.environ.get("RANK") == str(args["rank"]):
            Path(str(args["flag"])).write_text(str(time.time()), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)

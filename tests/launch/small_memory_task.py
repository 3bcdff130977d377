"""A task that allocates more memory than any machine has if a micro-batch has more than 2 samples,
and notes the size of each micro-batch in `task_args.notes`."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class SmallMemoryTask(paceline.Task):
    def build_datasets(self):
        x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True).tanh()), None

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, model, batch):
        x, y = batch
        if x.device.type != "meta" and torch.is_grad_enabled():
            with Path(self.config.task_args["notes"]).open("a") as notes:
                notes.write(f"{len(x)}\n")
            if len(x) > 2:
                torch.empty(2**50, dtype=torch.uint8)
        return nn.functional.mse_loss(model(x), y, reduction="sum")

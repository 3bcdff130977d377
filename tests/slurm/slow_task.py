"""A tiny task with dropout whose steps take at least ``task_args.step_s`` seconds."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

#: Arguments of a run that trains it.
SLOW = (f"task={__file__}:Slow", "model=few-numbers", "dataset=of-the-task", "parallel.device=cpu")


class Slow(paceline.Task):
    def build_datasets(self):
        random = torch.Generator().manual_seed(0)
        x = torch.randn(240, 8, generator=random)
        return TensorDataset(x, x.sum(1, keepdim=True).tanh()), None

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))

    def loss(self, model, batch):
        time.sleep(self.config.task_args.get("step_s", 0.0))
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")

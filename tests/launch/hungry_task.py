"""A task whose loss needs more memory than any machine has, from the fifth micro-batch on."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class HungryTask(paceline.Task):
    num_calls = 0

    def build_datasets(self):
        x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True).tanh()), None

    def build_model(self):
        return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 1))

    def loss(self, model, batch):
        x, y = batch
        if x.device.type != "meta" and torch.is_grad_enabled():
            self.num_calls += 1
            if self.num_calls > 4:
                torch.empty(2**50, dtype=torch.uint8)
        return nn.functional.mse_loss(model(x), y, reduction="sum")

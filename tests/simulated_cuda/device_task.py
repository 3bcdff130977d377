"""A task with faults of which some occur only on devices.

``task_args``:

- ``cpu_targets``: compute the loss with targets that stay on the CPU.
- ``sleep_s``: rank 1 sleeps this long in its eighth call of the loss.
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class DeviceTask(paceline.Task):
    calls = 0

    def build_datasets(self):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True).tanh()), None

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, model, batch):
        x, y = batch
        args = self.config.task_args
        self.calls += 1
        if args.get("sleep_s") and self.calls == 8 and int(os.environ.get("RANK", 0)) == 1:
            time.sleep(float(args["sleep_s"]))
        if args.get("cpu_targets"):
            y = y.cpu()
        return nn.functional.mse_loss(model(x), y, reduction="sum")

"""A task that records which rank computed which sample, and can slow ranks down.

``task_args``:

- ``notes``: a folder; rank R appends the sample numbers of each micro-batch to ``R.txt``.
- ``slow``: {rank: seconds}, the delay added to each micro-batch on a rank.
"""

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

SAMPLES = 96


class RecordingTask(paceline.Task):
    def build_datasets(self):
        random = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, 8, generator=random)
        return TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True).tanh()), None

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))

    def loss(self, model, batch):
        numbers, x, y = batch
        if model.training:
            rank = torch.distributed.get_rank()
            time.sleep(self.config.task_args.get("slow", {}).get(str(rank), 0.0))
            folder = Path(self.config.task_args["notes"])
            folder.mkdir(exist_ok=True)
            with open(folder / f"{rank}.txt", "a") as notes:
                notes.write(" ".join(map(str, numbers.tolist())) + "\n")
        return nn.functional.mse_loss(model(x), y, reduction="sum")

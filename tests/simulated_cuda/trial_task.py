"""A task whose samples have 1 to 64 rows, and that runs out of memory above `task_args.max_rows`
rows in a micro-batch. It notes the rows of each micro-batch in `task_args.notes`."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

import paceline
from paceline.distributed.timing.progress import PROGRESS


class Ramp(torch.utils.data.Dataset):
    deterministic = True

    def __init__(self):
        self.lengths = np.arange(1, 65)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.ones(self.lengths[index], 8) / (1 + index)


class TrialTask(paceline.Task):
    def build_datasets(self):
        return Ramp(), None

    def build_model(self):
        has_norm = self.config.task_args.get("batch_norm", True)
        norm = nn.BatchNorm1d(32) if has_norm else nn.Tanh()
        return nn.Sequential(nn.Linear(8, 32), norm, nn.Linear(32, 1))

    def collate(self, samples):
        return {"rows": torch.cat(samples)}

    def loss(self, model, batch):
        rows, args = batch["rows"], self.config.task_args
        if PROGRESS.phase == "forward":  # not in the checks before the training
            with Path(args["notes"]).open("a") as notes:
                notes.write(f"{len(rows)}\n")
            if len(rows) > args.get("max_rows", 10**9):
                raise torch.OutOfMemoryError(f"out of memory: {len(rows)} rows")
        return model(rows).square().sum()

    def count(self, batch):
        return len(batch["rows"])

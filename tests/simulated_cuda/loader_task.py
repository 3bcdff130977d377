"""A task that notes for each micro-batch which process collates it: the rank, a process that was
forked from the rank or from the launcher's fork server, or another one. Its dataset holds a module
if `task_args.module` is set."""

import os
from pathlib import Path

import torch
from torch import nn

import paceline


class LoaderTask(paceline.Task):
    rank_pid = None

    def build_datasets(self):
        x = torch.linspace(-1, 1, 64).unsqueeze(1)
        rows = torch.utils.data.TensorDataset(x, x.sin())
        if self.config.task_args.get("module"):
            rows.module = nn.Linear(1, 1)
        return rows, rows

    def build_model(self):
        return nn.Linear(1, 1)

    def setup(self, model):
        self.rank_pid, self.server_pid = os.getpid(), os.getppid()
        return []

    def collate(self, samples):
        if self.rank_pid is not None:
            process = {os.getpid(): "rank", os.getppid(): "fork"}.get(self.rank_pid)
            if process is None:
                process = "server" if os.getppid() == self.server_pid else "other"
            with Path(self.config.task_args["notes"]).open("a") as notes:
                notes.write(f"{process}\n")
        return super().collate(samples)

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().sum()

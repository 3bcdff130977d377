"""A task that injects numerical errors and a crash.

``task_args``:

- ``bad``: sample numbers; the loss of a batch that contains one is multiplied by ``times``.
- ``flip``: {rank, call, name}: in call number ``call`` of the loss on that rank, a bit of the
  parameter ``name`` is flipped, once.
- ``die``: a sample number; the rank that processes it is killed by SIGKILL, once.
- ``flags``: the folder of the files that record which faults have been injected.
"""

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

SAMPLES = 240


class Faulty(paceline.Task):
    calls = 0

    def build_datasets(self):
        random = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, 8, generator=random)
        return TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True).tanh()), None

    def build_model(self):
        return nn.Sequential(
            nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def loss(self, model, batch):
        numbers, x, y = batch
        args = self.config.task_args
        self.calls += 1
        self._flip(model, args.get("flip"))
        if args.get("die") is not None and int(args["die"]) in numbers and self._once("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = nn.functional.mse_loss(model(x), y, reduction="sum")
        bad = torch.isin(
            numbers, torch.tensor(args.get("bad", []), dtype=torch.int64, device=numbers.device)
        )
        return loss * float(args.get("times", "nan")) if bool(bad.any()) else loss

    def _flip(self, model, flip):
        if (
            flip
            and int(os.environ.get("RANK", 0)) == flip["rank"]
            and self.calls == flip["call"]
            and self._once("flipped")
        ):
            with torch.no_grad():
                values = dict(model.named_parameters())[flip["name"]].data
                values.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)

    def _once(self, name):
        flag = Path(self.config.task_args["flags"]) / name
        if flag.exists():
            return False
        flag.touch()
        return True

"""A custom task with any torch module and dataset. Copy it, change the three methods, and run it:

paceline sft examples/my_task.yaml
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import paceline


class DampedWave(paceline.Task):
    """Learn y = exp(-x/4) sin(frequency × x) from noisy points.

    ``self.config`` is the whole config; your own settings are under ``task_args`` in the YAML file.
    """

    unit = "points"  # name of a sample in the report

    def build_datasets(self) -> tuple[Dataset, Dataset | None]:
        """Return the training data, and the validation data or None.

        Several processes call this method, so it must return the same rows each time.
        """
        args = self.config.task_args
        generator = torch.Generator().manual_seed(self.config.train_args.seed)
        x = 12 * torch.rand(int(args["num_points"]), 1, generator=generator)
        clean = torch.exp(-x / 4) * torch.sin(float(args["frequency"]) * x)
        y = clean + float(args["noise"]) * torch.randn(x.shape, generator=generator)
        held_out = len(x) // 10
        return TensorDataset(x[held_out:], y[held_out:]), TensorDataset(
            x[:held_out], clean[:held_out]
        )

    def build_model(self) -> nn.Module:
        """Return a module on the CPU. Paceline seeds it, moves it to the device, and parallelizes
        it."""
        hidden = int(self.config.task_args["hidden"])
        return nn.Sequential(
            nn.Linear(1, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, 1),
        )

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum over the batch, not the mean.

        Paceline divides it by the count over all ranks and micro-batches.
        """
        x, y = batch
        return functional.mse_loss(model(x), y, reduction="sum")

    def evaluate(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the sums for the validation by name, including ``loss``; optional."""
        x, y = batch
        error = model(x) - y
        return {"loss": error.square().sum(), "absolute_error": error.abs().sum()}

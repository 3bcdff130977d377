"""A task of your own: any torch module, any dataset. Copy it, change the three methods, run it:

paceline sft --config examples/my_task.yaml
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import paceline


class DampedWave(paceline.Task):
    """Learn y = exp(-x/4) sin(frequency × x) from noisy points.

    ``self.config`` is the whole config; settings of your own stand under ``task_args`` in the YAML.
    """

    unit = "points"  # what the report counts

    def build_datasets(self) -> tuple[Dataset, Dataset | None]:
        """(training data, validation data or None). Called in several processes: give the same rows
        each time."""
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
        """A plain module on the CPU. Paceline seeds it, moves it, and spreads it over the
        devices."""
        hidden = int(self.config.task_args["hidden"])
        return nn.Sequential(
            nn.Linear(1, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, 1),
        )

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """The SUM over the batch, never the mean: Paceline divides by the count over all ranks and
        micro-batches."""
        x, y = batch
        return functional.mse_loss(model(x), y, reduction="sum")

    def evaluate(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Optional: more sums for the validation, by name; ``loss`` must be among them."""
        x, y = batch
        wrong = model(x) - y
        return {"loss": wrong.square().sum(), "absolute_error": wrong.abs().sum()}

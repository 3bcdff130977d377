"""The small training that the explanations of strategies record: a stack of equal layers, AdamW,
and one batch per rank."""

import time
from importlib import import_module

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.launch.fork_server import OPTIMIZER_MODULE

# Torch imports it when an optimizer is created. Here it is imported once, before ranks are forked.
import_module(OPTIMIZER_MODULE)

LAYERS = 8
WIDTH = 512
ROWS = 128


def make_model() -> nn.Module:
    """Return a model with 1 MiB of weights per layer, equal on every rank."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def make_batch(number: int) -> torch.Tensor:
    """Return the inputs [ROWS, WIDTH] of rank (or device) ``number``."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 + number))


def make_config(mode: str, bucket_cap_mb: float = 25.0) -> Config:
    parallel = {"mode": mode, "device": "cpu", "bucket_cap_mb": bucket_cap_mb}
    return Config.model_validate({"model": "layers", "dataset": "noise", "parallel": parallel})


def build_adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3)


def loss_of(model: nn.Module, batch: torch.Tensor, replicas: int) -> torch.Tensor:
    """Return this replica's part of the mean loss over the global batch."""
    loss: torch.Tensor = model(batch).square().mean() / replicas
    return loss


class StepMarks:
    """The times of a rank's step, in order: ``forward`` and ``backward``, and those that are set.

    Attributes:
        times_s: times on the clock of ``time.perf_counter``.
    """

    def __init__(self, world: Communicator) -> None:
        self.times_s: dict[str, float] = {}
        self._batch, self._replicas = make_batch(world.rank), world.size

    def set(self, name: str) -> None:
        self.times_s[name] = time.perf_counter()

    def micro_step(self, _: int, module: nn.Module) -> torch.Tensor:
        self.set("forward")
        loss = loss_of(module, self._batch, self._replicas)
        self.set("backward")
        return loss


def apply_update(optimizer: torch.optim.Optimizer) -> bool:
    optimizer.step()
    return True


def has_reference_gradients(trained: dict[str, nn.Parameter], replicas: int) -> bool:
    """Return whether the gradients of the first step equal, up to rounding, the gradients of one
    process with all batches.

    Args:
        trained: parameters by name; a rank may have only some of the model's.
    """
    reference = make_model()
    for number in range(replicas):
        loss_of(reference, make_batch(number), replicas).backward()
    expected = dict(reference.named_parameters())
    return all(
        parameter.grad is not None
        and torch.allclose(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-7)  # type: ignore[arg-type]
        for name, parameter in trained.items()
    )

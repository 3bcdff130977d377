"""The contract of a strategy. What is orthogonal (precision, activation checkpointing, LoRA) is not its business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Parallel
from paceline.world.group import World

#: Loss of micro-batch number i, already divided by the global count and ready for backward.
MicroStep = Callable[[int], torch.Tensor]
BuildOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Cost:
    """What training state takes on the fullest rank, and what a rank sends in a step, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    traffic_per_step: int

    @property
    def state(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class ModelShape:
    """What a strategy's cost follows from.

    Args:
        parameter_bytes: all parameters and buffers, as stored.
        trainable: (number of elements, bytes an element) of each parameter that gets a gradient.
        optimizer_bytes_per_element: e.g. 8 for Adam's two float32 moments.
    """

    parameter_bytes: int
    trainable: Sequence[tuple[int, int]]
    optimizer_bytes_per_element: int


class Strategy(ABC):
    """How training is spread over the ranks of a world. The engine calls, in this order: ``place``, ``build_optimizer``,
    then for each step ``backward``, ``clip``; at any time between steps ``full_state``, ``load_full_state``."""

    name: str

    def __init__(self, settings: Parallel, world: World) -> None:
        self.settings = settings
        self.world = world

    @abstractmethod
    def place(self, model: nn.Module) -> nn.Module:
        """Put the model (on its device, the same on rank 0 as it shall be everywhere) to its ranks. Returns what to call."""

    @abstractmethod
    def build_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        """Make the optimizer over what this rank updates; ``build`` takes (name, parameter) pairs."""

    @abstractmethod
    def backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        """Run forward and backward over the micro-batches. Afterwards the gradient is the sum over micro-batches and ranks."""

    @abstractmethod
    def clip(self, max_norm: float) -> torch.Tensor:
        """Global gradient norm (a scalar tensor on the device); scales the gradients down to ``max_norm`` where that is > 0."""

    @abstractmethod
    def full_state(self) -> dict[str, torch.Tensor]:
        """Trained parameters as ``model/NAME``, buffers as ``buffer/NAME``, optimizer state as ``optimizer/NAME/KEY``: whole
        tensors on the CPU, on rank 0 (empty on the others). Names do not depend on the strategy."""

    @abstractmethod
    def load_full_state(self, state: dict[str, torch.Tensor]) -> None:
        """The reverse; ``state`` is looked at on rank 0 only."""

    @staticmethod
    @abstractmethod
    def cost(shape: ModelShape, world_size: int) -> Cost:
        """Bytes of training state on the fullest rank and bytes it sends in a step, with the formula's source."""

    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of training state that this rank holds now: the storages of parameters, buffers, gradients, optimizer."""


def storage_bytes(tensors: Sequence[Any]) -> int:
    """Bytes of the distinct storages behind the tensors."""
    seen: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            seen[(tensor.device, storage.data_ptr())] = storage.nbytes()
    return sum(seen.values())

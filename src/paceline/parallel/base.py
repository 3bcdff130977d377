"""The contract of a strategy. Precision, activation checkpointing and LoRA are not part of it. What
only some strategies do is in :mod:`paceline.parallel.protocols`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.parallel.capabilities import Capabilities
from paceline.parallel.loss_scale import LossScaler
from paceline.parallel.registry import get_spec, load_object
from paceline.parallel.state import StateReader, TensorShard, local_tensor, read_part

#: Returns the loss of micro-batch number i through a module, divided by the global count, so that
#: backward can follow.
MicroStep = Callable[[int, nn.Module], torch.Tensor]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
#: Runs the optimizer's step; returns False if it was skipped.
OptimizerStep = Callable[[torch.optim.Optimizer], bool]


class Strategy(Protocol):
    """How training is distributed over the ranks of a world. The trainer calls, in this order:
    ``setup``, ``setup_optimizer``; then for each step ``forward_backward``, ``clip_grad_norm``,
    ``optimizer_step``."""

    config: Config
    world: Communicator
    #: Number of devices of this process; more than 1 if a strategy uses several from threads.
    num_devices: int
    #: Notices of setup and loading, as (level, text).
    notices: list[tuple[str, str]]
    name: str
    #: Those of its spec; set by :func:`make_strategy`.
    capabilities: Capabilities = Capabilities()
    #: Rank 0 has the full model as the task built it, and can run and save it without the others.
    rank0_has_full_model: bool = True
    #: Groups of ranks have different weights between synchronizations (``local/…`` and ``outer/…``
    #: in a checkpoint).
    replicas_diverge: bool = False
    #: ``optimizer_step`` itself skips the update if the gradient is not finite.
    handles_overflow: bool = False
    #: Called in :meth:`forward_backward` after the last micro-batch, before waiting for other
    #: ranks. Set while speeds are measured.
    on_computed: Callable[[], None] | None = None
    #: The parameters that this rank updates, by name; :meth:`setup` sets it for the default
    #: :meth:`setup_optimizer`.
    trained: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    #: For float16 training, set after :meth:`setup_optimizer`. The loss in
    #: :meth:`forward_backward` is multiplied by its scale.
    scaler: LossScaler | None = None
    #: Runs a forward pass of the task over one sample; set before :meth:`setup` if the order of the
    #: model's modules matters.
    probe: Callable[[nn.Module], object] | None = None

    def __init__(self, config: Config, world: Communicator) -> None:
        self.config = config
        self.world = world
        self.num_devices = 1
        self.notices = []

    def setup(self, model: nn.Module) -> nn.Module:
        """Distribute the model over the ranks, with rank 0's values. Returns the module to call.

        Args:
            model: on the rank's device, with the same shapes on every rank.

        Raises:
            ConfigError: this model cannot be distributed in this way.
        """

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        """Build the optimizer of the parameters that this rank updates.

        Args:
            build: a function of (name, parameter) pairs, with names as in the task's model.
        """
        self.optimizer = build(list(self.trained.items()))
        return self.optimizer

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        """Run forward and backward over this replica's micro-batches. Afterwards the gradient is
        the sum over micro-batches and replicas."""

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to ``max_norm``, if that is > 0. Returns the norm of the full
        gradient before, a float32 scalar on the device, the same on every rank."""

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        """Run the optimizer's step with ``apply``, then update the weights of the next forward
        pass. Returns whether the update was made."""
        return apply(self.optimizer)

    def tensor_shards(self) -> Iterable[TensorShard]:
        """Return this rank's shards of the trained parameters and persistent buffers; of master
        weights, if there are any, the float32 ones."""

    def memory_tensors(self) -> Sequence[torch.Tensor]:
        """Return all tensors of training state on this rank at the point of a step with the most
        memory: parameters, buffers, gradients, optimizer state."""


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def full_shards(
    trained: Mapping[str, nn.Parameter], model: nn.Module, owned: bool = True
) -> Iterator[TensorShard]:
    """Yield the trained parameters and persistent buffers of a model that is not sharded."""
    for name, parameter in trained.items():
        yield TensorShard.full(name, parameter, key=parameter, owned=owned)
    for name, buffer in persistent_buffers(model).items():
        yield TensorShard.full(name, buffer, owned=owned)


def load_full(model: nn.Module, source: StateReader) -> None:
    """Load the trained parameters and persistent buffers of a state into an unsharded model."""
    with torch.no_grad():
        for shard in full_shards(trained_parameters(model), model):
            shard.tensor.copy_(read_part(source, shard.state_name, shard))


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are in the state dict, by name."""
    in_state = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in in_state}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors of an optimizer's state."""
    return [
        local_tensor(value)
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, torch.Tensor)
    ]


def make_strategy(mode: str, config: Config, world: Communicator) -> Strategy:
    """Return the strategy of this rank for a mode."""
    spec = get_spec(mode)
    implementation = spec.implementation if spec.select is None else spec.select(config)
    strategy: Strategy = load_object(implementation)(config, world, **spec.options)
    strategy.name, strategy.capabilities = spec.name, spec.capabilities
    return strategy

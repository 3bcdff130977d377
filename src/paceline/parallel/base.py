"""The interface of a parallelism strategy. Optional features that only some strategies implement
are in :mod:`paceline.parallel.protocols`. Precision, activation checkpointing and LoRA are not part
of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.models.adapters.quantize import scale_tensors
from paceline.parallel.capabilities import Capabilities
from paceline.parallel.loss_scale import LossScaler
from paceline.parallel.registry import get_spec, load_object
from paceline.parallel.state import (
    StateReader,
    TensorShard,
    local_tensor,
    plain_tensors,
    read_part,
)

#: Runs the forward pass of micro-batch number i through a module. Returns its loss divided by the
#: global count, ready for backward.
MicroStep = Callable[[int, nn.Module], torch.Tensor]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
#: Runs the optimizer's step; returns False if it was skipped.
OptimizerStep = Callable[[torch.optim.Optimizer], bool]


class Strategy(Protocol):
    """Distributes training over the ranks. The trainer calls, in this order, ``setup`` and
    ``setup_optimizer`` once, then ``forward_backward``, ``clip_grad_norm`` and ``optimizer_step``
    at each step."""

    config: Config
    world: Communicator
    #: Number of devices of this process. It is more than 1 if threads drive several devices.
    num_devices: int
    #: Notices of setup and loading, as (level, text).
    notices: list[tuple[str, str]]
    name: str
    #: Capabilities from the strategy's spec, set by :func:`make_strategy`.
    capabilities: Capabilities = Capabilities()
    #: Rank 0 has the full model as the task built it, and can run and save it without other ranks.
    rank0_has_full_model: bool = True
    #: Groups of ranks have different weights between synchronizations (``local/…`` and ``outer/…``
    #: in a checkpoint).
    replicas_diverge: bool = False
    #: ``optimizer_step`` itself skips the update if the gradient is not finite.
    handles_overflow: bool = False
    #: A micro-batch can be run without an update, and :meth:`discard_gradients` leaves no trace of
    #: it.
    runs_trials: bool = True
    #: Called in :meth:`forward_backward` after the last micro-batch, before waiting for other
    #: ranks. Set while the speed of each rank is measured.
    on_computed: Callable[[], None] | None = None
    #: The parameters that this rank updates, by name; :meth:`setup` sets it for the default
    #: :meth:`setup_optimizer`.
    trained: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    #: Loss scaler for float16 training, set after :meth:`setup_optimizer`. The loss in
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
        """Distribute rank 0's model over the ranks and return the module to call.

        Args:
            model: model on the rank's device, with the same shapes on every rank.

        Raises:
            ConfigError: if the strategy cannot distribute this model.
        """

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        """Build the optimizer of the parameters that this rank updates.

        Args:
            build: function that builds it from (name, parameter) pairs, with names as in the task's
                model.
        """
        self.optimizer = build(list(self.trained.items()))
        return self.optimizer

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        """Run forward and backward over this replica's micro-batches. Afterwards the gradient is
        the sum over micro-batches and replicas."""

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients to the total norm ``max_norm``, if it is positive. Return the norm of
        the full gradient before clipping: a float32 scalar on the device, equal on every rank."""

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        """Run the optimizer's step with ``apply``, then update the weights that the next forward
        pass reads. Return whether the update was made."""
        return apply(self.optimizer)

    def discard_gradients(self) -> None:
        """Drop the gradients of :meth:`forward_backward` without an update."""
        self.optimizer_step(lambda _: False)

    def tensor_shards(self) -> Iterable[TensorShard]:
        """Return this rank's shards of the trained parameters and persistent buffers. If there are
        float32 master weights, return these instead of the low-precision parameters."""

    def memory_tensors(self) -> Sequence[torch.Tensor]:
        """Return all tensors of training state (parameters, buffers, gradients and optimizer state)
        that this rank holds when the memory of a step peaks."""


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
    """Load the trained parameters and persistent buffers from a checkpoint into an unsharded
    model."""
    with torch.no_grad():
        for shard in full_shards(trained_parameters(model), model):
            shard.tensor.copy_(read_part(source, shard.state_name, shard))


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are in the state dict, by name."""
    in_state = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in in_state}


def all_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a model and the scales of its quantized weights."""
    return [*model.buffers(), *(scales for _, scales in scale_tensors(model))]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors of an optimizer's state."""
    return [
        local_tensor(tensor)
        for entries in optimizer.state.values()
        for name, value in entries.items()
        for _, tensor in plain_tensors(name, value)
        if isinstance(tensor, torch.Tensor)
    ]


def make_strategy(mode: str, config: Config, world: Communicator) -> Strategy:
    """Create the strategy for ``mode`` on this rank."""
    spec = get_spec(mode)
    implementation = spec.implementation if spec.select is None else spec.select(config)
    strategy: Strategy = load_object(implementation)(config, world, **spec.options)
    strategy.name, strategy.capabilities = spec.name, spec.capabilities
    return strategy

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

#: Loss of micro-batch number i through the module given, already divided by the global count and
#: ready for backward.
MicroStep = Callable[[int, nn.Module], torch.Tensor]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
#: Makes the optimizer's step; returns False where it was skipped.
OptimizerStep = Callable[[torch.optim.Optimizer], bool]


class Strategy(Protocol):
    """How training is spread over the ranks of a world. The trainer calls, in this order:
    ``setup``, ``setup_optimizer``; then for each step ``forward_backward``, ``clip_grad_norm``,
    ``optimizer_step``."""

    config: Config
    world: Communicator
    #: Devices of this process; more than one where a strategy works on several by threads.
    num_devices: int
    #: What came up while the model was placed or loaded, as (level, text).
    notices: list[tuple[str, str]]
    name: str
    #: As its spec says; set by :func:`make_strategy`.
    capabilities: Capabilities = Capabilities()
    #: Rank 0 holds the whole model as the task built it, can run it alone, and can save it as it
    #: is.
    rank0_has_full_model: bool = True
    #: Groups of ranks hold different weights between synchronizations (``local/…`` and ``outer/…``
    #: in a checkpoint).
    replicas_diverge: bool = False
    #: ``optimizer_step`` skips the update itself where the gradient is not finite.
    handles_overflow: bool = False
    #: Called in :meth:`forward_backward` after the last micro-batch, before waiting for other
    #: ranks. Set while speeds are measured.
    on_computed: Callable[[], None] | None = None
    optimizer: torch.optim.Optimizer
    #: Of float16 training, set after :meth:`setup_optimizer`; the loss that
    #: :meth:`forward_backward` gets is multiplied by its scale.
    scaler: LossScaler | None = None
    #: A forward of the task over one sample, set before :meth:`setup` where the order of the
    #: model's modules matters.
    probe: Callable[[nn.Module], object] | None = None

    def __init__(self, config: Config, world: Communicator) -> None:
        self.config = config
        self.world = world
        self.num_devices = 1
        self.notices = []

    def setup(self, model: nn.Module) -> nn.Module:
        """Put the model (on the rank's device, of the same shape everywhere, rank 0's values to be
        taken) to its ranks. Returns what to call.

        Raises:
            ConfigError: this model cannot be spread this way; says what would fit.
        """

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        """Make the optimizer over what this rank updates; ``build`` takes (name, parameter) pairs,
        names as in the model that the task built."""

    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        """Run forward and backward over this replica's micro-batches. Afterwards the gradient is
        the sum over micro-batches and replicas."""

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Norm of the whole gradient (a float32 scalar tensor on the device, the same on every
        rank); scales the gradients down to ``max_norm`` where that is > 0."""

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        """Make the optimizer's step by ``apply``, then bring the weights to where the next forward
        wants them. Returns whether the update was made."""

    def tensor_shards(self) -> Iterable[TensorShard]:
        """The trained parameters and persistent buffers, as this rank holds them. Where weights are
        kept twice (master weights), the float32 ones."""

    def memory_tensors(self) -> Sequence[torch.Tensor]:
        """All tensors of training state that this rank holds at the fullest moment of a step:
        parameters, buffers, gradients, optimizer state."""


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def whole_shards(
    trained: Mapping[str, nn.Parameter], model: nn.Module, owned: bool = True
) -> Iterator[TensorShard]:
    """What a rank holds of a model that is whole on it: trained parameters, persistent buffers."""
    for name, parameter in trained.items():
        yield TensorShard.whole(name, parameter, key=parameter, owned=owned)
    for name, buffer in persistent_buffers(model).items():
        yield TensorShard.whole(name, buffer, owned=owned)


def load_whole(model: nn.Module, source: StateReader) -> None:
    """Fill a whole model with the trained parameters and persistent buffers of a state."""
    with torch.no_grad():
        for shard in whole_shards(trained_parameters(model), model):
            shard.tensor.copy_(read_part(source, shard.state_name, shard))


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the state dict, by name."""
    in_state = model.state_dict().keys()
    return {name: one for name, one in model.named_buffers() if name in in_state}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of an optimizer's state."""
    return [
        local_tensor(value)
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, torch.Tensor)
    ]


def make_strategy(mode: str, config: Config, world: Communicator) -> Strategy:
    """The strategy of this rank."""
    spec = get_spec(mode)
    implementation = spec.implementation if spec.select is None else spec.select(config)
    strategy: Strategy = load_object(implementation)(config, world, **spec.options)
    strategy.name, strategy.capabilities = spec.name, spec.capabilities
    return strategy

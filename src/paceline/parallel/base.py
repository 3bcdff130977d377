"""The contract of a strategy. What is orthogonal (precision, activation checkpointing, LoRA) is not its business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.parallel.cost import Cost, ModelShape, Workload
from paceline.world.group import World
from paceline.world.mesh import Axes

#: Loss of micro-batch number i through the module given, already divided by the global count and ready for backward.
MicroStep = Callable[[int, nn.Module], torch.Tensor]
BuildOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Part:
    """A part of a named tensor, as this rank holds it.

    Args:
        name: of the parameter or buffer in the model as the task built it; in a state ``model/…``, ``optimizer/…/KEY``.
        tensor: this rank's values, live (writing to it changes the training). 1-D where ``flat``.
        shape: of the whole tensor.
        offset: where the part begins in the whole, one number a dimension; where ``flat``, one number into the whole's elements
            in row-major order.
        key: the parameter by which the optimizer knows it; None for what is not trained (buffers).
        owned: of all ranks that hold an element exactly one owns it; that rank writes it into checkpoints.
        flat: the part is a range of the flattened whole instead of a box.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    key: torch.Tensor | None = None
    owned: bool = True
    flat: bool = False

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor, key: torch.Tensor | None = None, owned: bool = True) -> Part:
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), key, owned)

    @property
    def is_whole(self) -> bool:
        return self.tensor.numel() == _numel(self.shape)

    @property
    def is_start(self) -> bool:
        """True where the part holds the first element: its rank speaks for what there is once a parameter."""
        return not any(self.offset) and (self.tensor.numel() > 0 or _numel(self.shape) == 0)


class StateSource(Protocol):
    """Where a state is read from: a checkpoint. Every rank reads the parts it holds, and no more."""

    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of each whole tensor, by name."""

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """A box of a tensor, on the CPU."""

    def read_flat(self, name: str, start: int, count: int) -> torch.Tensor:
        """``count`` elements from ``start`` on of the flattened tensor, on the CPU."""


class Strategy(ABC):
    """How training is spread over the ranks of a world. The engine calls, in this order: ``place``, ``build_optimizer``,
    perhaps ``load_state``; then for each step ``backward``, ``clip``, ``update``; between steps ``evaluate``, ``state``,
    ``state_bytes``."""

    name: str
    #: Rank 0 holds the whole model as the task built it, can run it alone, and can save it as it is.
    whole_on_first = True
    optimizer: torch.optim.Optimizer

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.settings = config.parallel
        self.world = world
        #: Devices of this process; more than one where a strategy works on several by threads.
        self.num_devices = 1
        #: Lines for a person that came up while the model was placed, as (level, text).
        self.notices: list[tuple[str, str]] = []

    @staticmethod
    def check(config: Config, axes: Axes) -> None:
        """Raise :class:`~paceline.core.errors.ConfigError` for a config that this strategy cannot run, before anything starts:
        what was asked for, why not, and the nearest that works."""

    @property
    def low_dtype(self) -> torch.dtype | None:
        """bfloat16 or float16 under mixed precision, else None."""
        args = self.config.train_args
        return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None

    @property
    def replica(self) -> int:
        """Which share of the global batch this rank works on, of ``world.axes.replicas``."""
        return self.world.axes.replica(self.world.rank)

    @property
    def speaks(self) -> bool:
        """True on the one rank of each replica whose losses and counts stand for the replica."""
        at = self.world.coordinates
        return at["tensor"] == 0 and at["pipeline"] == self.world.axes.pipeline - 1

    @abstractmethod
    def place(self, model: nn.Module) -> nn.Module:
        """Put the model (on the rank's device, of the same shape everywhere, rank 0's values to be taken) to its ranks. Returns
        what to call.

        Raises:
            ConfigError: this model cannot be spread this way; says what would fit.
        """

    @abstractmethod
    def build_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        """Make the optimizer over what this rank updates; ``build`` takes (name, parameter) pairs, names as in the model that
        the task built."""

    @abstractmethod
    def backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        """Run forward and backward over this replica's micro-batches. Afterwards the gradient is the sum over micro-batches and
        replicas."""

    @abstractmethod
    def clip(self, max_norm: float) -> torch.Tensor:
        """Norm of the whole gradient (a float32 scalar tensor on the device, the same on every rank); scales the gradients down
        to ``max_norm`` where that is > 0."""

    def update(self, apply: Callable[[torch.optim.Optimizer], bool]) -> bool:
        """Make the optimizer's step by ``apply``, which returns False where it was skipped; then bring the weights to where the
        next forward wants them."""
        return apply(self.optimizer)

    def evaluate(self, run: Callable[[nn.Module], dict[str, torch.Tensor]], model: nn.Module) -> dict[str, torch.Tensor] | None:
        """Run an evaluation batch of this replica: a collective within the replica. None on ranks that do not hold the result
        (:attr:`speaks` is true on the one that does)."""
        found = run(model)
        return found if self.speaks else None

    @abstractmethod
    def parts(self) -> Iterable[Part]:
        """The trained parameters and persistent buffers, as this rank holds them. Where weights are kept twice (master
        weights), the float32 ones."""

    @abstractmethod
    def held(self) -> list[Any]:
        """All tensors of training state that this rank holds at the fullest moment of a step: parameters, buffers, gradients,
        optimizer state."""

    @classmethod
    @abstractmethod
    def cost(cls, shape: ModelShape, axes: Axes, work: Workload, config: Config) -> Cost:
        """Bytes on the fullest rank and bytes that the busiest rank sends in a step, each with its formula's source."""

    # -- what follows from the above ----------------------------------------------------------------------------------------
    def state_bytes(self) -> int:
        """Bytes of training state that this rank holds at the fullest moment of a step: the distinct storages of
        :meth:`held`."""
        return storage_bytes(self.held())

    def state(self) -> list[Part]:
        """What this rank writes into a checkpoint: ``model/NAME``, ``buffer/NAME``, ``optimizer/NAME/KEY``, detached, live.
        Names, shapes and values of the whole do not depend on the strategy."""
        found = []
        for part in self.parts():
            if not part.owned:
                continue
            kind = "buffer" if part.key is None else "model"
            found.append(replace(part, name=f"{kind}/{part.name}", tensor=part.tensor.detach()))
            for entry, value in self._optimizer_state(part).items():
                name = f"optimizer/{part.name}/{entry}"
                if value.shape == part.tensor.shape and value.dim() > 0:
                    found.append(replace(part, name=name, tensor=value))
                # A number, or (factored moments) a tensor of a shape of its own.
                elif part.is_start if value.dim() == 0 else part.is_whole:
                    found.append(Part.whole(name, value))
        return found

    def _optimizer_state(self, part: Part) -> dict[str, torch.Tensor]:
        if part.key is None:
            return {}
        entries = self.optimizer.state.get(part.key, {})
        return {
            str(key): torch.as_tensor(local_tensor(value)).detach() for key, value in entries.items() if value is not None
        }

    def load_state(self, source: StateSource) -> None:
        """The reverse, on every rank."""
        known = source.tensors()
        entries: dict[str, list[str]] = {}
        for name in known:
            if name.startswith("optimizer/"):
                parameter, _, entry = name.removeprefix("optimizer/").rpartition("/")
                entries.setdefault(parameter, []).append(entry)
        with torch.no_grad():
            for part in self.parts():
                part.tensor.copy_(read_part(source, f"{'buffer' if part.key is None else 'model'}/{part.name}", part))
                if part.key is None:
                    continue
                for entry in entries.get(part.name, []):
                    value = self._read_entry(source, f"optimizer/{part.name}/{entry}", part, known)
                    self.optimizer.state.setdefault(part.key, {})[entry] = value
        self.after_load()

    def after_load(self) -> None:
        """Bring the weights to where the next forward wants them, after ``parts`` were written to."""

    def _read_entry(
        self, source: StateSource, name: str, part: Part, known: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> torch.Tensor:
        shape = known[name][1]
        if shape == () and (part.shape != () or name.endswith("/step")):
            # Scalars such as Adam's step stay where the optimizer makes them: beside the parameter where it is fused.
            beside = self.optimizer.defaults.get("fused") or self.optimizer.defaults.get("capturable")
            return source.read(name, (), ()).to(part.tensor.device if beside else "cpu")
        if shape != part.shape:
            return source.read(name, (0,) * len(shape), shape).to(part.tensor.device)
        return self.like_key(read_part(source, name, part).to(part.tensor.device), part)

    def like_key(self, value: torch.Tensor, part: Part) -> torch.Tensor:
        """Optimizer state in the form in which the optimizer wants it beside ``part.key``."""
        return value


def load_whole(model: nn.Module, source: StateSource) -> None:
    """Fill a whole model with the trained parameters and persistent buffers of a state."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    with torch.no_grad():
        for kind, tensors in (("model", trained), ("buffer", persistent_buffers(model))):
            for name, one in tensors.items():
                one.copy_(read_part(source, f"{kind}/{name}", Part.whole(name, one)))


def read_part(source: StateSource, name: str, part: Part) -> torch.Tensor:
    """The values of ``part`` from tensor ``name`` of a state, in the part's shape."""
    if part.flat:
        return source.read_flat(name, part.offset[0], part.tensor.numel()).view(part.tensor.shape)
    return source.read(name, part.offset, part.tensor.shape)


def local_tensor(value: Any) -> Any:
    """A DTensor's part on this rank; anything else as it is."""
    to_local = getattr(value, "to_local", None)
    return to_local() if callable(to_local) else value


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


def storage_bytes(tensors: Sequence[Any]) -> int:
    """Bytes of the distinct storages behind the tensors (of DTensors, of the local part)."""
    seen: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = local_tensor(tensor)
            if local.device.type == "meta":
                continue
            storage = local.untyped_storage()
            seen[(local.device, storage.data_ptr())] = storage.nbytes()
    return sum(seen.values())


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total

"""The contract of a strategy. What is orthogonal (precision, activation checkpointing, LoRA) is not
its business."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.parallel.capabilities import Capabilities
from paceline.parallel.comm_profile import CommProfile
from paceline.parallel.compression.checkpoint import dropped
from paceline.parallel.loss_scale import LossScaler
from paceline.parallel.state import StateReader, TensorShard, local_tensor, read_part, storage_bytes

#: Loss of micro-batch number i through the module given, already divided by the global count and
#: ready for backward.
MicroStep = Callable[[int, nn.Module], torch.Tensor]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Strategy(ABC):
    """How training is spread over the ranks of a world. The engine calls, in this order: ``setup``,
    ``setup_optimizer``, perhaps ``load_state``; then for each step ``forward_backward``,
    ``clip_grad_norm``, ``optimizer_step``; between steps ``evaluate``, ``state_shards``,
    ``memory_bytes``."""

    name: str
    #: As its spec says; set by :func:`~paceline.parallel.registry.make_strategy`.
    capabilities = Capabilities()
    #: Rank 0 holds the whole model as the task built it, can run it alone, and can save it as it
    #: is.
    rank0_has_full_model = True
    #: Groups of ranks hold weights of their own between synchronisations (``local/…`` and
    #: ``outer/…`` in a checkpoint).
    replicas_diverge = False
    handles_overflow = False  # in `optimizer_step`, where the gradient is not finite
    #: Called in :meth:`forward_backward` after the last micro-batch, before waiting for other
    #: ranks. Set while speeds are measured.
    on_computed: Callable[[], None] | None = None
    optimizer: torch.optim.Optimizer
    #: Of float16 training; the loss that :meth:`forward_backward` gets is multiplied by its scale.
    scaler: LossScaler | None = None
    #: A forward of the task over one sample, set before :meth:`setup` where the order of the
    #: model's modules matters.
    probe: Callable[[nn.Module], object] | None = None

    def __init__(self, config: Config, world: Communicator) -> None:
        self.config = config
        self.settings = config.parallel
        self.world = world
        #: Devices of this process; more than one where a strategy works on several by threads.
        self.num_devices = 1
        #: Lines for a person that came up while the model was placed, as (level, text).
        self.notices: list[tuple[str, str]] = []

    @property
    def low_dtype(self) -> torch.dtype | None:
        """bfloat16 or float16 under mixed precision, else None."""
        name = self.config.train_args.mixed_dtype
        return None if name is None else getattr(torch, name)

    @property
    def replica(self) -> int:
        """Which share of the global batch this rank works on, of ``world.axes.replicas``."""
        return self.world.axes.replica(self.world.rank)

    @property
    def num_replicas(self) -> int:
        """Shares that the global batch is cut into: ``world.axes.replicas``, less those that are
        lost."""
        return self.world.axes.replicas

    @property
    def has_data(self) -> bool:
        """False on a rank that has no share of the batch at all."""
        return True

    @property
    def reports_loss(self) -> bool:
        """True on the one rank of each replica whose losses and counts stand for the replica."""
        at = self.world.coordinates
        return at["tensor"] == 0 and at["pipeline"] == self.world.axes.pipeline - 1

    @property
    def count_group(self) -> Communicator:
        """The ranks whose count divides the loss of this step, times how often such groups go into
        the world: all of them, but for strategies whose replicas train on their own for a while."""
        return self.world

    @property
    def traffic_period(self) -> int:
        """Steps after which the traffic of a step repeats; what is sent in a step is measured as a
        mean over them."""
        return 1

    def sent_in_a_step(self, measured: int | None) -> int | None:
        """Bytes that this rank usually sends in a step, from what was measured within its steps."""
        return measured

    @property
    def max_count_lag(self) -> int:
        """With a :attr:`count_group` that is not all ranks: how many steps a rank may be ahead of
        the news from the others."""
        return 1

    @abstractmethod
    def setup(self, model: nn.Module) -> nn.Module:
        """Put the model (on the rank's device, of the same shape everywhere, rank 0's values to be
        taken) to its ranks. Returns what to call.

        Raises:
            ConfigError: this model cannot be spread this way; says what would fit.
        """

    @abstractmethod
    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        """Make the optimizer over what this rank updates; ``build`` takes (name, parameter) pairs,
        names as in the model that the task built."""

    @abstractmethod
    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        """Run forward and backward over this replica's micro-batches. Afterwards the gradient is
        the sum over micro-batches and replicas."""

    def use_scaler(self, scaler: LossScaler | None) -> None:
        """Take the loss scaler of float16 training; called once, after ``setup_optimizer``."""
        self.scaler = scaler

    def unscale(self) -> None:
        """Divide the gradients by the loss scale; called between :meth:`forward_backward` and
        :meth:`clip_grad_norm`."""
        if self.scaler is not None:
            parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
            self.scaler.unscale(
                local_tensor(one.grad) for one in parameters if one.grad is not None
            )

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Norm of the whole gradient (a float32 scalar tensor on the device, the same on every
        rank); scales the gradients down to ``max_norm`` where that is > 0."""

    def optimizer_step(self, apply: Callable[[torch.optim.Optimizer], bool]) -> bool:
        """Make the optimizer's step by ``apply``, which returns False where it was skipped; then
        bring the weights to where the next forward wants them."""
        return apply(self.optimizer)

    @property
    def needs_rollback_on_skip(self) -> bool:
        """True where a skipped update leaves more to put back than weights and optimizer, so that
        it must be known at once."""
        return False

    def local_grad_finite(self) -> torch.Tensor | None:
        """A float32 scalar that is not finite where this rank's own gradient of the last
        :meth:`forward_backward` was not, before it met that of the others. None where they meet
        within backward."""
        return None

    def evaluate(
        self, run: Callable[[nn.Module], dict[str, torch.Tensor]], model: nn.Module
    ) -> dict[str, torch.Tensor] | None:
        """Run an evaluation batch of this replica: a collective within the replica. None on ranks
        that do not hold the result (:attr:`reports_loss` is true on the one that does)."""
        found = run(model)
        return found if self.reports_loss else None

    @abstractmethod
    def tensor_shards(self) -> Iterable[TensorShard]:
        """The trained parameters and persistent buffers, as this rank holds them. Where weights are
        kept twice (master weights), the float32 ones."""

    @abstractmethod
    def memory_tensors(self) -> list[Any]:
        """All tensors of training state that this rank holds at the fullest moment of a step:
        parameters, buffers, gradients, optimizer state."""

    # -- what follows from the above
    # ----------------------------------------------------------------------------------------
    def memory_bytes(self) -> int:
        """Bytes of training state that this rank holds at the fullest moment of a step: the
        distinct storages of :meth:`memory_tensors`."""
        return storage_bytes(self.memory_tensors())

    def state_shards(self) -> list[TensorShard]:
        """What this rank writes into a checkpoint: ``model/NAME``, ``buffer/NAME``,
        ``optimizer/NAME/KEY``, detached, live. Names, shapes and values of the whole do not depend
        on the strategy."""
        found = []
        for part in self.tensor_shards():
            if not part.owned:
                continue
            kind = "buffer" if part.key is None else "model"
            found.append(replace(part, name=f"{kind}/{part.name}", tensor=part.tensor.detach()))
            for entry, value in self.optimizer_entries(part).items():
                name = f"optimizer/{part.name}/{entry}"
                if value.shape == part.tensor.shape and value.dim() > 0:
                    found.append(replace(part, name=name, tensor=value))
                # A number, or (factored moments) a tensor of a shape of its own.
                elif part.is_start if value.dim() == 0 else part.is_whole:
                    found.append(TensorShard.whole(name, value))
        return found + self.extra_state()

    def extra_state(self) -> list[TensorShard]:
        """What else of this rank's is needed to go on to the bit; names as they stand in the
        checkpoint."""
        return []

    def load_extra_state(self, source: StateReader) -> None:
        """The reverse, on every rank, after parameters and optimizer were read. What does not fit
        is dropped, with a notice."""
        self.notices += dropped(source)

    def report_metrics(self, sent_bytes: float | None) -> dict[str, Any]:
        """More keys of the report. A collective. ``sent_bytes``: measured, by the busiest rank in a
        step."""
        return {}

    @property
    def comm_profile(self) -> CommProfile | None:
        """How replicas come together, where that is by plain ddp or by what sends less in its
        place."""
        return None

    @property
    def replica_group(self) -> Communicator | None:
        """The ranks that hold, after this step, the same bits of :meth:`replicated_tensors`; None
        where no two do."""
        return None

    def replicated_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """By name, in one order on every rank of :attr:`replica_group`: parameters as this rank
        holds them, and what the optimizer keeps for them."""
        for part in self.tensor_shards():
            if part.key is not None:
                yield part.name, part.tensor
                yield from (
                    (f"{part.name}/{entry}", value)
                    for entry, value in self.optimizer_entries(part).items()
                )

    def optimizer_entries(self, part: TensorShard) -> dict[str, torch.Tensor]:
        if part.key is None:
            return {}
        entries = self.optimizer.state.get(part.key, {})
        values = {
            str(key): torch.as_tensor(local_tensor(value))
            for key, value in entries.items()
            if value is not None
        }
        return {key: part.of_key(value.detach()) for key, value in values.items()}

    def load_state(self, source: StateReader) -> None:
        """The reverse, on every rank."""
        known = source.tensors()
        entries: dict[str, list[str]] = {}
        for name in known:
            if name.startswith("optimizer/"):
                parameter, _, entry = name.removeprefix("optimizer/").rpartition("/")
                entries.setdefault(parameter, []).append(entry)
        with torch.no_grad():
            for part in self.tensor_shards():
                part.tensor.copy_(
                    read_part(
                        source, f"{'buffer' if part.key is None else 'model'}/{part.name}", part
                    )
                )
                if part.key is None:
                    continue
                for entry in entries.get(part.name, []):
                    value = self.load_optimizer_entry(
                        source, f"optimizer/{part.name}/{entry}", part, known
                    )
                    self._set_entry(part, entry, value)
            self.load_extra_state(source)
        self.after_load()

    def _set_entry(self, part: TensorShard, entry: str, value: torch.Tensor) -> None:
        entries = self.optimizer.state.setdefault(part.key, {})  # type: ignore[arg-type]
        if (
            part.region is None
            or part.key is None
            or value.shape != part.tensor.shape
            or value.dim() == 0
        ):
            entries[entry] = value
            return
        if entry not in entries or entries[entry].shape != part.key.shape:
            entries[entry] = torch.zeros(part.key.shape, dtype=value.dtype, device=value.device)
        entries[entry][part.region] = value

    def after_load(self) -> None:
        """Bring the weights to where the next forward wants them, after ``tensor_shards`` were
        written to."""

    def load_optimizer_entry(
        self,
        source: StateReader,
        name: str,
        part: TensorShard,
        known: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    ) -> torch.Tensor:
        shape = known[name][1]
        if shape == () and (part.shape != () or name.endswith("/step")):
            # Scalars such as Adam's step stay where the optimizer makes them: beside the parameter
            # where it is fused.
            beside = self.optimizer.defaults.get("fused") or self.optimizer.defaults.get(
                "capturable"
            )
            return source.read(name, (), ()).to(part.tensor.device if beside else "cpu")
        if shape != part.shape:
            return source.read(name, (0,) * len(shape), shape).to(part.tensor.device)
        return read_part(source, name, part).to(part.tensor.device)


def load_whole(model: nn.Module, source: StateReader) -> None:
    """Fill a whole model with the trained parameters and persistent buffers of a state."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    with torch.no_grad():
        for kind, tensors in (("model", trained), ("buffer", persistent_buffers(model))):
            for name, one in tensors.items():
                one.copy_(read_part(source, f"{kind}/{name}", TensorShard.whole(name, one)))


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

"""What a parallelism strategy is: how training is distributed over the ranks. Precision, activation
checkpointing and LoRA are not part of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.user_code import import_user_module
from paceline.distributed.communicator import Communicator
from paceline.models.weights.load import deferred_conversion
from paceline.parallel.capabilities import Capabilities
from paceline.parallel.comm_profile import CommProfile, RankLoss, StrategyMetrics
from paceline.parallel.gradients import sum_over_ranks
from paceline.parallel.loss_scale import LossScaler
from paceline.parallel.optimizer_state import (
    OF_PART,
    AveragesWeights,
    entries_of,
    optimizer_tensors,
    read_entry,
    stored_entries_of,
)
from paceline.parallel.registry import get_spec, load_object
from paceline.parallel.state import (
    StateReader,
    TensorShard,
    all_buffers,
    dropped_state_notices,
    local_tensor,
)

#: Runs the forward pass of micro-batch number i through a module. Returns its loss divided by the
#: global count, ready for backward.
MicroStep = Callable[[int, nn.Module], torch.Tensor]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
#: Runs the optimizer's step; returns False if it was skipped.
OptimizerStep = Callable[[torch.optim.Optimizer], bool]
#: Runs an evaluation batch through a module.
EvalFn = Callable[[nn.Module], dict[str, torch.Tensor]]
#: Kinds of training state in a rank's memory.
MemoryKind = Literal["parameters", "gradients", "optimizer"]


class Strategy(ABC):
    """Distributes training over the ranks. The trainer calls, in this order, :meth:`setup` and
    :meth:`setup_optimizer` once, then :meth:`forward_backward`, :meth:`clip_grad_norm` and
    :meth:`optimizer_step` at each step.

    A subclass implements five methods: :meth:`setup`, :meth:`forward_backward`,
    :meth:`clip_grad_norm`, :meth:`tensor_shards` and :meth:`memory_tensors`. The defaults of the
    others are for a strategy in which every rank has data and the full model.
    """

    config: Config
    world: Communicator
    #: Number of devices of this process. It is more than 1 if threads drive several devices.
    num_devices: int
    #: Devices that this process computes on.
    devices: list[torch.device]
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
    #: With ``cpu_offload: optimizer``, the strategy itself keeps the optimizer's state in host
    #: memory.
    keeps_state_on_host: bool = False
    #: False on a rank that has no share of the batch, such as a server.
    has_data: bool = True
    #: True on a rank that also sends outside of its steps, when other ranks ask for something.
    sends_between_steps: bool = False
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
    #: Maximum bytes of gradients within a step, if they are freed before the end of it.
    peak_gradient_bytes: int = 0

    def __init__(self, config: Config, world: Communicator) -> None:
        self.config = config
        self.world = world
        self.num_devices = 1
        self.devices = [world.device]
        self.notices = []

    # -- setup
    def model_init_context(self) -> AbstractContextManager[None]:
        """Return a context in which the task builds its model without using memory for tensors that
        do not fit on this rank."""
        # The weights are converted on the accelerator, to which they are copied one at a time.
        return nullcontext() if self.world.device.type == "cpu" else deferred_conversion()

    @abstractmethod
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

    def close(self) -> None:
        """Close all connections except the connections of the process group. A collective, called
        once at the end of a successful run."""

    def skip_warmup(self) -> None:
        """Continue as after the steps at the start that communicate differently from later ones.
        Called only by a simulation of a step."""

    # -- shares of the batch
    @property
    def replica(self) -> int:
        """Number of the share of the global batch that this rank processes."""
        return self.world.axes.replica(self.world.rank)

    @property
    def num_replicas(self) -> int:
        """Number of shares of the global batch."""
        return self.world.axes.replicas

    @property
    def reports_loss(self) -> bool:
        """True on the one rank of each replica that reports its counts."""
        return self.computes_loss and self.world.coordinates["context"] == 0

    @property
    def computes_loss(self) -> bool:
        """True on the ranks whose losses sum to the loss of their replica: one for each part."""
        place = self.world.coordinates
        return place["tensor"] == 0 and place["pipeline"] == self.world.axes.pipeline - 1

    @property
    def count_group(self) -> Communicator:
        """The group whose token count, times the number of groups, divides the loss of this step.
        It contains all ranks, unless groups of ranks make steps independently of each other."""
        return self.world

    @property
    def max_count_lag(self) -> int:
        """Maximum number of steps that a rank may be ahead of the counts of the other ranks, if
        ``count_group`` does not contain all ranks."""
        return 1

    @property
    def traffic_period(self) -> int:
        """Number of steps after which the traffic of a step repeats. Reports contain the mean
        traffic over these steps."""
        return 1

    def set_token_counts(self, local: float, total: Callable[[], torch.Tensor]) -> None:
        """Set the token count of this rank's share, and a function that returns the count that the
        loss is divided by. Called before each :meth:`forward_backward`; needed by a strategy that
        can continue without a rank whose share was lost."""

    def lost_since_last_step(self) -> list[RankLoss]:
        """Return the ranks lost since the last call, and update ``replica`` and ``num_replicas``.
        The result is the same on every rank at the same point of the same step."""
        return []

    # -- a step
    @abstractmethod
    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        """Run forward and backward over this replica's micro-batches. Afterwards the gradient is
        the sum over micro-batches and replicas. Most strategies call :meth:`accumulate`."""

    def accumulate(self, micro_step: MicroStep, model: nn.Module, num_micro_batches: int) -> None:
        """Run forward and backward of one micro-batch after the other."""
        self.begin_accumulation()
        for number in range(num_micro_batches):
            loss = micro_step(number, model)
            if number < num_micro_batches - 1:
                self.backward(loss)
            else:
                self.last_backward(loss)
        self.end_accumulation()

    def begin_accumulation(self) -> None:
        """Drop the gradients of the last step. Called before the first forward of a step."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch that is not the last one of the step."""
        loss.backward()

    def last_backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of the last micro-batch, and start to sum those that are ready over the
        replicas."""
        self.backward(loss)

    def end_accumulation(self) -> None:
        """Wait until the gradients are summed over the replicas."""

    def note_computed(self) -> None:
        """Call :attr:`on_computed`, if it is set."""
        if self.on_computed is not None:
            self.on_computed()

    @property
    def unscales(self) -> bool:
        """Whether the strategy divides the gradients by the loss scale itself."""
        return False

    def unscale_gradients(self) -> None:
        """Divide the gradients by the loss scale. Called between :meth:`forward_backward` and
        :meth:`clip_grad_norm`."""
        if self.scaler is None or self.unscales:
            return
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        self.scaler.unscale(local_tensor(each.grad) for each in parameters if each.grad is not None)

    def local_grad_finite(self) -> torch.Tensor | None:
        """Return a float32 scalar that is finite only if this rank's gradient in the last
        :meth:`forward_backward` was finite before it was summed. Return None if gradients are
        summed within backward."""
        return None

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients to the total norm ``max_norm``, if it is positive. Return the norm of
        the full gradient before clipping: a float32 scalar on the device, equal on every rank."""

    @property
    def needs_rollback_on_skip(self) -> bool:
        """Whether skipping an update must restore more than the weights and the optimizer. If so,
        every rank must know immediately whether the update is skipped."""
        return False

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        """Run the optimizer's step with ``apply``, then update the weights that the next forward
        pass reads. Return whether the update was made."""
        return apply(self.optimizer)

    def discard_gradients(self) -> None:
        """Drop the gradients of :meth:`forward_backward` without an update."""
        self.optimizer_step(lambda _: False)

    # -- evaluation
    def evaluate(self, run: EvalFn, model: nn.Module) -> dict[str, torch.Tensor] | None:
        """Run an evaluation batch of this replica. A collective of the replica's ranks. Return None
        on ranks without the result (:attr:`reports_loss` is true on the rank that has it)."""
        return self.reported(run(model))

    def reported(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Sum the results of an evaluation batch over the ranks that divide its tokens, which is a
        collective. Return None on ranks that do not report them."""
        if self.world.axes.context > 1 and self.computes_loss:
            sums = sum_over_ranks(sums, self.world.subgroup("context"))
        return sums if self.reports_loss else None

    @property
    def bytes_to_gather(self) -> int:
        """Bytes of the weights that :meth:`gathered` gathers; 0 if each rank holds all weights."""
        return 0

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which each rank holds all weights, so that forward passes without
        gradients are not collectives. Entering it is a collective."""
        return nullcontext()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Return a context in which the weights are the weights of the trained model, if the
        optimizer averages them. A collective for some strategies. After an exception, the weights
        that the optimizer updates are restored, but not what a strategy gathers from them: that is
        a collective, in which the other ranks may not take part."""
        optimizer = self.optimizer
        if not isinstance(optimizer, AveragesWeights):
            yield
            return
        try:
            optimizer.eval()
            self.after_load()
            yield
        finally:
            optimizer.train()
        self.after_load()

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Return a context in which the model has the weights that a checkpoint stores under
        ``model/``. They are used for evaluation, and for the saved model if rank 0 has the full
        model. A collective."""
        with self.averaged_weights():
            yield

    # -- state
    @abstractmethod
    def tensor_shards(self) -> Iterable[TensorShard]:
        """Return this rank's shards of the trained parameters and persistent buffers. If there are
        float32 master weights, return these instead of the low-precision parameters."""

    def state_shards(self) -> list[TensorShard]:
        """Return the shards that this rank writes into a checkpoint: ``model/NAME``,
        ``buffer/NAME``, ``optimizer/NAME/KEY`` and :meth:`extra_state`. The tensors are detached
        but live. A collective for some strategies."""
        shards = []
        for shard in self.tensor_shards():
            if not shard.owned:
                continue
            shards.append(replace(shard, name=shard.state_name, tensor=shard.tensor.detach()))
            for entry, value in self.stored_entries(shard).items():
                name = f"optimizer/{shard.name}/{entry}"
                if value.shape == shard.tensor.shape and value.dim() > 0:
                    shards.append(replace(shard, name=name, tensor=value))
                # A scalar, values of a part, or (factored moments) a tensor of another shape.
                elif OF_PART in entry or (shard.is_start if value.dim() == 0 else shard.is_full):
                    shards.append(TensorShard.full(name, value))
        return [*shards, *self.extra_state()]

    def extra_state(self) -> list[TensorShard]:
        """Return state of this rank other than parameters, buffers and the optimizer's state that a
        resumed run needs, under its names in the checkpoint."""
        return []

    def check_state(self, source: StateReader) -> None:
        """Raise ConfigError if this checkpoint cannot be loaded."""

    def load_extra_state(self, source: StateReader) -> list[tuple[str, str]]:
        """Load :meth:`extra_state` from a checkpoint, on every rank, after parameters and optimizer
        state were loaded. State that does not fit is dropped. Return notices as (level, text)."""
        return dropped_state_notices(source)

    def after_load(self) -> None:
        """Update the weights that the forward pass reads, if these are not the tensors of
        :meth:`tensor_shards`, which have changed."""

    def optimizer_entries(self, shard: TensorShard) -> dict[str, torch.Tensor]:
        """Return the optimizer state of a shard by key, such as ``exp_avg``."""
        return entries_of(self.optimizer, shard)

    def stored_entries(self, shard: TensorShard) -> dict[str, torch.Tensor]:
        """Return the optimizer state of a shard by key, as a checkpoint contains it."""
        return stored_entries_of(self.optimizer, shard)

    def load_optimizer_entry(
        self, source: StateReader, name: str, shape: tuple[int, ...], shard: TensorShard
    ) -> torch.Tensor:
        """Read the tensor ``name`` of ``shape`` for the optimizer state of a shard."""
        return read_entry(self.optimizer, source, name, shape, shard)

    # -- replicas
    @property
    def replica_group(self) -> Communicator | None:
        """The group of ranks whose :meth:`replicated_tensors` are bit-identical after this step, or
        None if no ranks hold the same tensors."""
        return None

    def replicated_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of this rank's parameters and their optimizer state, in the same
        order on every rank of ``replica_group``."""
        return ()

    # -- memory
    @abstractmethod
    def memory_tensors(self) -> Sequence[torch.Tensor]:
        """Return all tensors of training state (parameters, buffers, gradients and optimizer state)
        that this rank holds when the memory of a step peaks."""

    def memory_by_kind(self, model: nn.Module) -> dict[MemoryKind, list[torch.Tensor]]:
        """Return tensors by what they contain, to divide :meth:`memory_tensors` by kind. A tensor
        that is in none of them has :attr:`other_memory_kind`.

        Args:
            model: the model as :meth:`setup` returned it.
        """
        groups = self.optimizer.param_groups
        optimized = [each for group in groups for each in group.get("params", ())]
        parameters = [*model.parameters(), *optimized]
        return {
            "optimizer": optimizer_tensors(self.optimizer),
            "gradients": [each.grad for each in parameters if each.grad is not None],
            "parameters": [*all_buffers(model), *(each.data for each in model.parameters())],
        }

    @property
    def other_memory_kind(self) -> MemoryKind:
        """Kind of the tensors that are not weights, gradients or optimizer state, as the strategy's
        cost declares them: gathered and master weights are parameters; messages to be sent and the
        state of an outer optimizer belong to the optimizer."""
        return "optimizer" if self.replicas_diverge else "parameters"

    def exchanged_rows(self) -> tuple[float, float] | None:
        """Return :attr:`~paceline.parallel.cost.Workload.exchanged_rows` since the last call; None
        if ranks do not divide experts."""
        return None

    @property
    def transient_bytes(self) -> int:
        """Maximum bytes of tensors that are allocated only within a step, so that
        :meth:`memory_tensors` does not list them."""
        return 0

    # -- reports
    @property
    def comm_profile(self) -> CommProfile | None:
        """Description of how the gradients of replicas are summed, if it is known what is sent."""
        return None

    def report_metrics(self, sent_bytes: float | None) -> StrategyMetrics:
        """Return the strategy's sections of the report. A collective.

        Args:
            sent_bytes: bytes per step that the rank with the most traffic was measured to send.
        """
        return {}

    def sent_in_a_step(self, measured: int | None) -> int | None:
        """Return the mean bytes that this rank sends per step, given the bytes measured within its
        steps."""
        return measured


def make_strategy(mode: str, config: Config, world: Communicator) -> Strategy:
    """Create the strategy for ``mode`` on this rank."""
    spec = get_spec(mode)
    implementation = spec.implementation if spec.select is None else spec.select(config)
    strategy: Strategy = load_object(implementation)(config, world, **spec.options)
    strategy.name, strategy.capabilities = spec.name, spec.capabilities
    return strategy


def check_class(mode: str) -> None:
    """Raise ConfigError if the implementation of a user's strategy is not a strategy or lacks one
    of its methods.

    Args:
        mode: location of the spec, such as ``./file.py:SPEC``.
    """
    spec, setting = get_spec(mode), f"parallel.mode: {mode}"
    location, _, name = spec.implementation.partition(":")
    form = "a subclass of paceline.parallel.strategy.Strategy, as `module:NAME`"
    implementation = getattr(import_user_module(location, setting, form), name, None)
    if not (isinstance(implementation, type) and issubclass(implementation, Strategy)):
        raise ConfigError(
            "`{setting}`: the implementation `{implementation}` is not a strategy",
            code="implementation-not-a-strategy",
            allowed=form,
            fix="derive the class from Strategy, or from a strategy such as DDPStrategy",
            setting=setting,
            implementation=spec.implementation,
        )
    missing = sorted(implementation.__abstractmethods__)
    if missing:
        methods = ", ".join(f"`{method}`" for method in missing)
        raise ConfigError(
            "`{setting}`: {name} does not define {methods}",
            code="incomplete-strategy",
            allowed="a class with all of {abstractmethods}",
            fix="define {methods} in {name}",
            setting=setting,
            name=name,
            methods=methods,
            abstractmethods=", ".join(sorted(Strategy.__abstractmethods__)),
        )

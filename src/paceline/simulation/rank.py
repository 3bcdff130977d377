"""Simulate two training steps of one rank: Paceline's own strategy, optimizer, precision and loss,
on tensors without values."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.config.derive import derive
from paceline.config.schema import Config
from paceline.core.event_log import EventLog
from paceline.data.collate import TokenBatch, collate_packed, collate_padded, map_tensors
from paceline.data.context.batch import divide_batch
from paceline.data.text.token_dataset import TokenSample
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.torch_compat import without_fake_tensors
from paceline.health.anomalies import AnomalyDetector, UpdateDecision
from paceline.models.context.place import ContextPlace
from paceline.models.language import language_model_on_meta
from paceline.models.transforms.activation_offloading import reduce_activations
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.strategy import make_strategy
from paceline.planner.devices import find_device
from paceline.simulation.ledger import BACKWARD, FORWARD, SYNCHRONIZE, UPDATE, Ledger, LedgerWork
from paceline.simulation.records import (
    DEVICES_PER_HOST,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Kernels,
    Messages,
    RankJob,
    RankReport,
)
from paceline.simulation.torch_internals import (
    FakeStore,
    FakeTensorMode,
    allow_grouped_mm_of_all_dtypes,
    keep_single_kernels,
)
from paceline.tasks.language import LanguageTask
from paceline.train.components import distribute, quiet_libraries
from paceline.train.state import TrainComponents

T = TypeVar("T")

#: Micro-batches that are simulated without a pipeline: the first, one in the middle, and the last.
_MICRO_BATCHES = 3


class SimulatedCommunicator(Communicator):
    """The collectives of a rank whose group has no other processes: they return at once, and every
    rank has this rank's values."""

    has_peers = False

    def sum(self, *values: float) -> list[float]:
        return [value * self.size for value in values]

    def broadcast_object(self, value: T) -> T:
        return value

    def gather_objects(self, value: T) -> list[T]:
        return [value] * self.size

    def gather_numbers(self, value: float) -> list[float]:
        return [value] * self.size


def simulate_rank(job: RankJob) -> RankReport:
    """Build the model and the strategy of a rank, make two steps, and report the second one; the
    peak of memory is the peak of both.

    Raises:
        ConfigError: the strategy cannot distribute the model.
    """
    config = Config.model_validate(job.config)
    axes = ParallelDims(**job.axes)
    device, _ = find_device(job.device)
    ledger = Ledger(device, job.link_bytes_s)
    with _process_group(job.rank, axes) as world, FakeTensorMode(), ledger:
        components, batch = _build(job, config, world)
        rank = SimulatedRank(components, config, batch, ledger)
        rank.run()
        return rank.report(job.rank)


@contextmanager
def _process_group(rank: int, axes: ParallelDims) -> Iterator[Communicator]:
    """Be one rank of a process group whose other ranks do not exist."""
    local = min(axes.size, DEVICES_PER_HOST)
    env = RankEnv(rank, axes.size, rank % local, local)
    from_group = DeviceMesh.from_group

    def real_mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
        with without_fake_tensors():  # a mesh reads its small tensors
            return from_group(*args, **kwargs)

    # The kernels for fake tensors are independent of the build.
    torch.backends.cuda.is_flash_attention_available = lambda: True
    torch.accelerator.set_device_index(env.local_rank)
    dist.init_process_group("fake", rank=rank, world_size=axes.size, store=FakeStore())
    DeviceMesh.from_group = real_mesh  # type: ignore[method-assign]
    restore = [allow_grouped_mm_of_all_dtypes(), keep_single_kernels()]
    try:
        yield SimulatedCommunicator(env, torch.device("cuda", env.local_rank), axes)
    finally:
        for each in restore:
            each()
        DeviceMesh.from_group = from_group  # type: ignore[method-assign]
        dist.destroy_process_group()


def _build(job: RankJob, config: Config, world: Communicator) -> tuple[TrainComponents, TokenBatch]:
    quiet_libraries(config, "cpu")  # nothing may search for real devices
    task = LanguageTask(config)
    task.device_type, task.tensor_ranks = world.device.type, world.axes.tensor
    if world.axes.context > 1:
        task.place = ContextPlace(world.subgroup("context"))
    model: Any = language_model_on_meta(config, world.device)
    model.config.use_cache = False
    reduce_activations(model, config)
    strategy = make_strategy(job.strategy, config, world)
    task.setup(model)
    axes = world.axes
    derived = derive(
        config,
        world_size=axes.size,
        rows_per_epoch=lambda batch_size: 1 << 40,
        num_eval=0,
        default_learning_rate=task.default_learning_rate,
        replicas=axes.replicas,
    )
    components = distribute(task, model, strategy, config, derived)
    components.model.train()
    with without_fake_tensors():
        batch = _micro_batch(job.lengths, job.label_share, packed=task.packed)
        if task.place is not None:
            batch = divide_batch(batch, task.place.rank, task.place.size)
    to_device = partial(_fake_on, device=world.device)
    return components, map_tensors(batch, to_device)


def _fake_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _micro_batch(lengths: Sequence[int], label_share: float, packed: bool) -> TokenBatch:
    """Return a micro-batch of samples of these lengths whose last tokens have a loss."""
    import numpy as np

    samples = []
    for length in lengths:
        mask = np.zeros(length, dtype=bool)
        mask[length - round(length * label_share) :] = True
        samples.append(TokenSample(input_ids=np.ones(length, dtype=np.int64), labels_mask=mask))
    return collate_packed(samples) if packed else collate_padded(samples, 0)


class SimulatedRank:
    """A rank with everything that its steps need."""

    def __init__(
        self, components: TrainComponents, config: Config, batch: TokenBatch, ledger: Ledger
    ) -> None:
        self.components, self.strategy = components, components.strategy
        self.config, self.batch, self.ledger = config, batch, ledger
        args = config.train_args
        self.accumulation = args.gradient_accumulation_steps
        self.num_micro_batches = self.accumulation
        if self.strategy.world.axes.pipeline == 1:
            self.num_micro_batches = min(self.accumulation, _MICRO_BATCHES)
        self.anomalies = AnomalyDetector(
            config.recovery, self.strategy, components.precision.scaler, EventLog(None)
        )
        self.work = LedgerWork()  # of a step
        self._started: list[LedgerWork] = []  # before each micro-batch

    def run(self) -> None:
        """Make two steps: the first creates the optimizer's state. Between two synchronizations of
        independent workers, the other steps of the period only do what follows the update."""
        ledger, period = self.ledger, self.strategy.traffic_period
        self.strategy.skip_warmup()
        self._step(0)
        ledger.work.clear()
        for _ in range(1, period):
            with ledger.during(SYNCHRONIZE):
                self.strategy.optimizer_step(lambda _: False)
        self._started = []
        self._step(1)
        self.work = ledger.work[UPDATE].plus(self._computed())
        self.work = self.work.plus(ledger.work[SYNCHRONIZE], 1 / period)
        if self.num_micro_batches < self.accumulation:
            middle = self._started[2].plus(self._started[1], -1)
            self.work = self.work.plus(middle, self.accumulation - self.num_micro_batches)

    def _computed(self) -> LedgerWork:
        return self.ledger.work[FORWARD].plus(self.ledger.work[BACKWARD])

    def _step(self, number: int) -> None:
        """Make a step as :meth:`paceline.train.trainer.Trainer.step` does."""
        parts, strategy, ledger = self.components, self.strategy, self.ledger
        with ledger.during(FORWARD):
            strategy.forward_backward(self._micro_step, self.num_micro_batches)
        with ledger.during(UPDATE):
            self._name_state()
            strategy.unscale_gradients()
            norm = strategy.clip_grad_norm(self.config.train_args.max_grad_norm)
            parts.lr_schedule.set_step(number)
            decision = self.anomalies.decide(norm)
            strategy.optimizer_step(partial(self._update, decision))
        self._name_state()

    def _update(self, decision: UpdateDecision, optimizer: torch.optim.Optimizer) -> bool:
        if not decision.on_device:  # the host reads whether the norm is finite, which has no value
            decision = replace(decision, grad_norm=None)
        updated = self.components.precision.step(optimizer, decision)
        self.ledger.phase = SYNCHRONIZE
        return updated

    def _micro_step(self, number: int, model: torch.nn.Module) -> torch.Tensor:
        parts, ledger = self.components, self.ledger
        ledger.phase = FORWARD
        self._started.append(self._computed())
        with parts.precision.autocast():
            loss = parts.task.loss(model, self.batch)
        ledger.phase = BACKWARD
        return parts.precision.scale(loss / torch.ones((), device=loss.device))

    def _name_state(self) -> None:
        """Tell the ledger which tensors are the state of the training."""
        parts, ledger = self.components, self.ledger
        updated = [each for group in parts.optimizer.param_groups for each in group["params"]]
        parameters = [*parts.model.parameters(), *parts.model.buffers(), *updated]
        optimizer = optimizer_tensors(parts.optimizer)
        gradients = [each.grad for each in parameters if getattr(each, "grad", None) is not None]
        ledger.name(OPTIMIZER, self.strategy.memory_tensors())
        ledger.name(PARAMETERS, parameters)
        ledger.name(GRADIENTS, gradients)
        ledger.name(OPTIMIZER, optimizer)

    def report(self, rank: int) -> RankReport:
        """Return the report of the second step."""
        memory, work = self.ledger.peak(), self.work
        return RankReport(
            rank=rank,
            peak_memory_bytes=sum(size for size in memory.values() if isinstance(size, int)),
            memory_bytes=memory,
            messages=[
                Messages(collective=name, count=count, bytes=round(size))
                for name, (count, size) in sorted(work.messages.items())
            ],
            flops=round(work.flops),
            launches=round(sum(count for count, _ in work.kernels.values())),
            bytes_moved=round(sum(size for _, size in work.kernels.values())),
            kernels=[
                Kernels(phase=phase, operation=name, launches=count, bytes=round(size))
                for (phase, name), (count, size) in sorted(work.kernels.items())
            ],
            time_floor_s=max(work.compute_s, work.link_s, work.host_s),
            host_memory_bytes=self.ledger.host_peak_bytes,
        )

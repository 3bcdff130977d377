"""The state of a training on one rank: services, components, and what changes from step to step."""

import logging
import math
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import JsonValue
from torch import nn

from paceline.checkpoint import store
from paceline.checkpoint.format import BalanceRecord, CheckpointMeta
from paceline.checkpoint.integrity import verify
from paceline.checkpoint.reader import read_meta
from paceline.checkpoint.remote import CheckpointStore
from paceline.checkpoint.saver import CheckpointManager
from paceline.checkpoint.train_state import load_train_state
from paceline.checkpoint.transfer import open_checkpoint
from paceline.config.diff import has_same_end
from paceline.config.schema.recovery import RecoveryConfig
from paceline.core.event_log import EventLog
from paceline.core.events import StepFigures
from paceline.core.run_dir import RunDir
from paceline.core.stop import StopFlag
from paceline.core.texts import UserText
from paceline.data.loader import MicroBatch
from paceline.distributed.communicator import Communicator
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.distributed.side_group import SideGroup
from paceline.distributed.timing.progress import PROGRESS, ProgressTracker
from paceline.health.loss_spikes import LossSpike
from paceline.models.adapters.initialization import subtract_adapters
from paceline.models.experts.counts import ExpertCounter
from paceline.models.shape.record import ModelShape
from paceline.parallel.strategy import Strategy
from paceline.tasks.base import Task
from paceline.train.optimizers.build import Schedule
from paceline.train.precision import Precision
from paceline.train.run_spec import RunSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankContext:
    """The services of one rank.

    Args:
        cleanup: closed when the rank ends.
        progress: read by the watchdog.
    """

    comm: Communicator
    run_dir: RunDir
    events: EventLog
    stop: StopFlag
    cleanup: ExitStack = field(default_factory=ExitStack)
    progress: ProgressTracker = PROGRESS

    @property
    def device(self) -> torch.device:
        return self.comm.device


@dataclass(frozen=True)
class TrainComponents:
    """The model, its strategy and its optimizer. Only ``strategy`` changes weights and optimizer
    state.

    Args:
        model: the module that the strategy's ``setup`` returned.
        shape: shape of the model as the task built it, before it was distributed.
        frozen_digest: digest of the frozen weights, or None if all weights are trained.
        experts: the counter of the tokens of the model's experts; None without experts.
    """

    task: Task
    model: nn.Module
    shape: ModelShape
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    lr_schedule: Schedule
    precision: Precision
    frozen_digest: str | None
    experts: ExpertCounter | None = None

    def counting(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Return a context in which this thread computes the loss of a micro-batch, and the tokens
        of the experts are counted. A filler has no tokens."""
        if self.experts is None or not batch.samples:
            return nullcontext()
        return self.experts.counting(batch.data)


@dataclass
class TrainState:
    """The mutable state of a training. Only the trainer assigns to it.

    Args:
        step: number of steps completed so far, including those whose batch was skipped.
        first_step: value of ``step`` when this attempt of the run started.
        skipped_batches: steps (from 0) whose batch is skipped after a loss spike.
        recent_losses: mean losses of the last steps, to detect loss spikes.
        eval_losses: evaluation loss by step.
        stop_reason: why a callback ended the training before its last step, or None.
    """

    step: int = 0
    first_step: int = 0
    skipped_batches: set[int] = field(default_factory=set)
    recent_losses: deque[float] = field(default_factory=deque)
    eval_losses: dict[int, float] = field(default_factory=dict)
    stop_reason: str | None = None

    def is_complete(self, last_step: int) -> bool:
        """Return whether the training has reached ``last_step``, or was ended before it."""
        return self.step >= last_step or self.stop_reason is not None


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Args:
        grad_norm: float32 scalar on the device, or None unless ``outcome`` is ``updated``.
        learning_rate: learning rate of the update, or None unless ``outcome`` is ``updated``.
        stop: whether a stop of any rank was requested.
        is_logged: whether a ``step`` event is emitted for this step.
        figures: figures of a logged step over all ranks, which :class:`StepLogger` adds.
    """

    outcome: Literal["updated", "batch_skipped", "rolled_back"]
    stop: bool = False
    grad_norm: torch.Tensor | None = None
    learning_rate: float | None = None
    is_logged: bool = False
    figures: StepFigures = field(default_factory=StepFigures)


@dataclass(frozen=True)
class RollbackTarget:
    """The checkpoint to roll back to.

    Args:
        path: path of the checkpoint, or None if there is none.
        step: step of the checkpoint, or 0 if there is none.
        is_own: whether the checkpoint is in this run's folder.
    """

    path: str | None = None
    step: int = 0
    is_own: bool = False

    def is_exhausted(self, skipped_batches: Collection[int], settings: RecoveryConfig) -> bool:
        """Return whether too many batches have been skipped since this checkpoint."""
        num_skipped = sum(step >= self.step for step in skipped_batches)
        return num_skipped >= settings.max_restarts


def find_target(
    comm: Communicator, run_dir: RunDir, step: int, resumed_from: str | None
) -> RollbackTarget:
    """Return the latest intact checkpoint at or before ``step`` that rank 0 finds, or else the one
    that this attempt resumed from. A collective."""
    target = None
    with rank_zero_phase(comm, "looking for an intact checkpoint"):
        if comm.is_rank_zero:
            target = _find_target(run_dir, step, resumed_from)
    agreed = comm.broadcast_object(target)
    assert agreed is not None
    return agreed


def _find_target(run_dir: RunDir, step: int, resumed_from: str | None) -> RollbackTarget:
    for path in reversed(store.committed(run_dir.checkpoints)):
        if verify(path) is None:
            stored_step = read_meta(path)["step"]
            if stored_step <= step:
                return RollbackTarget(str(path), stored_step, True)
    if resumed_from is None:
        return RollbackTarget()
    path = Path(resumed_from)
    is_own = path.resolve().parent == run_dir.checkpoints.resolve()
    return RollbackTarget(str(path), read_meta(path)["step"], is_own)


def report_no_rollback(step: int, target: RollbackTarget, settings: RecoveryConfig) -> None:
    """Warn that the batch of a loss spike is kept. ``step`` is the step of the spike, from 0."""
    logger.warning(
        UserText(
            "step {next_step}: the loss spiked again, but {max_restarts} batches have already been"
            " skipped since step {step} (`recovery.max_restarts`), so this one is kept",
            code="loss-spikes-again",
            next_step=step + 1,
            max_restarts=settings.max_restarts,
            step=target.step,
        )
    )


def report_rollback(events: EventLog, step: int, spike: LossSpike, target: RollbackTarget) -> None:
    """Emit the ``rollback`` event and its notice. ``step`` is the step of the spike, from 0."""
    to_step = step if target.path is None else target.step
    median, compared = None, ""
    if not math.isnan(spike.median):
        median = spike.median
        compared = f" (median of the last {spike.num_compared} steps: {median:.4g})"
    is_first = target.path is None
    text = UserText(
        "step {next_step}: the loss spiked to {loss}{compared}; there is no earlier checkpoint, so"
        " only the batch of this step is skipped"
        if is_first
        else "step {next_step}: the loss spiked to {loss}{compared}; rolling back to step {to_step}"
        " and skipping the batch of this step",
        code="loss-spike-skipped" if is_first else "loss-spike-rolled-back",
        next_step=step + 1,
        loss=f"{spike.loss:.4g}",
        compared=compared,
        to_step=to_step,
    )
    events.emit(
        {
            "type": "rollback",
            "step": step + 1,
            "to_step": to_step,
            "loss": spike.loss,
            "median": median,
        },
        file_only=True,
    )
    logger.warning(text)


def checkpoint_meta(
    state: TrainState,
    spec: RunSpec,
    components: TrainComponents,
    balance: BalanceRecord | None,
    callbacks: dict[str, dict[str, JsonValue]],
) -> CheckpointMeta:
    """Return the content of a checkpoint's ``meta.json``, except its step."""
    meta: CheckpointMeta = {
        "world_size": spec.derived.world_size,
        "global_batch_size": spec.derived.global_batch_size,
        "fingerprint": spec.data.fingerprint,
        "image_backend": spec.data.image_backend,
        "config": spec.config.model_dump(mode="json"),
        "torch": torch.__version__,
        "strategy": components.strategy.name,
        "frozen": components.frozen_digest,
    }
    if state.skipped_batches:
        meta["skipped_batches"] = sorted(state.skipped_batches)
    if spec.config.recovery.rollback_on_loss_spike:
        meta["recent_losses"] = list(state.recent_losses)
    if balance is not None:
        meta["balance"] = balance
    if callbacks:
        meta["callbacks"] = callbacks
    if state.stop_reason is not None:
        meta["stop_reason"] = state.stop_reason
    return meta


def recent_losses_from(meta: CheckpointMeta, settings: RecoveryConfig) -> deque[float]:
    """Return the recent losses that a checkpoint's ``meta.json`` contains."""
    return deque(meta.get("recent_losses", ()), maxlen=settings.loss_spike_window)


def open_side_group(spec: RunSpec, world: Communicator) -> tuple[SideGroup | None, RunSpec]:
    """Return the group that transfers checkpoints if some rank does not see the run's folder, and
    the spec with the checkpoint that rank 0 resumes from."""
    side = SideGroup.open(world, spec.sees_run_folder)
    if side is not None:
        spec = replace(spec, resume_from=world.broadcast_object(spec.resume_from))
    return side, spec


def claim_store(spec: RunSpec, ctx: RankContext) -> CheckpointStore | None:
    """Return the store at ``checkpoint_dir`` on rank 0, which uploads checkpoints; else None."""
    if spec.config.checkpoint_dir is None or not ctx.comm.is_rank_zero:
        return None
    store = CheckpointStore(spec.config.checkpoint_dir)
    before = store.claim(ctx.run_dir.root)
    if before is not None:
        logger.warning(
            UserText(
                "`checkpoint_dir: {url}` was last written by the run in {output_dir} on host"
                " {host}; this run takes it over, and the other one ends at its next checkpoint if"
                " it is still running",
                code="checkpoint-dir-taken-over",
                url=store.url,
                output_dir=before.output_dir,
                host=before.host,
            )
        )
    return store


def initialize_adapters(
    model: nn.Module, spec: RunSpec, comm: Communicator, side: SideGroup | None
) -> None:
    """Subtract the initial adapters from the frozen weights, if the adapters' initialization
    requires it. A resumed run reads the initial adapters from the checkpoint."""
    if not (spec.config.lora.enable and spec.config.lora.subtracts_adapter):
        return
    if spec.resume_from is None:
        subtract_adapters(model, spec.config, comm)
        return
    with open_checkpoint(Path(spec.resume_from), side) as opened:

        def read(name: str) -> torch.Tensor:
            _, shape = opened.tensors().get(f"buffer/{name}", (None, ()))
            return opened.read(f"buffer/{name}", (0,) * len(shape), shape)

        subtract_adapters(model, spec.config, comm, read)


def resume(
    spec: RunSpec, ctx: RankContext, components: TrainComponents, checkpoints: CheckpointManager
) -> tuple[TrainState, str | None, CheckpointMeta]:
    """Load the checkpoint that the run resumes from. Returns the state, and the path and
    ``meta.json`` of the checkpoint (None and empty if there is none). A collective."""
    settings = spec.config.recovery
    local_path = spec.resume_from
    is_own = (
        local_path is not None
        and Path(local_path).resolve().parent == ctx.run_dir.checkpoints.resolve()
    )
    path: str | None
    path, is_own = ctx.comm.broadcast_object((local_path, is_own))
    if path is None:
        return TrainState(recent_losses=recent_losses_from({}, settings)), None, {}
    with open_checkpoint(Path(path), checkpoints.side) as opened:
        load_train_state(components.strategy, opened, components.precision.scaler)
    step = opened.meta["step"]
    checkpoints.resume_at(step, is_own)
    is_same_run = has_same_end(opened.meta["config"], spec.config)
    state = TrainState(
        step=step,
        first_step=step,
        skipped_batches=set(opened.meta.get("skipped_batches", ())),
        recent_losses=recent_losses_from(opened.meta, settings),
        stop_reason=opened.meta.get("stop_reason") if is_same_run else None,
    )
    return state, path, opened.meta

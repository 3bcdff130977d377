"""The training loop, to be read from top to bottom. Every rank runs it; rank 0 alone speaks and
writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.saver import Saver
from paceline.checkpoint.train_state import training_state
from paceline.config.derive import ResolvedValues
from paceline.config.schema import Config
from paceline.core.errors import RunError
from paceline.core.events import EventLog
from paceline.core.run_dir import RunDir
from paceline.core.stop import StopFlag
from paceline.data.loader import LoaderOptions, MicroBatch
from paceline.data.order import SampleOrder
from paceline.distributed.communicator import Communicator
from paceline.distributed.progress import PROGRESS
from paceline.distributed.seeds import seed_everything
from paceline.health.anomalies import Guard
from paceline.models.shape.record import ModelShape
from paceline.observe.comm_advisor import Judge
from paceline.observe.memory import STEPS_BEFORE, emit_memory
from paceline.observe.metrics import Meter, restart_peak
from paceline.parallel.base import Strategy
from paceline.tasks.base import Task
from paceline.train.balance import Balancer
from paceline.train.evaluation import EvalResult, evaluate
from paceline.train.optimizer import Schedule
from paceline.train.precision import Precision
from paceline.train.rank_loss import regroup
from paceline.train.sampling import Sampler
from paceline.train.step_counts import StepCounts


@dataclass
class Session:
    """Everything that a rank's training needs, put together by :mod:`paceline.train.setup`."""

    config: Config
    derived: ResolvedValues
    world: Communicator
    task: Task
    model: nn.Module  # what the strategy made of it
    shape: ModelShape  # as the task built it
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    order: SampleOrder
    batches: Iterator[list[MicroBatch]]
    train_dataset: Any
    eval_dataset: Any
    loader_options: LoaderOptions
    events: EventLog
    run_dir: RunDir
    stop: StopFlag
    meter: Meter
    saver: Saver
    fingerprint: str | None
    frozen: str | None  # digest of the weights that are not trained
    first_step: int = 0
    step: int = 0  # updates made so far
    said_nan: bool = False
    said_memory: bool = False
    eval_losses: dict[int, float] = field(default_factory=dict)
    unread: list[StepCounts] = field(default_factory=list)  # on their way, of the step made last
    judge: Judge | None = None  # of how replicas come together
    accumulation: int = 1  # micro-batches of a step on this rank
    # on the run's folder, where this rank came to hold it in the middle of the run
    lock: Any = None
    guard: Guard = field(init=False)  # of gradients, replicas and losses
    sampler: Sampler = field(init=False)  # of what the model says at evaluations
    balancer: Balancer = field(init=False)  # of the micro-batches of each rank

    def __post_init__(self) -> None:
        self.guard = Guard(self)
        self.balancer = Balancer(self)
        self.sampler = Sampler(self)


def train(session: Session) -> str:
    """Train to the last step, or until a stop is asked for. Returns "done" or "stopped"; either way
    a checkpoint of the last step made is on disk."""
    session.model.train()
    last = session.derived.steps
    while session.step < last:
        stopping = train_step(session)
        session.guard.after_step()
        session.balancer.after_step()
        word = session.judge.after_step(session.step) if session.judge is not None else None
        if word is not None:
            session.events.notice(word[1], word[0])
        session.saver.poll()
        if session.step == last or stopping:
            break
        if (
            session.eval_dataset is not None
            and session.step % session.derived.eval_every_steps == 0
        ):
            run_evaluation(session)
        save_steps = session.derived.save_every_steps
        if session.saver.asked or (save_steps and session.step % save_steps == 0):
            save_checkpoint(session, must_succeed=False)
    save_checkpoint(session, must_succeed=True)
    session.guard.end()
    regroup(session)
    if session.step < last:
        return "stopped"
    if session.eval_dataset is not None:
        run_evaluation(session)
    return "done"


def train_step(session: Session) -> bool:
    """One update over a global batch. True where some rank was asked to stop, or the numbers leave
    no sense in going on: all ranks learn of it in the same step."""
    config, world, task, meter, guard = (
        session.config,
        session.world,
        session.task,
        session.meter,
        session.guard,
    )
    if guard.spikes.leave_out():
        return False
    step = session.step
    if step == session.first_step + STEPS_BEFORE - 1:
        restart_peak(world.device)
    PROGRESS.begin_step(step + 1)
    meter.begin()
    micro_batches = [one.to(world.device) for one in next(session.batches)]
    meter.data_ready()
    PROGRESS.enter("forward")

    # The count divides the loss; it travels while the first forward runs. The wishes to stop and to
    # save travel with it.
    counts = StepCounts(session, micro_batches)
    for earlier in session.unread[
        : max(0, len(session.unread) - session.strategy.max_count_lag + 1)
    ]:
        earlier.read()  # sent a step ago, or as many as the strategy lets pass
    first_number = session.balancer.first_micro_batch(len(micro_batches))
    timer = session.balancer.begin_step(micro_batches)
    # by micro-batch, and added in that order: some strategies run them in another
    losses: dict[int, torch.Tensor] = {}

    def micro_step(number: int, model: nn.Module) -> torch.Tensor:
        batch = micro_batches[number]
        PROGRESS.enter("forward")
        seed_everything(config.train_args.seed, "step", step, first_number + number)
        with session.precision.autocast():
            loss = task.loss(model, batch.data)
        if step == session.first_step:
            check_loss(loss)
        loss = loss * batch.weight
        losses[number] = loss.detach()
        PROGRESS.enter("backward")
        with nullcontext() if timer is None else timer.waiting():
            denominator = counts.denominator()
        return session.precision.scale(loss / denominator)

    session.strategy.set_token_counts(counts.own, counts.denominator)
    session.strategy.forward_backward(micro_step, len(micro_batches))
    # waited for here where this rank came to no loss (an early pipeline stage)
    counts.denominator()
    PROGRESS.enter("optimizer")
    loss_sum = sum_in_order(losses, world.device)
    told_sum = loss_sum if session.strategy.reports_loss else torch.zeros_like(loss_sum)
    if guard.spikes.jumped(told_sum, counts.own) and guard.spikes.rewind():
        stopping = read_counts(session, counts, now=True)
        meter.forget()
        return stopping
    session.strategy.unscale()
    grad_norm = session.strategy.clip_grad_norm(config.train_args.max_grad_norm)
    learning_rate = session.schedule.set_step(step)
    guard.update(grad_norm, loss_sum)
    session.step += 1
    PROGRESS.end_step(disturbed=session.saver.is_writing)
    meter.end(told_sum, counts.own)
    logging = session.step % session.derived.log_every_steps == 0
    logging = logging or session.step in (session.first_step + 1, session.derived.steps)
    stopping = read_counts(session, counts, now=logging)
    regroup(session)
    if logging:
        log_step(session, grad_norm, learning_rate)
    if session.step >= session.first_step + STEPS_BEFORE and not session.said_memory:
        session.said_memory = True
        emit_memory(session)
    return stopping or guard.over is not None


def read_counts(session: Session, counts: StepCounts, now: bool) -> bool:
    """Hand the global counts of this step to the meter. Where the step did not need them they stay
    on their way (but for ``now``), and those of the step before are read. True where some rank had
    asked to stop by then."""
    session.unread.append(counts)
    stopping = False
    while len(session.unread) > (
        0 if now or counts.near is None else session.strategy.max_count_lag
    ):
        earlier = session.unread.pop(0)
        session.meter.count(earlier.read())
        stopping = earlier.stop_wanted() or stopping
        session.saver.hear(earlier.save_wish(), earlier.saves_begun)
    return stopping


def sum_in_order(losses: dict[int, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Float32 sum over the micro-batches whose loss this rank has seen."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    for number in sorted(losses):
        total += losses[number]
    return total


def check_loss(loss: Any) -> None:
    """The first loss of a run shows whether the task keeps its contract."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad:
        got = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"a {type(loss).__name__}"
        )
        if isinstance(loss, torch.Tensor) and loss.dim() == 0:
            got = "a scalar without gradient"
        raise RunError(
            f"the task's loss(model, batch) gave {got}",
            allowed="a scalar tensor with gradient: the sum of the loss over the batch",
            fix='return e.g. F.cross_entropy(model(x), y, reduction="sum")',
        )


def log_step(session: Session, grad_norm: torch.Tensor, learning_rate: float) -> None:
    """Gather the figures since the last such line and emit a ``step`` event. A collective: every
    rank calls it."""
    with PROGRESS.waiting("the device"):
        norm = float(grad_norm)
    figures = session.meter.gather(norm, session.guard.own())
    session.guard.hear(session.meter.told)
    event = {
        "step": session.step,
        "epoch": session.step / session.order.steps_per_epoch,
        "learning_rate": learning_rate,
        **figures,
    }
    session.events.emit("step", **event)
    if figures["loss"] != figures["loss"] and not session.said_nan:
        session.said_nan = True
        session.events.notice(
            f"step {session.step}: the loss is not a number; lower the learning rate or set"
            " `precision: bf16-mixed`",
            level="warning",
        )


def run_evaluation(session: Session) -> None:
    """Evaluate now, once a step."""
    if session.step in session.eval_losses:
        return
    result: EvalResult | None = None
    # over the whole set: once more where a rank was lost meanwhile
    while regroup(session) or result is None:
        with PROGRESS.during("evaluation"), session.strategy.consolidated():
            result = evaluate(
                session.task,
                session.model,
                session.strategy,
                session.eval_dataset,
                session.config,
                session.world,
                session.precision,
                session.loader_options,
            )
            session.sampler.take(result.wall_s)
    session.eval_losses[session.step] = result.loss
    session.events.emit(
        "eval",
        step=session.step,
        loss=result.loss,
        count=result.count,
        wall_s=result.wall_s,
        metrics=result.metrics,
    )


def save_checkpoint(session: Session, must_succeed: bool) -> None:
    """Save the state of this step, unless it is saved. Where a save fails, training goes on with a
    warning, unless it must succeed: then it is waited for, and every rank raises RunError."""
    session.guard.before_save()
    meta = {
        **session.guard.meta(),
        **session.balancer.meta(),
        "strategy": session.strategy.name,
        "world_size": session.derived.world_size,
        "global_batch_size": session.derived.global_batch_size,
        "fingerprint": session.fingerprint,
        "frozen": session.frozen,
        "config": session.config.model_dump(mode="json"),
        "torch": torch.__version__,
    }
    session.saver.save(
        session.step, lambda: training_state(session), meta, must_succeed=must_succeed
    )

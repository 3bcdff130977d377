"""Continue after a rank was lost: report the rank and the samples that were not trained on, and
take over the event log if rank 0 was lost."""

import logging
from collections.abc import Callable

from paceline.checkpoint.remote import CheckpointStore
from paceline.checkpoint.saver import CheckpointManager
from paceline.config.schema import Config
from paceline.core.event_log import EventLog, read_events
from paceline.core.events import Event
from paceline.core.formatting import counted
from paceline.core.run_dir import RunDir, lock_run
from paceline.data.order.base import Order
from paceline.observe.console import Console
from paceline.parallel.strategy import RankLoss
from paceline.train.run_spec import RunSpec
from paceline.train.state import RankContext, TrainState

logger = logging.getLogger(__name__)


def event_listeners(config: Config, run_dir: RunDir) -> list[Callable[[Event], None]]:
    """Return the functions that receive each event on the rank that writes the event log."""
    listeners: list[Callable[[Event], None]] = [Console()]
    if config.report_to:
        from paceline.observe.loggers.registry import open_loggers  # not needed by most runs

        listeners += open_loggers(config, run_dir)
    return listeners


def take_over_log(config: Config, ctx: RankContext, checkpoints: CheckpointManager) -> None:
    """Take over the event log and the uploads from a rank 0 that was lost, unless this rank has
    them already."""
    if ctx.events.path is not None:
        return
    ctx.cleanup.callback(lock_run(ctx.run_dir, wait_s=20.0).close)
    listeners = event_listeners(config, ctx.run_dir)
    console = next((listener for listener in listeners if isinstance(listener, Console)), None)
    if console is not None:
        for event in read_events(ctx.run_dir.events):
            console.catch_up(event)
    ctx.events.open(ctx.run_dir.events, listeners)
    if config.checkpoint_dir is not None:
        checkpoints.store = CheckpointStore(config.checkpoint_dir)
        checkpoints.store.claim(ctx.run_dir.root)


def report_rank_losses(
    losses: list[RankLoss],
    spec: RunSpec,
    ctx: RankContext,
    state: TrainState,
    order: Order,
    num_left: int,
) -> None:
    """Emit the ``worker_lost`` event and the notice of each lost rank.

    Args:
        num_left: number of replicas that continue.
    """
    accumulation = spec.derived.gradient_accumulation_steps
    for loss in losses:
        _report_rank_loss(loss, state, order, accumulation, num_left, ctx.events)


def _report_rank_loss(
    loss: RankLoss,
    state: TrainState,
    order: Order,
    accumulation: int,
    num_left: int,
    events: EventLog,
) -> None:
    num_shares = loss.replicas * accumulation
    share = slice(loss.replica * accumulation, (loss.replica + 1) * accumulation)
    missed_steps = range(max(state.first_step, state.step - loss.steps_missed), state.step)
    samples_unseen = sum(
        len(samples)
        for step in missed_steps
        for samples in order.micro_batches(step, num_shares)[share]
    )
    missed = "all samples were trained on"
    if samples_unseen:
        last_steps = (
            f"step {state.step}"
            if loss.steps_missed == 1
            else f"its last {loss.steps_missed} steps"
        )
        missed = f"{counted(samples_unseen, 'sample')} of {last_steps} were not trained on"
    text = (
        f"rank {loss.rank}, a worker (process {loss.pid}), {loss.reason}. The other ranks continue:"
        f" from step {state.step + 1} each global batch is shared among"
        f" {counted(num_left, 'worker')}; {missed}"
    )
    events.emit(
        {
            "type": "worker_lost",
            "step": state.step,
            "rank": loss.rank,
            "pid": loss.pid,
            "reason": loss.reason,
            "samples_unseen": samples_unseen,
        },
        file_only=True,
    )
    logger.warning(text)

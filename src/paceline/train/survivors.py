"""Continue after a rank was lost: divide the global batch again, report the rank and the samples
that were not trained on, and take over the event log if rank 0 was lost."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from paceline.checkpoint.remote import CheckpointStore
from paceline.checkpoint.saver import CheckpointManager
from paceline.config.schema import Config
from paceline.core.event_log import read_events
from paceline.core.events import Event
from paceline.core.formatting import counted
from paceline.core.run_dir import RunDir, lock_run
from paceline.core.texts import UserText
from paceline.data.pipeline import DataPipeline
from paceline.observe.console import Console
from paceline.parallel.comm_profile import RankLoss
from paceline.parallel.strategy import Strategy
from paceline.train.run_spec import RunSpec
from paceline.train.state import RankContext, TrainState

logger = logging.getLogger(__name__)

T = TypeVar("T")


def event_listeners(config: Config, run_dir: RunDir) -> list[Callable[[Event], None]]:
    """Return the functions that receive each event on the rank that writes the event log."""
    listeners: list[Callable[[Event], None]] = [Console()]
    if config.report_to:
        from paceline.observe.loggers.registry import open_loggers  # not needed by most runs

        listeners += open_loggers(config, run_dir)
    return listeners


@dataclass(frozen=True)
class Survivors:
    """The ranks that continue when others are lost. A strategy learns of a lost rank in a
    collective, so all ranks continue without it at the same point of the same step."""

    spec: RunSpec
    ctx: RankContext
    strategy: Strategy
    state: TrainState
    data: DataPipeline
    checkpoints: CheckpointManager

    def update(self) -> bool:
        """Continue without the ranks that were lost since the last call. Return whether there were
        any, the same on every rank."""
        losses = self.strategy.lost_since_last_step()
        if not losses:
            return False
        self.data.reshard(self.strategy.replica, self.strategy.num_replicas)
        if self.ctx.comm.is_rank_zero:
            self._open_log()
            for loss in losses:
                self._report(loss)
        return True

    def repeat(self, action: Callable[[], T]) -> T:
        """Run an action that writes or computes a result, and run it again if a rank was lost
        meanwhile, such as the rank that wrote it. A collective."""
        self.update()
        result = action()
        while self.update():
            result = action()
        return result

    def _open_log(self) -> None:
        """Take over the event log and the uploads from a rank 0 that was lost, unless this rank has
        them already."""
        config, ctx = self.spec.config, self.ctx
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
            self.checkpoints.store = CheckpointStore(config.checkpoint_dir)
            self.checkpoints.store.claim(ctx.run_dir.root)

    def _report(self, loss: RankLoss) -> None:
        """Emit the ``worker_lost`` event and the notice of a lost rank."""
        step, samples_unseen = self.state.step, self._count_unseen(loss)
        missed = "all samples were trained on"
        if samples_unseen:
            last_steps = (
                f"step {step}" if loss.steps_missed == 1 else f"its last {loss.steps_missed} steps"
            )
            missed = f"{counted(samples_unseen, 'sample')} of {last_steps} were not trained on"
        self.ctx.events.emit(
            {
                "type": "worker_lost",
                "step": step,
                "rank": loss.rank,
                "pid": loss.pid,
                "reason": loss.reason,
                "samples_unseen": samples_unseen,
            },
            file_only=True,
        )
        logger.warning(
            UserText(
                "rank {rank}, a worker (process {pid}), {reason}. The other ranks continue: from"
                " step {next_step} each global batch is shared among {num_replicas:worker};"
                " {missed}",
                code="worker-lost",
                rank=loss.rank,
                pid=loss.pid,
                reason=loss.reason,
                next_step=step + 1,
                num_replicas=self.strategy.num_replicas,
                missed=missed,
            )
        )

    def _count_unseen(self, loss: RankLoss) -> int:
        """Return the number of samples of a lost rank's share whose gradients are in no update."""
        accumulation = self.spec.derived.gradient_accumulation_steps
        num_shares = loss.replicas * accumulation
        share = slice(loss.replica * accumulation, (loss.replica + 1) * accumulation)
        step = self.state.step
        return sum(
            len(samples)
            for missed in range(max(self.state.first_step, step - loss.steps_missed), step)
            for samples in self.data.order.micro_batches(missed, num_shares)[share]
        )

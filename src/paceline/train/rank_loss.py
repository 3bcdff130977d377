"""When the process of a rank has ended and the others go on: it is named, its share of the batches
is dealt anew, what was not trained on is counted, and where it was the one that spoke for the run
another takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.remote import CheckpointStore
from paceline.config.schema import Config
from paceline.core.events import Event, read_events
from paceline.core.formatting import counted
from paceline.core.log import shows_progress
from paceline.core.run_dir import RunDir, lock_run
from paceline.data.loader import MicroBatch, train_steps
from paceline.observe.console import Console
from paceline.parallel.base import RankLoss

if TYPE_CHECKING:
    from paceline.train.trainer import Session


def listeners(config: Config, run_dir: RunDir) -> list[Any]:
    """What is told of each event, on the rank that speaks."""
    found: list[Any] = [Console()] if shows_progress() else []
    if "tensorboard" in config.report_to:
        from paceline.observe.tensorboard import TensorBoardListener

        found.append(TensorBoardListener(run_dir.root))
    return found


def batches_of(session: Session) -> Iterator[list[MicroBatch]]:
    """This rank's micro-batches of each step from the present one on."""
    return train_steps(
        session.train_dataset,
        session.order,
        session.task.collate,
        rank=session.strategy.replica,
        world_size=session.strategy.num_replicas,
        accumulation=session.accumulation,
        first_step=session.step,
        last_step=session.derived.steps,
        options=session.loader_options,
        shares=session.balancer.shares,
    )


def close_batches(session: Session) -> None:
    """Shut down the loader's worker processes. Without this they are killed when the rank's process
    exits, and torch prints a traceback about them."""
    close = getattr(session.batches, "close", None)
    session.batches = iter(())
    if close is not None:
        close()


def regroup(session: Session) -> bool:
    """See whether ranks were lost, and go on without them. True where some were. Every rank comes
    to the same answer at the same place of the same step."""
    gone = session.strategy.poll_rank_losses()
    if not gone:
        return False
    session.batches = batches_of(session)
    if session.world.is_rank_zero:
        if session.events.path is None:
            _take_the_word(session)
        for one in gone:
            _tell(session, one)
    return True


def _take_the_word(session: Session) -> None:
    """The rank that wrote the log and the checkpoints is gone: this one does it from here on."""
    session.lock = lock_run(session.run_dir, wait_s=20.0)
    told = listeners(session.config, session.run_dir)
    for event in read_events(session.run_dir.events):
        told[0].catch_up(event)
    session.events.open(session.run_dir.events, told)
    if session.config.checkpoint_dir is not None:
        session.saver.store = CheckpointStore(session.config.checkpoint_dir)
        session.saver.store.claim(session.run_dir.root)


def _tell(session: Session, one: RankLoss) -> None:
    unseen = _samples_unseen(session, one)
    left = session.strategy.num_replicas
    text = (
        f"rank {one.rank}, a worker (process {one.pid}), {one.reason}. The others go on: from step"
        f" {session.step + 1} on each global batch is shared among {counted(left, 'worker')}"
    )
    last = (
        f"of step {session.step}"
        if one.steps_missed == 1
        else f"of its last {one.steps_missed} steps"
    )
    text += (
        f"; {counted(unseen, 'sample')} {last} were not trained on"
        if unseen
        else "; no sample is left out for it"
    )
    session.events.emit(
        "worker_lost",
        step=session.step,
        rank=one.rank,
        pid=one.pid,
        reason=one.reason,
        samples_unseen=unseen,
        file_only=True,
    )
    session.events.notice(text, level="warning")


def _samples_unseen(session: Session, one: RankLoss) -> int:
    """Of its share of the steps that it missed."""
    each = session.derived.gradient_accumulation_steps
    parts, mine = one.replicas * each, slice(one.replica * each, (one.replica + 1) * each)
    steps = range(max(session.first_step, session.step - one.steps_missed), session.step)
    return sum(
        len(part) for step in steps for part in session.order.micro_batches(step, parts)[mine]
    )


def workers_lost(events: list[Event], step: int) -> list[dict[str, Any]]:
    """For the report: the workers that this run has lost up to ``step``, over all its lives; none
    of what was rewound."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "resume":
            found = [one for one in found if one["step"] <= event["step"]]
        elif event["type"] == "worker_lost":
            found.append(
                {key: event[key] for key in ("step", "rank", "pid", "reason", "samples_unseen")}
            )
    return [one for one in found if one["step"] <= step]

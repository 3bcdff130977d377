"""Save checkpoints during training, either in the foreground or in a background thread that writes
from a copy of the state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from paceline.checkpoint import writer
from paceline.checkpoint.format import CheckpointMeta, name_of, step_of
from paceline.checkpoint.pending_save import Failure, PendingSave
from paceline.checkpoint.remote import CheckpointStore, ClaimLostError
from paceline.checkpoint.staging import StagingBuffer
from paceline.checkpoint.store import committed
from paceline.core.event_log import EventLog
from paceline.core.events import CheckpointEvent
from paceline.core.texts import UserText
from paceline.distributed.communicator import Communicator
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.distributed.side_group import SideGroup
from paceline.distributed.timing.progress import PROGRESS
from paceline.distributed.traffic import uncounted
from paceline.parallel.state import TensorShard

logger = logging.getLogger(__name__)

CollectShards = Callable[[], list[TensorShard]]

#: If training waits longer than this for the previous save, a warning is logged.
_LONG_WAIT_S = 10.0
#: How long a failed run waits for its ranks to finish a save.
_FAILED_RUN_TIMEOUT_S = 20.0
#: Interval at which a save is tried again while training is paused for it.
_RETRY_S = 5.0
#: Requests of rank 0 to all ranks: an ordinary save, or a save for which training pauses.
_SAVE, _PAUSE = 1.0, 2.0


@dataclass
class CheckpointManager:
    """Saves the state of a run below ``folder`` (``RUN/checkpoints``). Each rank writes its own
    shards. Leaving its ``with`` block waits for a save in progress.

    Args:
        keep: number of checkpoints to retain; None retains all.
        background: whether training continues while a save is written from a copy of the shards in
            host memory. At most one save is in progress at a time.
        every_steps: number of steps between saves; None or 0 for none.
        every_s: seconds from the start of a save to a request for the next; None for no requests.
        pause: whether training waits after a failed save until a retry succeeds or ``stop()`` is
            true on some rank.
        side: the group over which ranks without access to ``folder`` send their shards to rank 0;
            None if all ranks have access.
        store: the location to which rank 0 uploads checkpoints (``checkpoint_dir``).
    """

    world: Communicator
    folder: Path
    keep: int | None
    events: EventLog
    _: KW_ONLY
    background: bool
    every_steps: int | None = None
    every_s: float | None = None
    pause: bool = False
    stop: Callable[[], bool] = lambda: False
    side: SideGroup | None = None
    store: CheckpointStore | None = None

    def __post_init__(self) -> None:
        #: Steps of the best evaluations so far; the latest that was saved is retained.
        self.best_steps: tuple[int, ...] = ()
        #: Called on rank 0 with the step and the path of each checkpoint that was written.
        self.on_saved: Callable[[int, Path], None] = lambda step, path: None
        self.first_step = 0  # the step from which this attempt resumed
        self.last_step: int | None = None  # latest step saved, or being saved in the background
        self.num_begun = 0  # number of saves
        self._since = time.monotonic()  # when the last save began
        self._request = 0.0  # the request of rank 0 to all ranks
        self._pause_needed = False  # after a failed background save; on rank 0
        self._pending: PendingSave | None = None
        self._error: Failure | None = None  # of the last background save; on rank 0
        self._staging = StagingBuffer(self.world.device)
        self._has_warned_unpinned = False
        if self.world.is_rank_zero:
            writer.clear_debris(self.folder)
        # Checkpoints that earlier attempts wrote.
        self._earlier_steps = {step_of(path.name) for path in committed(self.folder)}

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.finish(run_failed=error is not None)

    def next_request(self) -> float:
        """Return a new request of rank 0 to all ranks, or 0: a save that is due by the clock, or
        one for which training pauses because the last one failed. The caller sends it to every
        rank, which passes it to :meth:`accept_request` at the same step."""
        if not self.world.is_rank_zero or self._pending is not None:
            return 0.0
        if self._pause_needed:
            self._pause_needed = False
            return _PAUSE
        if self.every_s is None or time.monotonic() - self._since < self.every_s:
            return 0.0
        self._since = time.monotonic()
        return _SAVE

    def accept_request(self, request: float, num_begun: int) -> None:
        """Store a request until the next save. ``num_begun`` is the value of :attr:`num_begun` at
        the time of the request: a save that has begun since then fulfills it."""
        if num_begun == self.num_begun:
            self._request = max(self._request, request)

    def is_due(self, step: int) -> bool:
        """Return whether a save is requested or due at this step. All ranks return the same."""
        return self._request > 0 or bool(self.every_steps and step % self.every_steps == 0)

    def resume_at(self, step: int, is_own: bool) -> None:
        """Record that the run resumes at ``step``, from a checkpoint in its folder if
        ``is_own``."""
        self.first_step = step
        self.last_step = step if is_own else None

    @property
    def is_writing(self) -> bool:
        """Whether a background save is in progress."""
        return self._pending is not None

    @PROGRESS.during("saving")
    def save(
        self, step: int, collect: CollectShards, meta: CheckpointMeta, *, must_succeed: bool
    ) -> None:
        """Save the state of ``step``, unless it is already saved or being saved. A collective.

        A failed save is logged as an event; training then continues or, with ``pause``, waits until
        the checkpoint can be written.

        Args:
            must_succeed: wait for the save, and repeat a failed background save of this step. If it
                fails again and training does not pause, every rank raises the same RunError.
        """
        request, self._request = self._request, 0.0
        if step == self.last_step:
            if not must_succeed:
                return
            self.finish_on_all_ranks()
            if self._agree(self._error) is None:
                return
        self.finish_on_all_ranks()
        lost = self.world.lost
        self._since = time.monotonic()
        self.num_begun += 1
        self._earlier_steps.discard(step)
        background = self.background and not must_succeed and request != _PAUSE
        error = self._begin(step, collect, meta, background)
        if isinstance(error, ClaimLostError):
            raise error
        # A rank was lost during the save: repeat the save without it.
        while error is not None and must_succeed and self.world.lost != lost:
            lost = self.world.lost
            error = self._begin(step, collect, meta, background=False)
        if error is not None and self.pause:
            error = self._pause_until_saved(error, step, collect, meta)
        if error is not None and must_succeed:
            raise error

    def _pause_until_saved(
        self, error: Failure, step: int, collect: CollectShards, meta: CheckpointMeta
    ) -> Failure | None:
        """Repeat the save until it succeeds or some rank has been asked to stop. Return the last
        error, or None. A collective."""
        start = time.monotonic()
        last_error: Failure | None = error
        if self.world.is_rank_zero and not self.stop():
            logger.warning(
                UserText(
                    "training is paused at step {step} (`recovery.on_save_error: pause`) until the"
                    " checkpoint can be written: {reason}",
                    code="saving-paused",
                    step=step,
                    reason=error.what,
                )
            )
        while last_error is not None and not self._wait_for_retry():
            last_error = self._begin(step, collect, meta, background=False, is_retry=True)
        if last_error is None and self.world.is_rank_zero:
            logger.info(
                UserText(
                    "the checkpoint of step {step} is written: training continues after a pause of"
                    " {pause_s} s",
                    code="saving-continues",
                    step=step,
                    pause_s=f"{time.monotonic() - start:.0f}",
                )
            )
        return last_error

    def _wait_for_retry(self) -> bool:
        """Wait until the next retry. Return whether some rank has been asked to stop."""
        deadline = time.monotonic() + _RETRY_S
        while time.monotonic() < deadline and not self.stop():
            PROGRESS.tick()  # keep-alive for the watchdog
            time.sleep(min(_RETRY_S, 0.1))
        with uncounted():
            return self.world.sum(float(self.stop()))[0] > 0

    def poll(self) -> None:
        """Report a background save that has ended. Called at every step; not a collective."""
        if self._pending is not None and self._pending.has_ended:
            self._finish_pending(wait=False)

    def finish(self, run_failed: bool = False) -> None:
        """Wait for the save in progress, but only briefly if the run has failed."""
        if self._pending is not None and run_failed:
            self._pending.timeout_s = _FAILED_RUN_TIMEOUT_S
        self._finish_pending(wait=True)

    def _begin(
        self,
        step: int,
        collect: CollectShards,
        meta: CheckpointMeta,
        background: bool,
        is_retry: bool = False,
    ) -> Failure | None:
        """Write a checkpoint, or start writing it in the background. Return the error on which all
        ranks agree, or None. With ``is_retry``, the error is not reported again."""
        start = time.perf_counter()
        staging_dir, problem = None, None
        if self.world.is_rank_zero:
            try:
                staging_dir = writer.prepare(self.folder, step, self.world.size)
            except OSError as error:
                problem = writer.reason_of(error)
        shards = collect()
        if background:
            try:
                shards = self._staging.copy(shards)
            except (RuntimeError, MemoryError) as error:
                problem = f"not enough host memory for the copy (set `async_save: false`): {error}"
        status = writer.RankSaveStatus(
            writer.ShardWriter.local(shards),
            staging_dir,
            problem,
            self._staging.unpinned,
            # a remote rank cannot report in the folder that it has nothing to write
            is_idle=self.side is not None and self.side.is_remote and not shards,
            is_broken=self.side is not None and self.side.is_broken,
        )
        with uncounted():
            statuses: list[writer.RankSaveStatus | None] = self.world.gather_objects(status)
        by_rank = {rank: status for rank, status in enumerate(statuses) if status is not None}
        senders = self._senders(by_rank)
        staging_dirs = (status.staging_dir for status in by_rank.values())
        staging_dir = next(filter(None, staging_dirs), None)
        problems = [(rank, status.problem) for rank, status in by_rank.items() if status.problem]
        if self.world.is_rank_zero and staging_dir is not None:
            for rank in range(len(statuses)):  # lost ranks, and those that have nothing to send
                if rank not in by_rank or by_rank[rank].is_idle:
                    writer.write_shards(staging_dir, rank, len(statuses), ())
        self._warn_unpinned(by_rank)
        if staging_dir is None and not problems:
            problems = [(0, "rank 0 has ended")]
        save = PendingSave(
            self,
            step,
            self.world.first,
            self.world.is_rank_zero,
            shards,
            meta,
            staging_dir,
            [writer.ShardWriter.local(()) if item is None else item.process for item in statuses],
            senders,
            frozenset(step for step in self._earlier_steps if step > self.first_step),
            start,
        )
        if problems:
            rank, text = problems[0]
            save.fail(text + (f" (on rank {rank})" if self.world.size > 1 else ""))
        elif background:
            self._pending, self.last_step, self._error = save, step, None
            save.start()
            save.blocked_s = time.perf_counter() - start
            return None
        else:
            with rank_zero_phase(self.world, f"writing the checkpoint of step {step}"):
                save.run(PROGRESS.tick)
        failure = self._agree(save.error)
        failure = failure or save.check_commit()
        save.blocked_s = time.perf_counter() - start
        if failure is None:
            self.last_step, self._error = step, None
        if failure is None or not is_retry:
            with rank_zero_phase(self.world, f"reporting the checkpoint of step {step}"):
                self._report(save)
        return failure

    def _senders(self, statuses: dict[int, writer.RankSaveStatus]) -> list[int]:
        """Return the ranks that send their shards to rank 0, the same on all ranks. Open new
        connections if an earlier transfer failed on some rank."""
        if self.side is None:
            return []
        if any(status.is_broken for status in statuses.values()) and not self.world.lost:
            self.side.reopen()
        remote = [rank for rank in self.side.remote_ranks if rank in statuses]
        return [rank for rank in remote if not statuses[rank].is_idle]

    def _agree(self, error: Failure | None) -> Failure | None:
        with uncounted():
            return self.world.broadcast_object(error)

    def finish_on_all_ranks(self) -> None:
        """Join the background save, if there is one, on every rank. A collective."""
        with rank_zero_phase(self.world, "writing the previous checkpoint"):
            self._finish_pending(wait=True)

    def _finish_pending(self, wait: bool) -> None:
        """Join the background save, if there is one, and report its outcome. With ``wait``, the
        time counts as a pause of the training."""
        save = self._pending
        if save is None:
            return
        start = time.perf_counter()
        save.join()
        waited_s = time.perf_counter() - start if wait else 0.0
        save.blocked_s += waited_s
        if self.world.is_rank_zero:
            save.error = save.check_commit() or save.error
        self._pending, self._error = None, save.error
        self._pause_needed = save.error is not None and (
            self.pause or isinstance(save.error, ClaimLostError)
        )
        if save.saved is not None or save.error is not None:
            self._report(save)
        if waited_s > _LONG_WAIT_S and self.world.is_rank_zero:
            logger.warning(
                UserText(
                    "training waited {waited_s} s for the checkpoint of step {step} to be written;"
                    " raise `save_steps` to save less often",
                    code="waited-for-checkpoint",
                    waited_s=f"{waited_s:.0f}",
                    step=save.step,
                )
            )

    def _warn_unpinned(self, statuses: dict[int, writer.RankSaveStatus]) -> None:
        reasons = {rank: status.unpinned for rank, status in statuses.items() if status.unpinned}
        if not reasons or self._has_warned_unpinned or not self.world.is_rank_zero:
            return
        self._has_warned_unpinned = True
        logger.warning(
            UserText(
                "the staging buffer of rank {staging_ranks} is in pageable memory, because pinning"
                " it failed ({reason}): each save pauses training for longer",
                code="pageable-staging-buffer",
                staging_ranks=", ".join(map(str, reasons)),
                reason=next(iter(reasons.values())),
            )
        )

    def _report(self, save: PendingSave) -> None:
        if not self.world.is_rank_zero:
            return
        saved = save.saved
        event: CheckpointEvent = {
            "type": "checkpoint",
            "step": save.step,
            "path": str(saved.path) if saved else None,
            "size_bytes": saved.size_bytes if saved else None,
            "wall_s": save.wall_s if saved else None,
            "blocked_s": save.blocked_s,
        }
        if self.store is not None:
            event["url"] = f"{self.store.url}/{name_of(save.step)}"
        if save.error is not None:
            event["error"] = str(save.error)
        self.events.emit(event)
        for text in save.warnings:
            logger.warning(text)
        if saved is not None:
            self.on_saved(save.step, saved.path)

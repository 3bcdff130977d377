"""Saves of a running training: in the foreground, or in threads that write from a copy while the
training goes on."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoint import transfer, writer
from paceline.checkpoint.format import CheckpointMeta, name_of
from paceline.checkpoint.remote import CheckpointStore, ClaimLostError
from paceline.checkpoint.staging import StagingBuffer
from paceline.checkpoint.store import committed, prune_after, step_of
from paceline.core.errors import RunError, SaveError
from paceline.core.event_log import EventLog
from paceline.core.events import CheckpointEvent
from paceline.distributed.communicator import Communicator
from paceline.distributed.progress import PROGRESS
from paceline.distributed.side_group import SideGroup
from paceline.distributed.traffic import uncounted
from paceline.parallel.state import TensorShard

logger = logging.getLogger(__name__)

Failure = RunError | ClaimLostError
MakeParts = Callable[[], list[TensorShard]]

#: A wait for an earlier save is worth a word from so many seconds on.
_LONG_WAIT_S = 10.0
#: How long a run that failed waits for its ranks to end what they are writing.
_HURRY_S = 20.0
#: How often a save is tried again while the run stands still for it.
_RETRY_S = 5.0
#: What rank 0 may request of all ranks (:meth:`CheckpointManager.next_request`): an ordinary save,
#: or one for which training pauses.
_SAVE, _PAUSE = 1.0, 2.0


class _RankShare(NamedTuple):
    """What a rank tells all others when a save begins.

    Args:
        aside: the hidden folder, from rank 0.
        problem: why the save cannot be begun.
        unpinned: see :class:`StagingBuffer`.
        is_idle: it neither writes nor sends anything.
        is_broken: it needs a new connection to rank 0.
    """

    process: writer.ShardWriter
    aside: Path | None
    problem: str | None
    unpinned: str | None
    is_idle: bool
    is_broken: bool


@dataclass
class CheckpointManager:
    """Saves the state of a run below ``folder`` (``RUN/checkpoints``), each rank what it owns. Use
    it in a ``with``, so that what is being written when the training ends is waited for.

    Args:
        keep: how many checkpoints are kept; None keeps all.
        background: let training go on while a save is written, from a copy in the host's memory of
            what this rank owns. One save is in flight at most.
        every_steps: a save is due after this many steps; None or 0: never.
        every_s: request a save whenever so many seconds have passed since the last was begun.
        pause: if a save cannot be written, wait until it can be, or until ``stop()`` is
            true on some rank.
        side: the group over which ranks that do not see ``folder`` send what they own to rank 0;
            None if all see it.
        store: where checkpoints are uploaded (``checkpoint_dir``); on rank 0.
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
        self.first_step = 0  # from which this attempt resumed
        self.last_step: int | None = None  # saved, or being saved in the background
        self.num_begun = 0  # saves; the last one at:
        self._since = time.monotonic()
        self._request = 0.0  # of rank 0, to all ranks
        self._failed = False  # the first rank has a failed save to tell of
        self._flight: InFlightSave | None = None
        # of the last save in the background; known to rank 0 alone
        self._error: Failure | None = None
        self._copy = StagingBuffer(self.world.device)
        self._has_warned_unpinned = False
        if self.world.is_rank_zero:
            writer.clear_debris(self.folder)
        # of earlier attempts
        self._earlier_steps = {step_of(path) for path in committed(self.folder)}

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.finish(hurry=error is not None)

    def next_request(self) -> float:
        """Return what rank 0 requests of all ranks, once each time; it is sent to every rank and
        passed to :meth:`accept_request` there at the same step. That is a save that is due by the
        clock, or a save for which training pauses because the last one failed; else 0."""
        if not self.world.is_rank_zero or self._flight is not None:
            return 0.0
        if self._failed:
            self._failed = False
            return _PAUSE
        if self.every_s is None or time.monotonic() - self._since < self.every_s:
            return 0.0
        self._since = time.monotonic()
        return _SAVE

    def accept_request(self, request: float, num_begun: int) -> None:
        """Keep a request until the next save. ``num_begun``: of :attr:`num_begun` when the request
        was made; a save that was begun since then has satisfied it."""
        if num_begun == self.num_begun:
            self._request = max(self._request, request)

    def is_due(self, step: int) -> bool:
        """Return whether a save is requested, or due at this step; the same on all ranks."""
        return self._request > 0 or bool(self.every_steps and step % self.every_steps == 0)

    def resume_at(self, step: int, is_own: bool) -> None:
        """The run continues from the checkpoint of ``step``, which lies in this run's folder if
        ``is_own``."""
        self.first_step = step
        self.last_step = step if is_own else None

    @property
    def is_writing(self) -> bool:
        """Whether a save is being written beside the training."""
        return self._flight is not None

    @PROGRESS.during("saving")
    def save(
        self, step: int, make_parts: MakeParts, meta: CheckpointMeta, *, must_succeed: bool
    ) -> None:
        """Save the state of ``step``, unless it is saved or being saved. A collective.

        Where it cannot be written, an event says so, and training goes on, or stands still until it
        can be. With ``must_succeed`` it is waited for, a save of this very step that failed in the
        background is made once more, and where that fails too (and the run does not stand still for
        it) every rank raises the same RunError.
        """
        request, self._request = self._request, 0.0
        if step == self.last_step:
            if not must_succeed:
                return
            self._land(wait=True)
            if self._agree(self._error) is None:
                return
        self._land(wait=True)
        lost = self.world.lost
        self._since = time.monotonic()
        self.num_begun += 1
        self._earlier_steps.discard(step)
        background = self.background and not must_succeed and request != _PAUSE
        error = self._begin(step, make_parts, meta, background)
        if isinstance(error, ClaimLostError):
            raise error
        # once more without the rank that was lost
        while error is not None and must_succeed and self.world.lost != lost:
            lost = self.world.lost
            error = self._begin(step, make_parts, meta, background=False)
        if error is not None and self.pause:
            error = self._stand_still(error, step, make_parts, meta)
        if error is not None and must_succeed:
            raise error

    def _stand_still(
        self, error: Failure, step: int, make_parts: MakeParts, meta: CheckpointMeta
    ) -> Failure | None:
        """Try again until it is written, or until a rank is asked to stop. Said once. On all
        ranks."""
        start = time.monotonic()
        found: Failure | None = error
        if self.world.is_rank_zero and not self.stop():
            logger.warning(
                f"training is paused at step {step} (`recovery.on_save_error: pause`) until the"
                f" checkpoint can be written: {error.what}"
            )
        while found is not None and not self._wait_for_retry():
            found = self._begin(step, make_parts, meta, background=False, is_retry=True)
        if found is None and self.world.is_rank_zero:
            logger.info(
                "the checkpoint is written: training goes on after"
                f" {time.monotonic() - start:.0f} s"
            )
        return found

    def _wait_for_retry(self) -> bool:
        """True where some rank is asked to stop."""
        deadline = time.monotonic() + _RETRY_S
        while time.monotonic() < deadline and not self.stop():
            PROGRESS.tick()  # nobody hangs here
            time.sleep(min(_RETRY_S, 0.1))
        with uncounted():
            return self.world.sum(float(self.stop()))[0] > 0

    def poll(self) -> None:
        """Say what has become of a save in the background, where it has ended. Called at every
        step; no collective."""
        if self._flight is not None and self._flight.ended:
            self._land(wait=False)

    def finish(self, hurry: bool = False) -> None:
        """Wait for the save in flight. ``hurry``: the run has failed, and other ranks may be
        gone."""
        if self._flight is not None and hurry:
            self._flight.patience_s = _HURRY_S
        self._land(wait=True)

    def _begin(
        self,
        step: int,
        make_parts: MakeParts,
        meta: CheckpointMeta,
        background: bool,
        is_retry: bool = False,
    ) -> Failure | None:
        """Write a checkpoint, or begin to. Returns the error on which all ranks agree.
        ``is_retry``: it is known already."""
        start = time.perf_counter()
        aside, problem = None, None
        if self.world.is_rank_zero:
            try:
                aside = writer.prepare(self.folder, step, self.world.size)
            except OSError as error:
                problem = writer.reason_of(error)
        parts = make_parts()
        if background:
            try:
                parts = self._copy.take(parts)
            except (RuntimeError, MemoryError) as error:
                problem = f"no memory on the host for the copy (set `async_save: false`): {error}"
        share = _RankShare(
            writer.ShardWriter.here(parts),
            aside,
            problem,
            self._copy.unpinned,
            # a remote rank sees no folder to say so in
            is_idle=self.side is not None and self.side.is_remote and not parts,
            is_broken=self.side is not None and self.side.is_broken,
        )
        with uncounted():
            shares: list[_RankShare | None] = self.world.gather_objects(share)
        known = {rank: item for rank, item in enumerate(shares) if item is not None}
        senders = self._senders(known)
        aside = next((share.aside for share in known.values() if share.aside is not None), None)
        problems = [(rank, share.problem) for rank, share in known.items() if share.problem]
        if self.world.is_rank_zero and aside is not None:
            # A rank that the others do without, or that has nothing to send.
            for rank in range(len(shares)):
                if rank not in known or known[rank].is_idle:
                    writer.write_part(aside, rank, len(shares), ())
        self._warn_unpinned(known)
        if aside is None and not problems:
            problems = [(0, "the rank that led it has ended")]
        flight = InFlightSave(
            self,
            step,
            self.world.first,
            self.world.is_rank_zero,
            parts,
            meta,
            aside,
            [writer.ShardWriter.here(()) if share is None else share.process for share in shares],
            senders,
            frozenset(step for step in self._earlier_steps if step > self.first_step),
            start,
        )
        if problems:
            rank, text = problems[0]
            flight.fail(text + (f" (on rank {rank})" if self.world.size > 1 else ""))
        elif background:
            self._flight, self.last_step, self._error = flight, step, None
            flight.start()
            flight.blocked_s = time.perf_counter() - start
            return None
        else:
            flight.run(PROGRESS.tick if self.side is not None else lambda: None)
        failure = self._agree(flight.error)
        is_leader_lost = flight.leader in self.world.lost
        if failure is None and is_leader_lost and not (self.folder / name_of(step)).is_dir():
            failure = flight.not_led()
        flight.blocked_s = time.perf_counter() - start
        if failure is None:
            self.last_step, self._error = step, None
        if failure is None or not is_retry:
            self._say(flight)
        return failure

    def _senders(self, known: dict[int, _RankShare]) -> list[int]:
        """The ranks that send what they own of this save to rank 0. Makes new connections if an
        earlier transfer failed on some rank. The same on all ranks."""
        if self.side is None:
            return []
        if any(share.is_broken for share in known.values()) and not self.world.lost:
            self.side.reopen()
        return [
            rank for rank in self.side.remote_ranks if rank in known and not known[rank].is_idle
        ]

    def _agree(self, error: Failure | None) -> Failure | None:
        with uncounted():
            return self.world.broadcast_object(error)

    def _land(self, wait: bool) -> None:
        """The end of the save in flight, if there is one: join it and say what became of it."""
        flight = self._flight
        if flight is None:
            return
        start = time.perf_counter()
        flight.join()
        waited_s = time.perf_counter() - start if wait else 0.0
        flight.blocked_s += waited_s
        is_new_leader = self.world.is_rank_zero and not flight.leads
        if is_new_leader and not (self.folder / name_of(flight.step)).is_dir():
            flight.error = flight.not_led()
        self._flight, self._error = None, flight.error
        self._failed = flight.error is not None and (
            self.pause or isinstance(flight.error, ClaimLostError)
        )
        if flight.saved is not None or flight.error is not None:
            self._say(flight)
        if waited_s > _LONG_WAIT_S and self.world.is_rank_zero:
            logger.warning(
                f"training stood still for {waited_s:.0f} s until the checkpoint of step"
                f" {flight.step} was written; a higher `save_steps` saves more seldom"
            )

    def _warn_unpinned(self, known: dict[int, _RankShare]) -> None:
        reasons = {rank: share.unpinned for rank, share in known.items() if share.unpinned}
        if not reasons or self._has_warned_unpinned or not self.world.is_rank_zero:
            return
        self._has_warned_unpinned = True
        logger.warning(
            f"the staging buffer of rank {', '.join(map(str, reasons))} is in pageable memory,"
            f" because pinning it failed ({next(iter(reasons.values()))}): each save pauses"
            " training for longer"
        )

    def _say(self, flight: InFlightSave) -> None:
        if not self.world.is_rank_zero:
            return
        saved = flight.saved
        event: CheckpointEvent = {
            "type": "checkpoint",
            "step": flight.step,
            "path": str(saved.path) if saved else None,
            "size_bytes": saved.size_bytes if saved else None,
            "wall_s": flight.wall_s if saved else None,
            "blocked_s": flight.blocked_s,
        }
        if self.store is not None:
            event["url"] = f"{self.store.url}/{name_of(flight.step)}"
        if flight.error is not None:
            event["error"] = str(flight.error)
        self.events.emit(event)
        for text in flight.warnings:
            logger.warning(text)


@dataclass
class InFlightSave:
    """One save, on one rank: what it writes, and on rank 0 the commit. Speaks with the other ranks
    through files alone, in the foreground or in a thread.

    Args:
        leader, leads: the rank that commits it; whether that is this one.
        aside: the hidden folder it is written in; None where it could not be made.
        writers, senders: all ranks, in order; those that send what they own to rank 0.
        superseded: steps of checkpoints that an earlier attempt wrote, beyond the one from which
            this attempt resumed.
        started: on the clock of ``time.perf_counter``.
    """

    manager: CheckpointManager
    step: int
    leader: int
    leads: bool
    parts: Sequence[TensorShard]
    meta: CheckpointMeta
    aside: Path | None
    writers: Sequence[writer.ShardWriter]
    senders: Sequence[int]
    superseded: frozenset[int]
    started: float
    blocked_s: float = 0.0
    wall_s: float | None = None
    saved: writer.SavedCheckpoint | None = None
    error: Failure | None = None
    warnings: list[str] = field(default_factory=list)
    patience_s: float = writer.STALL_S  # how long it waits for what does not move
    ended: bool = False
    transfer: str | None = None  # over the network, under way
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name=f"save-{self.step}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread. If the run has failed (``patience_s`` is shorter), a transfer that
        does not move is abandoned; it ends with the process."""
        if self._thread is None:
            return
        moved, since = -1, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.2)
            if self.patience_s == writer.STALL_S or self.transfer is None:
                continue
            side = self.manager.side
            num_moved = 0 if side is None else side.num_moved
            if moved != num_moved:
                moved, since = num_moved, time.monotonic()
            elif time.monotonic() - since > self.patience_s:
                self.fail(
                    f"{self.transfer} did not end within {self.patience_s:.0f} s after the run had"
                    " failed"
                )
                return

    def run(self, tick: Callable[[], None] = lambda: None) -> None:
        """Write this rank's part; on rank 0 wait for the others and commit. Raises nothing.
        ``tick`` is called as what travels gets on."""
        assert self.aside is not None
        side, rank, num_ranks = self.manager.side, self.manager.world.rank, len(self.writers)
        try:
            if side is None or not side.is_remote:
                writer.write_part(self.aside, rank, num_ranks, self.parts)
            elif self.parts:  # else rank 0 knows from the gather that began the save
                self.transfer = "the transfer to rank 0"
                transfer.send_part(side, rank, num_ranks, self.parts, tick)
            if self.leads and side is not None:
                self.transfer = "the transfer from the ranks that do not see the run's folder"
                transfer.receive_parts(side, self.aside, self.senders, num_ranks, tick)
                self.transfer = None
            if self.leads:
                self._commit(tick)
        finally:
            self.parts = ()
            self.ended = True

    def _commit(self, tick: Callable[[], None]) -> None:
        assert self.aside is not None
        manager = self.manager
        try:
            records = writer.wait_for_parts(self.aside, self.writers, lambda: self.patience_s, tick)
            self.saved = writer.commit(manager.folder, self.step, self.aside, self.meta, records)
            self.wall_s = time.perf_counter() - self.started
        except Exception as error:
            self.fail(writer.reason_of(error))
            return
        keep = manager.keep
        if manager.store is not None:
            self.transfer = f"the upload to {manager.store.url}"
            try:
                self.warnings += manager.store.upload(self.saved.path, keep, self.superseded)
            except (ClaimLostError, SaveError) as error:
                self.saved, self.error = None, error
                return
            self.wall_s = time.perf_counter() - self.started
            keep = 1
        self.warnings += prune_after(self.saved, self.step, keep, self.superseded)

    def not_led(self) -> RunError:
        """The error of a save whose leader was lost before it gave the checkpoint its name."""
        return self._not_written(f"rank {self.leader}, which led it, has ended")

    def fail(self, reason: str) -> None:
        """Remove what was begun, and keep the reason; on rank 0."""
        if not self.leads:
            return
        if self.aside is not None:
            shutil.rmtree(self.aside, ignore_errors=True)
        self.error = self._not_written(reason)

    def _not_written(self, reason: str) -> RunError:
        size_bytes = sum(process.size_bytes for process in self.writers)
        return writer.not_written(self.manager.folder, self.step, size_bytes, reason)

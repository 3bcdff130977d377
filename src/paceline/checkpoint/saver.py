"""Saves of a running training: in the foreground, or in threads that write from a copy while the
training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.checkpoint.format import name_of
from paceline.checkpoint.in_flight import HURRY_S, InFlightSave
from paceline.checkpoint.remote import CheckpointStore, ClaimLostError
from paceline.checkpoint.staging import StagingBuffer
from paceline.checkpoint.store import committed, step_of
from paceline.checkpoint.writer import ShardWriter, clear_debris, prepare, reason_of, write_part
from paceline.core.errors import RunError
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
#: How often a save is tried again while the run stands still for it.
_RETRY_S = 5.0
#: What rank 0 may request of all ranks (:meth:`CheckpointManager.next_request`): an ordinary save,
#: or one for which training pauses.
_SAVE, _PAUSE = 1.0, 2.0


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

    def __init__(
        self,
        world: Communicator,
        folder: Path,
        keep: int | None,
        events: EventLog,
        *,
        background: bool,
        every_steps: int | None = None,
        every_s: float | None = None,
        pause: bool = False,
        stop: Callable[[], bool] = lambda: False,
        side: SideGroup | None = None,
        store: CheckpointStore | None = None,
    ) -> None:
        self.world = world
        self.folder = folder
        self.keep = keep
        self.events = events
        self.background = background
        self.every_steps = every_steps
        self.every_s = every_s
        self.pause = pause
        self.stop = stop
        self.side = side
        self.store = store
        self.first_step = 0  # from which this attempt resumed
        self.last_step: int | None = None  # saved, or being saved in the background
        self.num_begun = 0  # saves; the last one at:
        self._since = time.monotonic()
        self._request = 0.0  # of rank 0, to all ranks
        self._failed = False  # the first rank has a failed save to tell of
        self._flight: InFlightSave | None = None
        # of the last save in the background; known to rank 0 alone
        self._error: Failure | None = None
        self._copy = StagingBuffer(world.device)
        self._said_unpinned = False
        if world.is_rank_zero:
            clear_debris(folder)
        self._found = {step_of(one) for one in committed(folder)}  # by earlier lives

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def save(
        self, step: int, make_parts: MakeParts, meta: dict[str, Any], *, must_succeed: bool
    ) -> None:
        """Save the state of ``step``, unless it is saved or being saved. A collective.

        Where it cannot be written, an event says so, and training goes on, or stands still until it
        can be. With ``must_succeed`` it is waited for, a save of this very step that failed in the
        background is made once more, and where that fails too (and the run does not stand still for
        it) every rank raises the same RunError.
        """
        with PROGRESS.during("saving"):
            self._save(step, make_parts, meta, must_succeed)

    def _save(
        self, step: int, make_parts: MakeParts, meta: dict[str, Any], must_succeed: bool
    ) -> None:
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
        self._found.discard(step)
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
        self, error: Failure, step: int, make_parts: MakeParts, meta: dict[str, Any]
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
            found = self._begin(step, make_parts, meta, background=False, quiet=True)
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
            self._flight.patience_s = HURRY_S
        self._land(wait=True)

    def _begin(
        self,
        step: int,
        make_parts: MakeParts,
        meta: dict[str, Any],
        background: bool,
        quiet: bool = False,
    ) -> Failure | None:
        """Write a checkpoint, or begin to. Returns the error on which all ranks agree; ``quiet``:
        it is known already."""
        start = time.perf_counter()
        aside, problem = self._prepare(step)
        parts = make_parts()
        if background:
            try:
                parts = self._copy.take(parts)
            except (RuntimeError, MemoryError) as caught:
                problem = f"no memory on the host for the copy (set `async_save: false`): {caught}"
        remote = self.side is not None and self.side.is_remote
        idle = remote and not parts  # sees no folder to say so in
        broken = self.side is not None and self.side.is_broken
        with uncounted():
            told: list[Any] = self.world.gather_objects(
                (ShardWriter.here(parts), aside, problem, self._copy.unpinned, idle, broken)
            )
        senders = self._senders(told)
        asides = [one[1] for one in told if one is not None and one[1] is not None]
        problems = [
            (rank, one[2])
            for rank, one in enumerate(told)
            if one is not None and one[2] is not None
        ]
        if self.world.is_rank_zero and asides:
            # A rank that the others do without, or that has nothing to send.
            for rank in (rank for rank, one in enumerate(told) if one is None or one[4]):
                write_part(asides[0], rank, len(told), ())
        self._say_unpinned(
            {
                rank: one[3]
                for rank, one in enumerate(told)
                if one is not None and one[3] is not None
            }
        )
        if not asides and not problems:
            problems = [(0, "the rank that led it has ended")]
        writers = [ShardWriter.here(()) if one is None else one[0] for one in told]
        superseded = frozenset(one for one in self._found if one > self.first_step)
        aside = asides[0] if asides else None
        ways = (self.side, senders, self.store)
        flight = InFlightSave(
            self.world,
            self.folder,
            step,
            parts,
            meta,
            aside,
            writers,
            self.keep,
            superseded,
            start,
            *ways,
        )
        if problems:
            rank, text = problems[0]
            flight.fail(text + (f" (on rank {rank})" if self.world.size > 1 else ""))
        elif background:
            self._flight, self.last_step = flight, step
            self._error = None
            flight.start()
            flight.blocked_s = time.perf_counter() - start
            return None
        else:
            flight.run(PROGRESS.tick if self.side is not None else lambda: None)
        error = self._agree(flight.error)
        if (
            error is None
            and flight.leader in self.world.lost
            and not (self.folder / name_of(step)).is_dir()
        ):
            error = flight.not_led()
        flight.blocked_s = time.perf_counter() - start
        if error is None:
            self.last_step, self._error = step, None
        if error is None or not quiet:
            self._say(flight)
        return error

    def _senders(self, told: Sequence[Any]) -> list[int]:
        """The ranks that send what they own of this save to rank 0. Makes new connections if an
        earlier transfer failed on some rank. The same on all ranks."""
        if self.side is None:
            return []
        if any(one is not None and one[5] for one in told) and not self.world.lost:
            self.side.reopen()
        return [
            rank for rank in self.side.remote_ranks if told[rank] is not None and not told[rank][4]
        ]

    def _prepare(self, step: int) -> tuple[Path | None, str | None]:
        if not self.world.is_rank_zero:
            return None, None
        try:
            return prepare(self.folder, step, self.world.size), None
        except OSError as error:
            return None, reason_of(error)

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
        if (
            self.world.is_rank_zero
            and not flight.leads
            and not (self.folder / name_of(flight.step)).is_dir()
        ):
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

    def _say_unpinned(self, reasons: dict[int, str]) -> None:
        if not reasons or self._said_unpinned or not self.world.is_rank_zero:
            return
        self._said_unpinned = True
        where = f" of rank {', '.join(map(str, reasons))}" if self.world.size > 1 else ""
        logger.warning(
            f"the copy{where} that is saved from in the background lies in ordinary memory, for no"
            " more could be pinned: training stands still longer at each save"
            f" ({next(iter(reasons.values()))})"
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

"""Saves of a running training: in the foreground, or in threads that write from a copy while the training goes on."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.core.errors import RunError
from paceline.core.events import EventLog
from paceline.engine.checkpoint import prune
from paceline.engine.checkpoint_format import name_of
from paceline.engine.checkpoint_write import (
    STALL_S,
    Saved,
    Writer,
    clear_debris,
    commit,
    not_written,
    prepare,
    reason_of,
    wait_for_parts,
    write_part,
)
from paceline.engine.host_copy import HostCopy
from paceline.parallel.parts import Part
from paceline.world.group import World
from paceline.world.traffic import uncounted

MakeParts = Callable[[], list[Part]]

#: A wait for an earlier save is worth a word from so many seconds on.
_LONG_WAIT_S = 10.0
#: How long a run that failed waits for its ranks to end what they are writing.
_HURRY_S = 20.0


class Saver:
    """Saves the state of a run below ``folder`` (``RUN/checkpoints``), each rank what it owns. Use it in a ``with``, so that
    what is being written when the training ends is waited for.

    Args:
        keep: how many checkpoints are kept; None keeps all.
        background: let training go on while a save is written, from a copy in the host's memory of what this rank owns. One
            save is in flight at most.
    """

    def __init__(self, world: World, folder: Path, keep: int | None, events: EventLog, *, background: bool) -> None:
        self.world = world
        self.folder = folder
        self.keep = keep
        self.events = events
        self.background = background
        self.last_step: int | None = None  # saved, or being saved in the background
        self._flight: _Flight | None = None
        self._error: RunError | None = None  # of the last save in the background; known to rank 0 alone
        self._copy = HostCopy(world.device)
        self._said_unpinned = False
        if world.is_first:
            clear_debris(folder)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish(hurry=error is not None)

    def save(self, step: int, make_parts: MakeParts, meta: dict[str, Any], *, must_succeed: bool) -> None:
        """Save the state of ``step``, unless it is saved or being saved. A collective.

        Where it cannot be written, training goes on: an event says so. With ``must_succeed`` it is waited for, a save of this
        very step that failed in the background is made once more, and where that fails too every rank raises the same RunError.
        """
        if step == self.last_step:
            if not must_succeed:
                return
            self._land(wait=True)
            if self._agree(self._error) is None:
                return
        self._land(wait=True)
        lost = self.world.lost
        error = self._begin(step, make_parts, meta, background=self.background and not must_succeed)
        while error is not None and must_succeed and self.world.lost != lost:  # once more without the rank that was lost
            lost = self.world.lost
            error = self._begin(step, make_parts, meta, background=False)
        if error is not None and must_succeed:
            raise error

    def poll(self) -> None:
        """Say what has become of a save in the background, where it has ended. Called at every step; no collective."""
        if self._flight is not None and self._flight.ended:
            self._land(wait=False)

    def finish(self, hurry: bool = False) -> None:
        """Wait for the save in flight. ``hurry``: the run has failed, and other ranks may be gone."""
        if self._flight is not None and hurry:
            self._flight.patience_s = _HURRY_S
        self._land(wait=True)

    def _begin(self, step: int, make_parts: MakeParts, meta: dict[str, Any], background: bool) -> RunError | None:
        """Write a checkpoint, or begin to. Returns the error on which all ranks agree."""
        start = time.perf_counter()
        aside, problem = self._prepare(step)
        parts = make_parts()
        if background:
            try:
                parts = self._copy.take(parts)
            except (RuntimeError, MemoryError) as caught:
                problem = f"no memory on the host for the copy (set `async_save: false`): {caught}"
        with uncounted():
            told: list[Any] = self.world.gather_objects((Writer.here(parts), aside, problem, self._copy.unpinned))
        asides = [one[1] for one in told if one is not None and one[1] is not None]
        problems = [(rank, one[2]) for rank, one in enumerate(told) if one is not None and one[2] is not None]
        if self.world.is_first and asides:
            for rank in (rank for rank, one in enumerate(told) if one is None):  # a rank that the others do without
                write_part(asides[0], rank, len(told), ())
        self._say_unpinned({rank: one[3] for rank, one in enumerate(told) if one is not None and one[3] is not None})
        if not asides and not problems:
            problems = [(0, "the rank that led it has ended")]
        writers = [Writer.here(()) if one is None else one[0] for one in told]
        flight = _Flight(self, step, parts, meta, asides[0] if asides else None, writers, start)
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
            flight.run()
        error = self._agree(flight.error)
        if error is None and flight.leader in self.world.lost and not (self.folder / name_of(step)).is_dir():
            error = flight.not_led()
        flight.blocked_s = time.perf_counter() - start
        if error is None:
            self.last_step, self._error = step, None
        self._say(flight)
        return error

    def _prepare(self, step: int) -> tuple[Path | None, str | None]:
        if not self.world.is_first:
            return None, None
        try:
            return prepare(self.folder, step, self.world.size), None
        except OSError as error:
            return None, reason_of(error)

    def _agree(self, error: RunError | None) -> RunError | None:
        with uncounted():
            return self.world.broadcast_object(error)  # type: ignore[return-value]

    def _land(self, wait: bool) -> None:
        """The end of the save in flight, if there is one: join it and say what became of it."""
        flight = self._flight
        if flight is None:
            return
        start = time.perf_counter()
        flight.join()
        waited_s = time.perf_counter() - start if wait else 0.0
        flight.blocked_s += waited_s
        if self.world.is_first and not flight.leads and not (self.folder / name_of(flight.step)).is_dir():
            flight.error = flight.not_led()
        self._flight, self._error = None, flight.error
        if flight.saved is not None or flight.error is not None:
            self._say(flight)
        if waited_s > _LONG_WAIT_S and self.world.is_first:
            self.events.notice(
                f"training stood still for {waited_s:.0f} s until the checkpoint of step {flight.step} was written; "
                "a higher `save_steps` saves more seldom",
                level="warning",
            )

    def _say_unpinned(self, reasons: dict[int, str]) -> None:
        if not reasons or self._said_unpinned or not self.world.is_first:
            return
        self._said_unpinned = True
        where = f" of rank {', '.join(map(str, reasons))}" if self.world.size > 1 else ""
        self.events.notice(
            f"the copy{where} that is saved from in the background lies in ordinary memory, for no more could be pinned: "
            f"training stands still longer at each save ({next(iter(reasons.values()))})",
            level="warning",
        )

    def _say(self, flight: _Flight) -> None:
        if not self.world.is_first:
            return
        saved = flight.saved
        failed: dict[str, Any] = {} if flight.error is None else {"error": str(flight.error)}
        self.events.emit(
            "checkpoint",
            step=flight.step,
            path=str(saved.path) if saved else None,
            size_bytes=saved.size_bytes if saved else None,
            wall_s=flight.wall_s if saved else None,
            blocked_s=flight.blocked_s,
            **failed,
        )
        for text in flight.warnings:
            self.events.notice(text, level="warning")


class _Flight:
    """One save, on one rank: what it writes, and on rank 0 the commit. Speaks with the other ranks through files alone."""

    def __init__(
        self,
        saver: Saver,
        step: int,
        parts: Sequence[Part],
        meta: dict[str, Any],
        aside: Path | None,
        writers: Sequence[Writer],
        start: float,
    ) -> None:
        self.step = step
        self.parts = parts
        self.meta = meta
        self.aside = aside
        self.writers = writers
        self.started = start
        self.rank = saver.world.rank
        self.leader = saver.world.first
        self.leads = saver.world.is_first
        self.folder = saver.folder
        self.keep = saver.keep
        self.blocked_s = 0.0
        self.wall_s: float | None = None
        self.saved: Saved | None = None
        self.error: RunError | None = None
        self.warnings: list[str] = []
        self.patience_s: float | None = None
        self.ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name=f"save-{self.step}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        """Write this rank's part; on rank 0 wait for the others and commit. Raises nothing."""
        assert self.aside is not None
        try:
            write_part(self.aside, self.rank, len(self.writers), self.parts)
            if self.leads:
                self._commit()
        finally:
            self.parts = ()
            self.ended = True

    def _commit(self) -> None:
        assert self.aside is not None
        try:
            said = wait_for_parts(self.aside, self.writers, self._patience)
            self.saved = commit(self.folder, self.step, self.aside, self.meta, said)
            self.wall_s = time.perf_counter() - self.started
        except Exception as error:
            self.fail(reason_of(error))
            return
        try:
            prune(self.folder, self.keep)
        except OSError as error:
            self.warnings.append(f"older checkpoints in {self.folder} could not be removed: {reason_of(error)}")

    def _patience(self) -> float:
        return STALL_S if self.patience_s is None else self.patience_s

    def not_led(self) -> RunError:
        """The error of a save whose leader was lost before it gave the checkpoint its name."""
        size_bytes = sum(one.size_bytes for one in self.writers)
        return not_written(self.folder, self.step, size_bytes, f"rank {self.leader}, which led it, has ended")

    def fail(self, reason: str) -> None:
        """Remove what was begun, and keep the reason; on rank 0."""
        if not self.leads:
            return
        if self.aside is not None:
            shutil.rmtree(self.aside, ignore_errors=True)
        self.error = not_written(self.folder, self.step, sum(one.size_bytes for one in self.writers), reason)

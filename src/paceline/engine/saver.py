"""Saves of a running training: in the foreground, or in threads that write from a copy while the training goes on."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from paceline.core.errors import RunError
from paceline.core.events import EventLog
from paceline.engine.checkpoint import prune
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
from paceline.parallel.base import Part
from paceline.world.group import World
from paceline.world.traffic import uncounted

MakeParts = Callable[[], list[Part]]

#: A wait for an earlier save is worth a word from so many seconds on.
_LONG_WAIT_S = 10.0
#: How long a run that failed waits for its ranks to end what they are writing.
_HURRY_S = 20.0
_BLOCK_BYTES = 64 << 20


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
        self._copy = _HostCopy(world.device)
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
        error = self._begin(step, make_parts, meta, background=self.background and not must_succeed)
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
            told: list[Any] = self.world.gather_objects((Writer.here(parts), aside, problem))
        writers = [one[0] for one in told]
        problems = [(rank, one[2]) for rank, one in enumerate(told) if one[2] is not None]
        flight = _Flight(self, step, parts, meta, told[0][1], writers, start)
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
        self._flight, self._error = None, flight.error
        self._say(flight)
        if waited_s > _LONG_WAIT_S and self.world.is_first:
            self.events.notice(
                f"training stood still for {waited_s:.0f} s until the checkpoint of step {flight.step} was written; "
                "a higher `save_steps` saves more seldom",
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
            if self.rank == 0:
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

    def fail(self, reason: str) -> None:
        """Remove what was begun, and keep the reason; on rank 0."""
        if self.rank != 0:
            return
        if self.aside is not None:
            shutil.rmtree(self.aside, ignore_errors=True)
        self.error = not_written(self.folder, self.step, sum(one.size_bytes for one in self.writers), reason)


@dataclass
class _Block:
    memory: torch.Tensor
    used: int = 0


class _HostCopy:
    """Copies of parts in the host's memory, pinned where there is an accelerator. The memory is kept for the next save."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type != "cpu"
        self._blocks: list[_Block] = []

    def take(self, parts: Sequence[Part]) -> list[Part]:
        """The parts with copies of their tensors, good until the next call."""
        for block in self._blocks:
            block.used = 0
        place = 0
        copies = []
        for part in parts:
            place, memory = self._room(place, part.tensor.numel() * part.tensor.element_size())
            copy = memory.view(part.tensor.dtype).view(part.tensor.shape)
            copy.copy_(part.tensor, non_blocking=self.pinned)
            copies.append(replace(part, tensor=copy, key=None))
        if self.pinned:
            torch.accelerator.synchronize()
        return copies

    def _new(self, size_bytes: int) -> torch.Tensor:
        if self.pinned:
            try:
                return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # the device or the system pins no more: the copy is slower, and as good
                self.pinned = False
        return torch.empty(size_bytes, dtype=torch.uint8)

    def _room(self, place: int, size_bytes: int) -> tuple[int, torch.Tensor]:
        # Blocks in order: the same parts find the same room at every save.
        while True:
            if place == len(self._blocks):
                size = max(_BLOCK_BYTES if self.pinned else size_bytes, size_bytes)
                self._blocks.append(_Block(self._new(size)))
            block = self._blocks[place]
            if block.used + size_bytes <= block.memory.numel():
                room = block.memory[block.used : block.used + size_bytes]
                block.used += -(-size_bytes // 16) * 16  # so that each tensor lies at a multiple of its item
                return place, room
            place += 1

"""A save of a checkpoint on one rank: writing the shards, committing and uploading them."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.checkpoint import transfer, writer
from paceline.checkpoint.format import CheckpointMeta, name_of
from paceline.checkpoint.remote import CheckpointStore, ClaimLostError
from paceline.checkpoint.store import prune_after
from paceline.core.errors import RunError, SaveError
from paceline.distributed.communicator import Communicator
from paceline.distributed.side_group import SideGroup
from paceline.distributed.timing.progress import PROGRESS
from paceline.parallel.state import TensorShard

Failure = RunError | ClaimLostError


class SaveSettings(Protocol):
    """Where and how checkpoints are saved; see
    :class:`~paceline.checkpoint.saver.CheckpointManager`."""

    world: Communicator
    folder: Path
    keep: int | None
    side: SideGroup | None
    store: CheckpointStore | None
    best_steps: tuple[int, ...]


@dataclass
class PendingSave:
    """A save on one rank, in the foreground or in a thread. It writes the rank's shards and, on the
    leader, commits the checkpoint. Ranks communicate only through files.

    Args:
        leader, is_leader: the rank that commits the checkpoint; whether this rank is the leader.
        staging_dir: the hidden folder to write to; None if it could not be created.
        writers, senders: all ranks, in order; those that send their shards to rank 0.
        superseded: steps of the checkpoints that an earlier attempt wrote after the one from which
            this attempt resumed.
        started: start time on the clock of ``time.perf_counter``.
    """

    manager: SaveSettings
    step: int
    leader: int
    is_leader: bool
    shards: Sequence[TensorShard]
    meta: CheckpointMeta
    staging_dir: Path | None
    writers: Sequence[writer.ShardWriter]
    senders: Sequence[int]
    superseded: frozenset[int]
    started: float
    blocked_s: float = 0.0
    wall_s: float | None = None
    saved: writer.SavedCheckpoint | None = None
    error: Failure | None = None
    warnings: list[str] = field(default_factory=list)
    timeout_s: float = writer.STALL_S  # how long to wait while nothing is written or sent
    has_ended: bool = False
    progress: int = 0  # increases whenever bytes were written or sent
    transfer: str | None = None  # the network transfer in progress
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name=f"save-{self.step}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread. If the run has failed, ``timeout_s`` is shorter, and a stalled
        transfer is abandoned; its thread ends with the process."""
        if self._thread is None:
            return
        written = self.progress
        progress, since = -1, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.2)
            if written != self.progress:
                written = self.progress
                PROGRESS.tick()
            if self.timeout_s == writer.STALL_S or self.transfer is None:
                continue
            side = self.manager.side
            num_moved = 0 if side is None else side.num_moved
            if progress != num_moved:
                progress, since = num_moved, time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                self.fail(
                    f"{self.transfer} did not finish within {self.timeout_s:.0f} s after the run"
                    " failed"
                )
                return

    def _tick(self) -> None:
        self.progress += 1

    def run(self, tick: Callable[[], None] | None = None) -> None:
        """Write this rank's shards; on the leader, wait for the other ranks and commit. Raises no
        exceptions.

        Args:
            tick: function that is called whenever bytes were written or sent.
        """
        tick = tick or self._tick
        assert self.staging_dir is not None
        side, rank, num_ranks = self.manager.side, self.manager.world.rank, len(self.writers)
        try:
            if side is None or not side.is_remote:
                writer.write_shards(self.staging_dir, rank, num_ranks, self.shards, tick)
            elif self.shards:  # rank 0 expects nothing from an idle rank
                self.transfer = "the transfer to rank 0"
                transfer.send_shards(side, rank, num_ranks, self.shards, tick)
            if self.is_leader and side is not None:
                self.transfer = "the transfer from the ranks that do not see the run's folder"
                transfer.receive_shards(side, self.staging_dir, self.senders, num_ranks, tick)
                self.transfer = None
            if self.is_leader:
                self._commit(self.staging_dir, tick)
        finally:
            self.shards = ()
            self.has_ended = True

    def _commit(self, staging_dir: Path, tick: Callable[[], None]) -> None:
        folder, keep, store = self.manager.folder, self.manager.keep, self.manager.store
        try:
            records = writer.wait_for_shards(
                staging_dir, self.writers, lambda: self.timeout_s, tick
            )
            self.saved = writer.commit(folder, self.step, staging_dir, self.meta, records)
            self.wall_s = time.perf_counter() - self.started
        except Exception as error:
            self.fail(writer.reason_of(error))
            return
        if store is not None:
            self.transfer = f"the upload to {store.url}"
            try:
                self.warnings += store.upload(
                    self.saved.path, keep, self.superseded, self.manager.best_steps, tick
                )
            except (ClaimLostError, SaveError) as error:
                self.saved, self.error = None, error
                return
            self.wall_s = time.perf_counter() - self.started
            keep = 1
        best_steps = self.manager.best_steps
        self.warnings += prune_after(self.saved, self.step, keep, self.superseded, best_steps)

    def check_commit(self) -> RunError | None:
        """Return the error to report if the leader has ended before it committed the checkpoint,
        so that another rank leads now; otherwise None."""
        has_ended = self.manager.world.first != self.leader
        if not has_ended or (self.manager.folder / name_of(self.step)).is_dir():
            return None
        return self._not_written(f"rank {self.leader}, which was to commit it, has ended")

    def fail(self, reason: str) -> None:
        """Remove what was written and record the error. Called on the leader."""
        if not self.is_leader:
            return
        if self.staging_dir is not None:
            shutil.rmtree(self.staging_dir, ignore_errors=True)
        self.error = self._not_written(reason)

    def _not_written(self, reason: str) -> RunError:
        size_bytes = sum(process.size_bytes for process in self.writers)
        return writer.not_written(self.manager.folder, self.step, size_bytes, reason)

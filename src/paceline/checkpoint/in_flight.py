"""One save, on one rank: what it writes, and on rank 0 the commit. Speaks with the other ranks
through files alone, in the foreground or in a thread."""

import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint import transfer
from paceline.checkpoint.format import name_of
from paceline.checkpoint.remote import CheckpointStore, ClaimLostError
from paceline.checkpoint.remote import reason_of as store_reason_of
from paceline.checkpoint.store import prune, step_of
from paceline.checkpoint.writer import (
    STALL_S,
    SavedCheckpoint,
    ShardWriter,
    commit,
    not_written,
    reason_of,
    wait_for_parts,
    write_part,
)
from paceline.core.errors import RunError, SaveError
from paceline.distributed.communicator import Communicator
from paceline.distributed.side_group import SideGroup
from paceline.parallel.state import TensorShard

#: How long a run that failed waits for its ranks to end what they are writing.
HURRY_S = 20.0


class InFlightSave:
    """Args: aside: the hidden folder it is written in; None where it could not be made. writers:
    all ranks, in order. keep: checkpoints that are kept; None: all. superseded: steps of
    checkpoints that an earlier attempt wrote, beyond the one from which this attempt resumed.
    start: when the save was begun, on the clock of ``time.perf_counter``. side: the group over
    which ranks that do not see the folder send what they own to rank 0. senders: those of them that
    own something. store: where the checkpoint is uploaded; on rank 0. The newest one alone is then
    kept in ``folder``.
    """

    def __init__(
        self,
        world: Communicator,
        folder: Path,
        step: int,
        parts: Sequence[TensorShard],
        meta: dict[str, Any],
        aside: Path | None,
        writers: Sequence[ShardWriter],
        keep: int | None,
        superseded: frozenset[int],
        start: float,
        side: SideGroup | None = None,
        senders: Sequence[int] = (),
        store: CheckpointStore | None = None,
    ) -> None:
        self.step = step
        self.parts = parts
        self.meta = meta
        self.aside = aside
        self.writers = writers
        self.started = start
        self.rank = world.rank
        self.leader = world.first
        self.leads = world.is_rank_zero
        self.folder = folder
        self.keep = keep
        self.superseded = superseded
        self.side, self.senders, self.store = side, senders, store
        self.blocked_s = 0.0
        self.wall_s: float | None = None
        self.saved: SavedCheckpoint | None = None
        self.error: RunError | ClaimLostError | None = None
        self.warnings: list[str] = []
        self.patience_s: float | None = None
        self.ended = False
        self.transfer: str | None = None  # over the network, under way
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name=f"save-{self.step}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread. If the run has failed (``patience_s`` is set), a transfer in which
        nothing moves any longer is abandoned; it ends with the process."""
        if self._thread is None:
            return
        moved, since = -1, time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.2)
            if self.patience_s is None or self.transfer is None:
                continue
            num_moved = 0 if self.side is None else self.side.num_moved
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
        try:
            if self.side is not None and self.side.is_remote:
                if self.parts:  # else rank 0 knows from the gather that began the save
                    self.transfer = "the transfer to rank 0"
                    transfer.send_part(self.side, self.rank, len(self.writers), self.parts, tick)
            else:
                write_part(self.aside, self.rank, len(self.writers), self.parts)
            if self.leads and self.side is not None:
                self.transfer = "the transfer from the ranks that do not see the run's folder"
                transfer.receive_parts(self.side, self.aside, self.senders, len(self.writers), tick)
                self.transfer = None
            if self.leads:
                self._commit(tick)
        finally:
            self.parts = ()
            self.ended = True

    def _commit(self, tick: Callable[[], None]) -> None:
        assert self.aside is not None
        try:
            said = wait_for_parts(self.aside, self.writers, self._patience, tick)
            self.saved = commit(self.folder, self.step, self.aside, self.meta, said)
            self.wall_s = time.perf_counter() - self.started
        except Exception as error:
            self.fail(reason_of(error))
            return
        if self.store is not None and not self._upload(self.store, self.saved.path):
            return
        try:
            gone = prune(self.folder, self.keep if self.store is None else 1, self.superseded)
            self._say_superseded(gone)
        except OSError as error:
            self.warnings.append(
                f"older checkpoints in {self.folder} could not be removed: {reason_of(error)}"
            )

    def _upload(self, store: CheckpointStore, path: Path) -> bool:
        self.transfer = f"the upload to {store.url}"
        try:
            store.publish(path)
            self.wall_s = time.perf_counter() - self.started
        except Exception as error:
            self.saved = None
            self.error = (
                error if isinstance(error, ClaimLostError) else _not_uploaded(store, path, error)
            )
            return False
        try:
            store.prune(self.keep, self.superseded)
        except Exception as error:
            self.warnings.append(
                f"older checkpoints in {store.url} could not be removed: {store_reason_of(error)}"
            )
        return True

    def _say_superseded(self, gone: Collection[Path]) -> None:
        names = [one.name for one in gone if step_of(one) in self.superseded]
        if names:
            self.warnings.append(
                f"removed from {self.folder}: {', '.join(names)}, of an earlier attempt of this run"
                f" beyond the step from which it resumed; {name_of(self.step)} takes their place"
            )

    def _patience(self) -> float:
        return STALL_S if self.patience_s is None else self.patience_s

    def not_led(self) -> RunError:
        """The error of a save whose leader was lost before it gave the checkpoint its name."""
        size_bytes = sum(one.size_bytes for one in self.writers)
        return not_written(
            self.folder, self.step, size_bytes, f"rank {self.leader}, which led it, has ended"
        )

    def fail(self, reason: str) -> None:
        """Remove what was begun, and keep the reason; on rank 0."""
        if not self.leads:
            return
        if self.aside is not None:
            shutil.rmtree(self.aside, ignore_errors=True)
        self.error = not_written(
            self.folder, self.step, sum(one.size_bytes for one in self.writers), reason
        )


def _not_uploaded(store: CheckpointStore, path: Path, error: Exception) -> SaveError:
    return SaveError(
        f"the checkpoint {path} could not be uploaded to {store.url}: {store_reason_of(error)}",
        fix=(
            "check the connection and the credentials; the same command resumes from it, and"
            " earlier checkpoints are untouched"
        ),
    )

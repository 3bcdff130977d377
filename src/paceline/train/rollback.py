"""Where a run goes back to after a loss spike, and what it reports then
(``recovery.rewind_on_spike``).

The batch at which the loss jumped is skipped from then on. Its step is counted, so that schedule
and order of samples continue as they would have. The losses that a loss is compared with and the
skipped steps are saved with each checkpoint, so a run that is killed and resumes decides as one
that was not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import store
from paceline.config.schema.recovery import RecoveryConfig
from paceline.core.events import EventLog
from paceline.core.run_dir import RunDir
from paceline.health.loss_spikes import LossSpike
from paceline.train.state import TrainState

_SKIPPED, _RECENT = "skipped_batches", "recent_losses"


@dataclass(frozen=True)
class RollbackTarget:
    """The checkpoint to go back to. ``path``: None if there is none; ``step``: its number of
    updates, or 0; ``is_own``: it lies in this run's folder."""

    path: str | None = None
    step: int = 0
    is_own: bool = False

    def is_exhausted(self, skipped_batches: Collection[int], settings: RecoveryConfig) -> bool:
        """Return whether too many batches were skipped since this checkpoint."""
        num_skipped = sum(step >= self.step for step in skipped_batches)
        return num_skipped >= settings.max_restarts


def find_target(run_dir: RunDir, step: int, resumed_from: str | None) -> RollbackTarget:
    """Return the newest intact checkpoint of at most ``step`` updates, or the one that this attempt
    resumed from."""
    for path in reversed(store.committed(run_dir.checkpoints)):
        if store.verify(path) is None:
            stored_step = int(store.read_meta(path)["step"])
            if stored_step <= step:
                return RollbackTarget(str(path), stored_step, True)
    if resumed_from is None:
        return RollbackTarget()
    path = Path(resumed_from)
    is_own = path.resolve().parent == run_dir.checkpoints.resolve()
    return RollbackTarget(str(path), int(store.read_meta(path)["step"]), is_own)


def report_rollback(events: EventLog, step: int, spike: LossSpike, target: RollbackTarget) -> None:
    """Emit the ``rewind`` event and its notice. ``step``: of the spike, counted from 0."""
    to_step = step if target.path is None else target.step
    has_median = not math.isnan(spike.median)
    median = spike.median if has_median else None
    events.emit(
        "rewind", file_only=True, step=step + 1, to_step=to_step, loss=spike.loss, median=median
    )
    text = f"the loss jumped to {spike.loss:.4g}"
    if has_median:
        text += f" (its median over the last {spike.num_compared} steps is {spike.median:.4g})"
    text += (
        f"; back to the checkpoint of step {to_step}"
        if target.path is not None
        else "; there is no checkpoint before it"
    )
    text += ", and the batch of this step is left out"
    events.notice(f"step {step + 1}: {text}", level="warning")


def report_no_rollback(events: EventLog, step: int, target: RollbackTarget, limit: int) -> None:
    """Report that the run continues with a step whose loss jumped, counted from 0."""
    text = (
        f"step {step + 1}: the loss jumped again, and so many batches are left out since"
        f" step {target.step} already (`recovery.max_restarts: {limit}`)"
        " that the run goes on with this one"
    )
    events.notice(text, level="warning")


def checkpoint_meta(state: TrainState, settings: RecoveryConfig) -> dict[str, Any]:
    """Return what a checkpoint's ``meta.json`` keeps of loss spikes."""
    skipped = {_SKIPPED: sorted(state.skipped_batches)} if state.skipped_batches else {}
    recent = {_RECENT: list(state.recent_losses)} if settings.rewind_on_spike else {}
    return {**skipped, **recent}


def skipped_batches_from(meta: dict[str, Any]) -> set[int]:
    """Return the skipped batches of a checkpoint's ``meta.json``."""
    return set(meta.get(_SKIPPED, ()))


def recent_losses_from(meta: dict[str, Any], settings: RecoveryConfig) -> deque[float]:
    """Return the recent losses of a checkpoint's ``meta.json``."""
    return deque(meta.get(_RECENT, ()), maxlen=settings.spike_window)

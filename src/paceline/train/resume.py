"""Resume from a checkpoint: at the start of a run, and after a loss spike
(``recovery.rewind_on_spike``).

After a spike, the batch at which the loss jumped is skipped. Its step is counted, so the schedule
and the order of samples do not change. The losses that a loss is compared with and the skipped
steps are saved with each checkpoint, so a run that is killed and resumes decides as one that was
not.
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import store
from paceline.checkpoint.saver import CheckpointManager
from paceline.checkpoint.train_state import load_train_state
from paceline.checkpoint.transfer import open_checkpoint
from paceline.config.schema.recovery import RecoveryConfig
from paceline.core.events import EventLog
from paceline.core.run_dir import RunDir
from paceline.health.loss_spikes import LossSpike
from paceline.train.run_spec import RunSpec
from paceline.train.state import RankContext, TrainComponents, TrainState

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


def checkpoint_meta(state: TrainState, spec: RunSpec) -> dict[str, Any]:
    """Return what a checkpoint's ``meta.json`` records of the run and of loss spikes."""
    meta: dict[str, Any] = {
        "world_size": spec.derived.world_size,
        "global_batch_size": spec.derived.global_batch_size,
        "fingerprint": spec.data.fingerprint,
        "config": spec.config.model_dump(mode="json"),
        "torch": torch.__version__,
    }
    if state.skipped_batches:
        meta[_SKIPPED] = sorted(state.skipped_batches)
    if spec.config.recovery.rewind_on_spike:
        meta[_RECENT] = list(state.recent_losses)
    return meta


def skipped_batches_from(meta: dict[str, Any]) -> set[int]:
    """Return the skipped batches of a checkpoint's ``meta.json``."""
    return set(meta.get(_SKIPPED, ()))


def recent_losses_from(meta: dict[str, Any], settings: RecoveryConfig) -> deque[float]:
    """Return the recent losses of a checkpoint's ``meta.json``."""
    return deque(meta.get(_RECENT, ()), maxlen=settings.spike_window)


def resume(
    spec: RunSpec, ctx: RankContext, components: TrainComponents, checkpoints: CheckpointManager
) -> tuple[TrainState, str | None, dict[str, Any]]:
    """Load the checkpoint that the run resumes from. Returns the state, the checkpoint's path and
    its ``meta.json``; without a checkpoint a new state, None and nothing. A collective."""
    settings = spec.config.recovery
    local_path = spec.resume_from
    is_own = (
        local_path is not None
        and Path(local_path).resolve().parent == ctx.run_dir.checkpoints.resolve()
    )
    path: str | None
    path, is_own = ctx.comm.broadcast_object((local_path, is_own))
    if path is None:
        return TrainState(recent_losses=recent_losses_from({}, settings)), None, {}
    with open_checkpoint(Path(path), checkpoints.side) as opened:
        load_train_state(components.strategy, opened, components.precision.scaler)
    step = int(opened.meta["step"])
    checkpoints.resume_at(step, is_own)
    state = TrainState(
        step=step,
        first_step=step,
        skipped_batches=skipped_batches_from(opened.meta),
        recent_losses=recent_losses_from(opened.meta, settings),
    )
    return state, path, opened.meta

"""Jumps of the loss, where ``recovery.rewind_on_spike`` is on: the run goes back to the checkpoint
before, and the batch at which the loss jumped is left out. Its step is counted, so that schedule
and order of samples go on as they would have.

The loss of every step, summed over all ranks, decides, so all come to the same answer. The losses
that it is compared with and the steps that are left out go along with each checkpoint: a run that
is killed and goes on decides as one that was not.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.checkpoint import store
from paceline.checkpoint.train_state import load_training_state
from paceline.checkpoint.transfer import open_checkpoint
from paceline.distributed.progress import PROGRESS
from paceline.distributed.traffic import uncounted
from paceline.train.rank_loss import batches_of, close_batches

if TYPE_CHECKING:
    from paceline.train.trainer import Session

_LEFT_OUT, _RECENT = "skipped_batches", "recent_losses"


class Spikes:
    """The losses of the last steps, and the batches that are left out."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.settings = session.config.recovery
        self.recent: deque[float] = deque(maxlen=self.settings.spike_window)
        self.left_out: set[int] = set()  # steps, by the number of updates before them
        self.resumed_from: str | None = None
        self._jump = (math.nan, math.nan)  # loss and median of the last one
        self._said_enough = False

    # -- a step
    # -------------------------------------------------------------------------------------------------------------
    def leave_out(self) -> bool:
        """Where the coming step's batch is left out: pass it over, and say so by True."""
        session = self.session
        if session.step not in self.left_out:
            return False
        next(session.batches)
        session.step += 1
        return True

    def jumped(self, loss_sum: torch.Tensor, count: float) -> bool:
        """Whether the loss of this step is a jump. A collective. ``loss_sum``, ``count``: of this
        rank, none of it twice."""
        if not self.settings.rewind_on_spike:
            return False
        with uncounted():
            total, whole = self.session.world.sum(float(loss_sum), count)
        loss = total / max(whole, 1.0)
        median = (
            statistics.median(self.recent)
            if 2 * len(self.recent) >= self.settings.spike_window
            else math.nan
        )
        jumped = not math.isfinite(loss) or (
            median > 0 and loss > self.settings.spike_factor * median
        )
        if not jumped:
            self.recent.append(loss)
        self._jump = (loss, median)
        return jumped

    def rewind(self) -> bool:
        """Go back before the step under way, whose update is not made, and leave its batch out from
        now on. False where that was done too often since the newest checkpoint: then the step
        counts like any other. A collective."""
        session, step = self.session, self.session.step
        loss, median = self._jump
        session.saver.finish()
        found = session.world.broadcast_object(
            self._newest(step) if session.world.is_rank_zero else None
        )
        path, target, own = found  # type: ignore[misc]
        if sum(one >= target for one in self.left_out) >= self.settings.max_restarts:
            self._say_enough(step, target)
            if math.isfinite(loss):
                self.recent.append(loss)
            return False
        self.left_out.add(step)
        to_step = step if path is None else target
        said = (loss, None if math.isnan(median) else median)
        session.events.emit(
            "rewind", file_only=True, step=step + 1, to_step=to_step, loss=said[0], median=said[1]
        )
        session.events.notice(
            f"step {step + 1}: {self._text(loss, median, to_step, path)}", level="warning"
        )
        session.strategy.optimizer_step(lambda _: False)
        if path is None:
            session.step += 1
        else:
            with PROGRESS.during("loading"):
                self._go_back(str(path), own)
        return True

    def _newest(self, step: int) -> tuple[str | None, int, bool]:
        """The newest whole checkpoint of at most ``step`` updates, its own number of updates (0
        without a checkpoint), and whether it is in this run's folder."""
        for path in reversed(store.committed(self.session.run_dir.checkpoints)):
            if store.verify(path) is None and (found := int(store.read_meta(path)["step"])) <= step:
                return str(path), found, True
        if self.resumed_from is None:
            return None, 0, False
        before = Path(self.resumed_from)
        own = before.resolve().parent == self.session.run_dir.checkpoints.resolve()
        return str(before), int(store.read_meta(before)["step"]), own

    def _go_back(self, path: str, own: bool) -> None:
        session, first = self.session, self.session.first_step
        said = len(session.strategy.notices)
        with open_checkpoint(Path(path), session.saver.side) as opened:
            load_training_state(session, opened, int(opened.meta["step"]))
        session.first_step = min(first, session.step)
        if not own:
            session.saver.last_step = None
        self.recent = deque(opened.meta.get(_RECENT, []), maxlen=self.settings.spike_window)
        session.eval_losses = {
            step: loss for step, loss in session.eval_losses.items() if step <= session.step
        }
        close_batches(session)
        session.batches = batches_of(session)
        session.events.emit("resume", step=session.step, path=path)
        for level, text in session.strategy.notices[said:]:
            session.events.notice(text, level)

    def _text(self, loss: float, median: float, to_step: int, path: object) -> str:
        jump = f"the loss jumped to {loss:.4g}"
        if not math.isnan(median):
            jump += f" (its median over the last {len(self.recent)} steps is {median:.4g})"
        back = (
            f"back to the checkpoint of step {to_step}"
            if path is not None
            else "there is no checkpoint before it"
        )
        return f"{jump}; {back}, and the batch of this step is left out"

    def _say_enough(self, step: int, target: int) -> None:
        if not self._said_enough:
            self._said_enough = True
            text = (
                f"step {step + 1}: the loss jumped again, and so many batches are left out since"
                f" step {target} already (`recovery.max_restarts: {self.settings.max_restarts}`)"
                " that the run goes on with this one"
            )
            self.session.events.notice(text, level="warning")

    # -- kept with a checkpoint
    # ----------------------------------------------------------------------------------------------
    def meta(self) -> dict[str, Any]:
        found: dict[str, Any] = {_LEFT_OUT: sorted(self.left_out)} if self.left_out else {}
        return found | ({_RECENT: list(self.recent)} if self.settings.rewind_on_spike else {})

    def resume(self, meta: dict[str, Any], path: str) -> None:
        self.left_out = set(meta.get(_LEFT_OUT, []))
        self.recent.extend(meta.get(_RECENT, []))
        self.resumed_from = path

    def figures(self) -> dict[str, Any]:
        """For the report's ``data``; empty where no batch was left out. Steps are counted from 1."""
        order = self.session.order
        samples = sum(len(order.global_batch(step)) for step in self.left_out)
        return (
            {
                "skipped_batches": {
                    "steps": sorted(step + 1 for step in self.left_out),
                    "samples": samples,
                }
            }
            if samples
            else {}
        )

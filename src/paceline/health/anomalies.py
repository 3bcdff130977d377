"""Skip updates with non-finite gradients on every rank. Rank 0 reports them, and too many in a row
end the run.

On a CPU, the gradient norm is read before the update. On an accelerator, the optimizer decides on
the device if it supports that (torch's fused optimizers), and the host reads the decision one step
later, so it never waits for the device.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config.schema.recovery import RecoveryConfig
from paceline.core.errors import RunError
from paceline.core.event_log import EventLog, effective_events
from paceline.core.events import Event, SkippedEvent
from paceline.core.formatting import rank_names
from paceline.core.processes import host_name
from paceline.core.texts import UserText
from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.distributed.host_copies import HostCopy
from paceline.distributed.traffic import uncounted
from paceline.parallel.loss_scale import LossScaler
from paceline.parallel.strategy import Strategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateDecision:
    """How it is decided whether the update of a step is made. Tensors are scalars on the device,
    which are not finite if a gradient was not.

    Args:
        grad_norm: norm of the full gradient, or None if the strategy makes the decision.
        on_device: whether the decision is made on the device, so that the host does not know it
            yet.
        local_grad: this rank's own gradient, if it is known.
        is_local: whether ranks train independently, so that each makes its own decision.
    """

    grad_norm: torch.Tensor | None
    on_device: bool = False
    local_grad: torch.Tensor | None = None
    is_local: bool = False


@dataclass(frozen=True)
class _Update:
    """The update of a step.

    Args:
        step: number of updates including this one.
        made: whether it was made as far as the host knows.
        loss: the loss of this rank.
        grad_norm: the norm of the full gradient, or None if ``made`` is known to be right.
        scale: the loss scale after the step, or None without one.
    """

    step: int
    decision: UpdateDecision
    made: bool
    loss: torch.Tensor
    grad_norm: HostCopy | None
    scale: HostCopy | None

    @property
    def was_skipped(self) -> bool:
        return not self.made if self.grad_norm is None else not _is_finite(self.grad_norm.read())


class AnomalyDetector:
    """Observes the gradients of a run. All ranks reach the same result at the same step. The
    detector never changes the optimizer.

    Args:
        scaler: the loss scaler of float16 training, or None.
    """

    def __init__(
        self,
        settings: RecoveryConfig,
        strategy: Strategy,
        scaler: LossScaler | None,
        events: EventLog,
    ) -> None:
        self.settings = settings
        self.strategy = strategy
        self.comm: Communicator = strategy.world
        self.scaler = scaler
        self.events = events
        self.error: RunError | None = None  # why the run must end
        self._num_skipped_in_row = 0  # steps without an update, up to the last
        self._pending: deque[_Update] = deque()
        # Number of updates that this rank has skipped since the last log line, if ranks train
        # independently.
        self._local_skips = 0

    # -- a step
    def decide(self, grad_norm: torch.Tensor) -> UpdateDecision:
        """Return how it is decided whether the update is made. ``grad_norm`` is the norm that the
        strategy computed."""
        strategy = self.strategy
        on_device = (
            not strategy.handles_overflow
            and not strategy.needs_rollback_on_skip
            and grad_norm.device.type != "cpu"
            and skips_on_device(strategy.optimizer, grad_norm)
            # The ranks gather in the same step which of them skipped it.
            and not self.comm.mixes_devices
        )
        return UpdateDecision(
            grad_norm=None if strategy.handles_overflow else grad_norm,
            on_device=on_device,
            local_grad=strategy.local_grad_finite() if self.comm.size > 1 else None,
            is_local=strategy.count_group is not self.comm,
        )

    def record(self, step: int, decision: UpdateDecision, made: bool, loss: torch.Tensor) -> None:
        """Record update number ``step`` of the run. ``loss`` is the loss of this rank."""
        norm, scaler = decision.grad_norm, self.scaler
        if norm is not None and norm.device.type != "cpu" and not decision.on_device:
            norm = None  # the host has waited for it before the update
        self._pending.append(
            _Update(
                step,
                decision,
                made,
                loss,
                None if norm is None else HostCopy(norm),
                None if scaler is None else HostCopy(scaler.scale),
            )
        )
        while len(self._pending) > (1 if decision.on_device else 0):
            self._read(self._pending.popleft())

    def flush(self) -> None:
        """Read the decisions that were made on the device."""
        while self._pending:
            self._read(self._pending.popleft())

    @property
    def is_exhausted(self) -> bool:
        """Whether the run must end because too many consecutive updates were skipped."""
        return self.error is not None

    def raise_if_exhausted(self) -> None:
        """Raise RunError if too many consecutive updates were skipped."""
        if self.error is not None:
            raise self.error

    # -- skipped updates
    def _read(self, update: _Update) -> None:
        if not update.was_skipped:
            self._num_skipped_in_row = 0
            return
        loss_is_finite = _is_finite(update.loss)
        if update.decision.is_local:
            self._count(update, loss_is_finite)
            self._local_skips += 1
            return
        local_grad = update.decision.local_grad
        grad_is_finite = local_grad is None or _is_finite(local_grad)
        with uncounted():
            by_rank: list[Any] = self.comm.gather_objects(
                (loss_is_finite, grad_is_finite, host_name())
            )
        bad_losses, bad_gradients = (
            [rank for rank, row in enumerate(by_rank) if row is not None and not row[column]]
            for column in (0, 1)
        )
        cause: str | None
        if bad_losses:
            cause = "loss"
        elif self.scaler is not None:
            cause = "overflow"
        else:
            cause = "gradient" if bad_gradients else None
        ranks = [] if cause == "overflow" else bad_losses or bad_gradients
        self._count(update, not bad_losses)
        origin = ""
        if self.comm.size > 1 and ranks:
            is_all = len(ranks) == len(by_rank)
            origin = f" ({cause} of {'every rank' if is_all else rank_names(ranks)})"
        elif self.comm.size > 1 and cause is None:
            origin = " (the loss of every rank is finite)"
        hosts = [by_rank[rank][2] for rank in ranks]
        text = UserText(
            "step {step}: float16 gradients overflowed; the update is skipped, the loss scale is"
            " halved"
            if cause == "overflow"
            else "step {step}: the gradient is not finite{origin}; the update is skipped",
            code="gradients-overflowed" if cause == "overflow" else "gradient-not-finite",
            step=update.step,
            origin=origin,
            rank_numbers=", ".join(map(str, ranks)),
        )
        self._report(update.step, cause, ranks, hosts, 1, text)
        self._check_limit(update.step, self._num_skipped_in_row, origin)

    def _count(self, update: _Update, losses_are_finite: bool) -> None:
        """Count a skipped step. An overflow in float16 counts only when the loss scale is already
        small, unless a loss was not finite, which no scale can prevent."""
        if update.scale is None or not losses_are_finite or float(update.scale.read()) < 1:
            self._num_skipped_in_row += 1

    def take_local_counts(self) -> tuple[float, float]:
        """Return the values to gather at a log line: the number of updates that this rank alone has
        skipped since the last call, and the number of consecutive ones."""
        num_skips, self._local_skips = self._local_skips, 0
        return float(num_skips), float(self._num_skipped_in_row)

    def report_local_skips(self, step: int, rows: Sequence[Sequence[float]]) -> None:
        """Report the updates that individual ranks skipped. ``rows`` has the
        :meth:`take_local_counts` of each rank."""
        ranks = [rank for rank, row in enumerate(rows) if row[0] > 0]
        if ranks:
            updates = int(max(row[0] for row in rows))
            text = UserText(
                "step {step}: {names} independently skipped up to {updates:update} before this"
                " step: the gradient was not finite",
                code="updates-skipped-by-ranks",
                step=step,
                names=rank_names(ranks),
                rank_numbers=", ".join(map(str, ranks)),
                updates=updates,
            )
            self._report(step, "gradient", ranks, None, updates, text)
            self._check_limit(step, int(max(row[1] for row in rows)), f" ({rank_names(ranks)})")

    def _report(
        self,
        step: int,
        cause: str | None,
        ranks: list[int],
        hosts: list[str] | None,
        updates: int,
        text: UserText,
    ) -> None:
        event: SkippedEvent = {
            "type": "skipped",
            "step": step,
            "updates": updates,
            "ranks": ranks,
            "cause": cause,
        }
        if hosts is not None:
            event["hosts"] = hosts
        self.events.emit(event, file_only=True)
        logger.warning(text)

    def _check_limit(self, step: int, in_row: int, origin: str) -> None:
        if in_row < self.settings.max_consecutive_skips or self.error is not None:
            return
        self.error = RunError(
            "{in_row} consecutive {steps} (up to step {step}) had non-finite gradients{origin}"
            " and were skipped. The last good weights are saved",
            code="too-many-nonfinite-gradients",
            allowed="fewer than `recovery.max_consecutive_skips: {max_consecutive_skips}`",
            fix="check the samples of these steps and what the task computes (a division by zero,"
            " the logarithm of zero, an empty target); lower `learning_rate`; replace"
            " `precision: fp16-mixed` by `bf16-mixed` or `32`. The same command continues"
            " after these steps (with --allow-config-change after a change of the config);"
            " `resume=RUN/checkpoints/step-…` returns to an earlier checkpoint",
            in_row=in_row,
            steps="step" if in_row == 1 else "steps",
            step=step,
            origin=origin,
            max_consecutive_skips=self.settings.max_consecutive_skips,
        )


def skips_on_device(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> bool:
    """Return whether the optimizer can skip a step by a flag on the device of ``grad_norm``, as
    torch's fused optimizers can."""
    can_skip = torch_compat.takes_found_inf(optimizer)
    return bool(can_skip) and all(
        param.device == grad_norm.device
        for group in optimizer.param_groups
        for param in group["params"]
    )


def _is_finite(value: torch.Tensor) -> bool:
    return bool(value.isfinite())


def skipped_steps(events: Sequence[Event], step: int) -> int:
    """Return how many updates this run has skipped up to ``step`` in all attempts, not counting
    steps that were rolled back."""
    return sum(
        event["updates"]
        for event in effective_events(events)
        if event["type"] == "skipped" and event["step"] <= step
    )

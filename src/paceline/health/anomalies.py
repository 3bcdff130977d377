"""Numbers that go wrong: an update without a finite gradient is skipped by every rank that would
make it, and told of; too many in a row end the run. Replicas that drift:
:mod:`paceline.health.replicas`; losses that jump: :mod:`paceline.health.loss_spikes`.

On a CPU the gradient's norm is looked at before the update. An accelerator decides for itself where
the optimizer can (torch's fused ones), and the host looks a step later: it never waits for the
device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import RunError
from paceline.core.events import Event, effective_events
from paceline.core.formatting import counted
from paceline.core.processes import host_name
from paceline.distributed.traffic import uncounted
from paceline.health.loss_spikes import Spikes
from paceline.health.replicas import check_replicas
from paceline.train.precision import skips_on_device

if TYPE_CHECKING:
    from paceline.train.trainer import Session


@dataclass(frozen=True)
class _Verdict:
    """What is known of a step's gradient. Tensors are scalars on the device, not finite where
    something was not.

    Args:
        step: updates counted, with this one.
        norm: of the whole gradient; None where ``made`` says whether it was finite.
        made: whether the update was made, where the host knows.
        loss: this rank's own.
        own: this rank's own gradient, where it is known.
        apart: the ranks train on their own, and each has skipped, or not, for itself.
    """

    step: int
    norm: torch.Tensor | None
    made: bool
    loss: torch.Tensor
    own: torch.Tensor | None
    apart: bool

    @property
    def bad(self) -> bool:
        return not self.made if self.norm is None else not _finite(self.norm)


class Guard:
    """Watches a session's numbers. Every rank has one, and they come to the same answers at the
    same places."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.settings = session.config.recovery
        self.spikes = Spikes(session)
        self.over: RunError | None = None  # why the run shall end
        self._row: list[int] = []  # steps without an update, up to the last
        self._unread: deque[_Verdict] = deque()
        # updates that this rank, training on its own, has skipped since the last log line
        self._untold = 0
        self._compared: int | None = None  # step at which replicas were compared last

    # -- a step
    # -------------------------------------------------------------------------------------------------------------
    def update(self, norm: torch.Tensor, loss: torch.Tensor) -> None:
        """Make the step's update, if the gradient is finite. ``norm``: as the strategy told it;
        ``loss``: of this rank. Where :attr:`over` is set then, the run shall end: :meth:`end`
        raises it when the state is saved."""
        session = self.session
        strategy, precision = session.strategy, session.precision
        apart = strategy.count_group is not session.world
        own = strategy.local_grad_finite() if session.world.size > 1 else None
        knows = strategy.handles_overflow
        late = (
            not knows
            and not strategy.needs_rollback_on_skip
            and norm.device.type != "cpu"
            and skips_on_device(strategy.optimizer, norm)
        )
        # the ranks gather who it was in the same step
        late = late and not session.world.mixes_devices
        seen = None if knows else norm
        made = strategy.optimizer_step(lambda optimizer: precision.step(optimizer, seen, late))
        if knows:
            precision.settle(made)
        self._unread.append(_Verdict(session.step + 1, seen, made, loss, own, apart))
        while len(self._unread) > (1 if late else 0):
            self._read(self._unread.popleft())

    def after_step(self) -> None:
        """Compare replicas, where it is time."""
        every = self.settings.check_replicas_steps
        if every and self.session.step % every == 0:
            self._compare()

    def before_save(self) -> None:
        """Nothing is saved of replicas that have drifted; and what is known late is known by then."""
        while self._unread:
            self._read(self._unread.popleft())
        if self.settings.check_replicas_steps:
            self._compare()

    def end(self) -> None:
        """Raises RunError where the run has no finite gradient any more."""
        if self.over is not None:
            raise self.over

    def _compare(self) -> None:
        if self._compared != self.session.step:
            self._compared = self.session.step
            check_replicas(self.session)

    # -- who skipped
    # ----------------------------------------------------------------------------------------------------------
    def _read(self, verdict: _Verdict) -> None:
        if not verdict.bad:
            self._row.clear()
            return
        if verdict.apart:
            self._count(verdict.step, lost=not _finite(verdict.loss))
            self._untold += 1
            return
        with uncounted():
            told: list[Any] = self.session.world.gather_objects(
                (
                    not _finite(verdict.loss),
                    verdict.own is not None and not _finite(verdict.own),
                    host_name(),
                )
            )
        losses, gradients = (
            [rank for rank, one in enumerate(told) if one is not None and one[at]] for at in (0, 1)
        )
        scaler = self.session.precision.scaler
        cause = (
            "loss"
            if losses
            else "overflow"
            if scaler is not None
            else "gradient"
            if gradients
            else None
        )
        ranks = [] if cause == "overflow" else losses or gradients
        self._count(verdict.step, lost=bool(losses))
        whose = "" if self.session.world.size == 1 else _whose(cause, ranks, len(told))
        self._tell(
            verdict.step,
            cause,
            ranks,
            [told[rank][2] for rank in ranks],
            1,
            _sentence(cause, whose),
        )
        self._judge(verdict.step, len(self._row), whose)

    def _count(self, step: int, lost: bool) -> None:
        """Count a skipped step. An overflow in float16 only counts once the loss scale is small.
        ``lost``: the loss was not finite, so no scale would help."""
        scaler = self.session.precision.scaler
        if scaler is None or lost or float(scaler.scale) < 1:
            self._row.append(step)

    def own(self) -> tuple[float, float]:
        """For the line that is gathered at a log line: updates that this rank alone has skipped
        since the last, and how many steps in a row."""
        return float(self._untold), float(len(self._row))

    def hear(self, rows: Sequence[Sequence[float]]) -> None:
        """What :meth:`own` is on each rank."""
        self._untold = 0
        ranks = [rank for rank, row in enumerate(rows) if row[0] > 0]
        if ranks:
            many = int(max(row[0] for row in rows))
            text = (
                f"{_ranks(ranks)} skipped {counted(many, 'update')} up to this step, each its own:"
                " the gradient was not finite"
            )
            self._tell(self.session.step, "gradient", ranks, None, many, text)
            self._judge(
                self.session.step, int(max(row[1] for row in rows)), f", on {_ranks(ranks)}"
            )

    def _tell(
        self,
        step: int,
        cause: str | None,
        ranks: list[int],
        hosts: list[str] | None,
        many: int,
        text: str,
    ) -> None:
        more = {} if hosts is None else {"hosts": hosts}
        self.session.events.emit(
            "skipped", file_only=True, step=step, updates=many, ranks=ranks, cause=cause, **more
        )
        self.session.events.notice(f"step {step}: {text}", level="warning")

    def _judge(self, step: int, in_row: int, whose: str) -> None:
        if in_row < self.settings.max_skipped_steps or self.over is not None:
            return
        self.over = RunError(
            f"{counted(in_row, 'step')} in a row, up to step {step}, had no finite gradient{whose},"
            " and no update was made in them. The state with its last good weights is saved",
            allowed=f"fewer than `recovery.max_skipped_steps: {self.settings.max_skipped_steps}`",
            fix=(
                "look at the samples of these steps and at what the task computes (a division by"
                " zero, the logarithm of zero, an empty target); lower `learning_rate`; under"
                " `precision: fp16-mixed`, set `bf16-mixed` or `32`. The same command goes on"
                " behind these steps (with --allow-config-change under another config);"
                " `resume=RUN/checkpoints/step-…` goes further back"
            ),
        )

    # -- kept with a checkpoint
    # ----------------------------------------------------------------------------------------------
    def meta(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint must know, beside the state: goes into its
        ``meta.json``."""
        return self.spikes.meta()

    def resume(self, meta: dict[str, Any], path: str) -> None:
        """The reverse, of the checkpoint ``path``. Steps in a row are counted anew."""
        self.spikes.resume(meta, path)


def _finite(value: torch.Tensor) -> bool:
    return bool(value.isfinite())


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _whose(cause: str | None, ranks: Sequence[int], num_ranks: int) -> str:
    if cause == "overflow":
        return ""
    if not ranks:
        return ", though each rank's loss was"
    who = "every rank" if len(ranks) == num_ranks else _ranks(ranks)
    return f": the {cause} of {who} was not"


def _sentence(cause: str | None, whose: str) -> str:
    if cause == "overflow":
        return "float16 gradients overflowed; the update was skipped, the loss scale is halved"
    return f"the gradient is not finite{whose}; the update was skipped"


def skipped_steps(events: Sequence[Event], step: int) -> int:
    """For the report: updates that this run has skipped up to ``step``, over all its lives; none of
    what was gone back over."""
    return sum(one["updates"] for one in effective_events(events, "skipped") if one["step"] <= step)

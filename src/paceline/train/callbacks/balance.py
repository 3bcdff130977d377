"""Give each rank a share of the micro-batches in proportion to its speed (``parallel.balance``).

With ``speed``, the forward and backward passes of every rank are timed in the first steps, and
micro-batches are assigned in proportion if that is predicted to speed up a step by at least 10 %.
The next steps are timed to confirm it: if they take longer, the previous shares are restored for
the rest of the run. Later measurements, every hundred steps, change the shares only if two in a
row agree. Every rank makes the same decision after the same step, from numbers that all ranks
have. The shares are part of each checkpoint's ``meta.json``, and every change emits a ``balance``
event.
"""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from paceline.checkpoint.format import BalanceRecord
from paceline.checkpoint.saver import CheckpointManager
from paceline.config.schema import Config
from paceline.core.events import BalanceEvent
from paceline.core.formatting import counts_text, short_duration, weighted_shares
from paceline.data.loader import MicroBatch
from paceline.data.pipeline import DataPipeline
from paceline.distributed.timing.progress import ProgressTracker
from paceline.distributed.traffic import uncounted
from paceline.observe.metrics import StepMetrics
from paceline.parallel.balance import is_divisible, rank_weights, shares_by_speed, step_seconds
from paceline.parallel.strategy import Strategy
from paceline.tasks.base import num_positions
from paceline.train.callbacks.base import Callback
from paceline.train.state import RankContext, StepResult, TrainState

#: Number of steps that are not measured after the start or a change, and steps per measurement.
_WARMUP_STEPS, _MEASURED_STEPS = 2, 5
#: Steps between later measurements.
_INTERVAL_STEPS = 100
#: Predicted speedup of a step required to assign shares for the first time, and to change them
#: later.
_MIN_GAIN, _MIN_LATER_GAIN = 1.1, 1.2
#: New shares are withdrawn if steps take more than this many times as long as before.
_MAX_SLOWDOWN = 1.05

#: ``first``: no shares yet; ``check``: new shares are compared with the previous ones; ``watch``:
#: later measurements; ``confirm``: the second of two in a row; ``fixed``: nothing is measured.
Phase = Literal["first", "check", "watch", "confirm", "fixed"]


@dataclass(frozen=True)
class MeasuredStep:
    """The measurement of one step on this rank. ``compute_s`` is the time of forward and backward
    without waits for other ranks; ``positions`` is the number of positions of its
    micro-batches, padding included."""

    compute_s: float
    step_s: float
    positions: int
    num_micro_batches: int


class ComputeTimer:
    """Times forward and backward of a step without the waits for other ranks. On an accelerator it
    records events on the stream."""

    def __init__(self, device: torch.device, progress: ProgressTracker) -> None:
        self.device = device
        self.progress = progress
        self._marks: list[Any] = []

    def begin(self) -> None:
        self._marks = [self._mark()]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude a wait for other ranks that is queued on an accelerator's stream. On a CPU all
        waits are excluded anyway."""
        # Only the first micro-batch waits.
        if self.device.type != "cpu" and len(self._marks) == 1:
            self._marks.append(self._mark())
            yield
            self._marks.append(self._mark())
        else:
            yield

    def end(self) -> None:
        self._marks.append(self._mark())

    def seconds(self) -> float:
        """Return the measured time in seconds, or NaN if :meth:`end` was not called."""
        if self.device.type == "cpu":
            if len(self._marks) != 2:
                return math.nan
            (begin_s, begin_wait_s), (end_s, end_wait_s) = self._marks
            return float(end_s - begin_s - (end_wait_s - begin_wait_s))
        if len(self._marks) != 4:
            return math.nan
        begin, wait_begin, wait_end, end = self._marks
        end.synchronize()
        return float(begin.elapsed_time(end) - wait_begin.elapsed_time(wait_end)) / 1000

    def _mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter(), self.progress.waited_s
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


@dataclass
class Measured:
    """A finished measurement, the same on every rank. ``seconds`` is the time per micro-batch of
    each rank; ``step_s`` is the time of a step."""

    seconds: list[float]
    step_s: float


@dataclass
class Balancer(Callback):
    """Decides on the shares of the replicas, which :attr:`DataPipeline.shares` holds."""

    config: Config
    ctx: RankContext
    strategy: Strategy
    data: DataPipeline
    metrics: StepMetrics
    checkpoints: CheckpointManager
    phase: Phase = "fixed"
    _timer: ComputeTimer | None = field(default=None, init=False)
    _steps: list[MeasuredStep] = field(default_factory=list, init=False)
    _positions: int = field(default=0, init=False)
    _wait_steps: int = field(default=_WARMUP_STEPS, init=False)
    _left: int = field(default=_MEASURED_STEPS, init=False)
    # The previous shares and the seconds that a step took with them.
    _previous: tuple[tuple[int, ...], float] | None = field(default=None, init=False)
    _unsent: BalanceEvent | None = field(default=None, init=False)

    # -- at the start
    @property
    def _num_micro_batches(self) -> int:
        return self.data.num_replicas * self.data.accumulation

    @property
    def is_equal(self) -> bool:
        """Whether the config makes all shares equal."""
        return self.config.parallel.balance == "equal"

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of micro-batches per step of each rank."""
        return self.data.shares or self.data.equal_shares

    def begin(self, step: int, record: BalanceRecord | None) -> None:
        """Choose the initial shares. A collective if weights are configured.

        Args:
            step: step that the run starts from.
            record: record in the checkpoint that the run resumes from, or None.
        """
        balance = self.config.parallel.balance
        stored = None if record is None else tuple(record["shares"])
        is_supported = self.strategy.capabilities.unequal_shares and is_divisible(
            self.data.num_replicas, self._num_micro_batches
        )
        if balance == "equal" or not is_supported:
            if stored is not None and len(set(stored)) > 1:
                reason = (
                    "`parallel.balance` is `equal` now"
                    if balance == "equal"
                    else "this run has too few micro-batches"
                )
                text = f"the checkpoint's shares {counts_text(stored)} are not used: {reason}"
                self._note(step, "reset", text)
            return
        total = self._num_micro_batches
        if isinstance(balance, list):
            comm = self.strategy.world
            weights = rank_weights(self.config, comm.gather_objects(comm.env.local_rank))
            self._set(tuple(weighted_shares(total, weights)))
            text = f"micro-batches per step by weight: {counts_text(self.counts)}"
            self._note(step, "weights", text)
        elif record is None or stored is None:
            self.phase = "first"
        elif len(stored) == self.data.num_replicas and sum(stored) == total:
            self._set(stored)
            self.phase = "fixed" if record["fixed"] else "watch"
            text = f"micro-batches per step as in the checkpoint: {counts_text(stored)}"
            self._note(step, "checkpoint", text)
        else:
            self.phase = "first"
            text = (
                f"the checkpoint's shares {counts_text(stored)} do not fit"
                f" {self.data.num_replicas} ranks with {total} micro-batches per step; shares are"
                " equal until speeds have been measured"
            )
            self._note(step, "reset", text)

    def announce(self) -> None:
        """Emit the event of :meth:`begin`, after ``run_start``."""
        if self._unsent is not None:
            self.ctx.events.emit(self._unsent)
            self._unsent = None

    def _set(self, shares: tuple[int, ...]) -> None:
        self.data.set_shares(None if shares == self.data.equal_shares else shares)

    def _note(self, step: int, reason: str, text: str) -> None:
        self._unsent = {
            "type": "balance",
            "step": step,
            "shares": list(self.counts),
            "reason": reason,
            "text": f"balance: {text}",
        }

    # -- a step
    def begin_step(self, micro_batches: Sequence[MicroBatch]) -> ComputeTimer | None:
        """Return a started timer if this step is measured, else None."""
        strategy = self.strategy
        self._timer = strategy.on_computed = None
        if self.phase == "fixed" or self._wait_steps > 0:
            return None
        self._timer = ComputeTimer(strategy.world.device, self.ctx.progress)
        self._positions = sum(_num_positions(batch) for batch in micro_batches)
        strategy.on_computed = self._timer.end
        self._timer.begin()
        return self._timer

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        """Record a step. After the last step of a measurement, decide on the shares: a
        collective."""
        if self.phase == "fixed":
            return
        if self._wait_steps > 0:
            self._wait_steps -= 1
            return
        self._record()
        self._left -= 1
        if self._left > 0:
            return
        measured = self._gather()
        self._steps, self._left = [], _MEASURED_STEPS
        if measured is None:
            self._wait_steps = _INTERVAL_STEPS
        else:
            self._decide(state.step, measured)

    def _record(self) -> None:
        # A step that skips its batch has no timer.
        if self._timer is None or self.checkpoints.is_writing:
            return
        compute_s = self._timer.seconds()
        if compute_s > 0 and self._positions > 0:
            num_micro_batches = self.counts[self.data.replica]
            self._steps.append(
                MeasuredStep(
                    compute_s, self.metrics.last_step_s, self._positions, num_micro_batches
                )
            )

    def _gather(self) -> Measured | None:
        """Return the medians over the steps, or None if any rank has no time. A collective."""
        comm, steps = self.strategy.world, self._steps
        local = [0.0, 0.0, 0.0]
        if steps:
            local = [
                statistics.median(step.compute_s / step.positions for step in steps),
                sum(step.positions for step in steps)
                / sum(step.num_micro_batches for step in steps),
                statistics.median(step.step_s for step in steps),
            ]
        table = torch.zeros(comm.size, len(local), dtype=comm.wide_dtype, device=comm.device)
        table[comm.rank] = torch.tensor(local, dtype=comm.wide_dtype)
        with uncounted():
            comm.wait(comm.all_reduce(table))
        rows: list[list[float]] = comm.read(table).tolist()
        if min(row[0] for row in rows) <= 0:
            return None
        positions = statistics.fmean(row[1] for row in rows)
        return Measured([row[0] * positions for row in rows], max(row[2] for row in rows))

    # -- decisions
    def _decide(self, step: int, measured: Measured) -> None:
        if self.phase == "check":
            self._check(step, measured)
            return
        proposed = tuple(shares_by_speed(self._num_micro_batches, measured.seconds))
        gain = step_seconds(self.counts, measured.seconds) / step_seconds(
            proposed, measured.seconds
        )
        if self.phase == "first" and gain < _MIN_GAIN:
            self._emit(step, "measured", f"{_times(measured.seconds)}; shares stay equal", measured)
            self.phase, self._wait_steps = "watch", _INTERVAL_STEPS
        elif self.phase == "watch" and gain >= _MIN_LATER_GAIN:
            self.phase = "confirm"
        elif self.phase == "first" or (self.phase == "confirm" and gain >= _MIN_LATER_GAIN):
            before, self._previous = self.counts, (self.counts, measured.step_s)
            self._set(proposed)
            text = (
                f"{_times(measured.seconds)}; {_change_text(before, proposed)}, predicted speedup"
                f" {gain:.2f}×"
            )
            self._emit(step, "measured", text, measured, gain)
            self.phase, self._wait_steps = "check", _WARMUP_STEPS
        else:
            self.phase, self._wait_steps = "watch", _INTERVAL_STEPS

    def _check(self, step: int, measured: Measured) -> None:
        """Keep the new shares unless steps take longer with them."""
        assert self._previous is not None
        previous, step_s = self._previous
        self._previous = None
        self.phase, self._wait_steps = "watch", _INTERVAL_STEPS
        if measured.step_s > _MAX_SLOWDOWN * step_s:
            before = self.counts
            self._set(previous)
            self.phase = "fixed"
            text = (
                f"a step takes {short_duration(measured.step_s)} instead of"
                f" {short_duration(step_s)}; {_change_text(before, previous)} again, and stay so"
                " for the rest of the run"
            )
            self._emit(step, "withdrawn", text, measured)

    def _emit(
        self, step: int, reason: str, text: str, measured: Measured, gain: float | None = None
    ) -> None:
        self.ctx.events.emit(
            {
                "type": "balance",
                "step": step,
                "shares": list(self.counts),
                "reason": reason,
                "seconds": [round(seconds, 7) for seconds in measured.seconds],
                "gain": gain,
                "text": f"balance: {text}",
            }
        )

    # -- checkpoints
    def record(self) -> BalanceRecord | None:
        """Return the record for a checkpoint's ``meta.json``, or None before shares are chosen."""
        if (
            self.config.parallel.balance == "equal"
            or self.phase == "first"
            or self.data.num_replicas == 1
        ):
            return None
        return {"shares": list(self.counts), "fixed": self.phase == "fixed"}


def _num_positions(batch: MicroBatch) -> int:
    try:
        return num_positions(batch.data)
    except TypeError:  # batches of a user's task may contain no tensor
        return max(1, batch.samples)


def _times(seconds: Sequence[float]) -> str:
    texts = [f"rank {rank} {short_duration(value)}" for rank, value in enumerate(seconds)]
    if len(texts) <= 8:
        return f"a micro-batch takes {', '.join(texts)}"
    fastest, slowest = seconds.index(min(seconds)), seconds.index(max(seconds))
    return f"a micro-batch takes between {texts[fastest]} and {texts[slowest]}"


def _change_text(before: Sequence[int], after: Sequence[int]) -> str:
    return f"micro-batches per step {counts_text(before)} → {counts_text(after)}"

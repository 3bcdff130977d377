"""Whether a method that saves traffic pays on the link that was measured; and how much of plain
ddp's step is communication."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.core import formatting
from paceline.core.log import log_notices
from paceline.distributed.link import Link, measure_link
from paceline.distributed.traffic import uncounted
from paceline.observe.metrics import StepMetrics
from paceline.parallel.comm_profile import CommProfile, CommTimes
from paceline.parallel.protocols import comm_profile

if TYPE_CHECKING:
    from pydantic import JsonValue

    from paceline.distributed.communicator import Communicator
    from paceline.parallel.base import Strategy

logger = logging.getLogger(__name__)

#: A gain of less is within what measuring and predicting can miss.
_MARGIN = 0.05
#: Steps to judge by: at the end at least, and for the first word.
_FEWEST, _FIRST_WORD = 5, 10
#: From this share of plain ddp's step on the report says what would help.
_MUCH = 0.5
#: The last so many steps tell where the time goes.
_KEPT = 100

_short = formatting.short_duration


@dataclass(frozen=True)
class StepTimings:
    """Seconds of a step, means over ``steps`` steps. Ranks that are early wait for the last one
    under any method, so in each step the rank that waits least tells what communication takes, and
    the one that computes longest when it can begin.

    Args:
        step_s: of a step in all.
        wait_s: least over the ranks, standing still for communication; None where the host does not
            wait (an accelerator's own queue does).
        computing_s: most over the ranks, not standing still; likewise.
        spent: as :class:`~paceline.parallel.comm_profile.CommTimes`, a step, a mean over the ranks.
        num_threads: that compute a step.
    """

    steps: int
    step_s: float
    wait_s: float | None
    computing_s: float | None
    spent: CommTimes
    num_threads: int = 1


@dataclass(frozen=True)
class CommVerdict:
    """``pays``: None where it cannot be known. ``ddp``: what is predicted for plain ddp; None for
    what cannot be."""

    pays: bool | None
    why: str
    ddp: dict[str, float | None]


@dataclass(frozen=True)
class Method:
    """What is judged: of :class:`~paceline.parallel.comm_profile.CommProfile` what these names say,
    and how long what it sends in a step should take on the link; None where that is not known."""

    name: str
    without: str
    buckets: Sequence[int]
    beside: bool
    sends_s: float | None = None


def judge(method: Method, link: Link, measured: StepTimings | None) -> CommVerdict:
    """Compare the measured step with the one that plain ddp would make.

    That one computes as long as the measured one does without waiting for communication and without
    the method's own work (in each step the slowest rank counts), and then waits for what of its
    all-reduces, as the link was measured, backward does not hide
    (:meth:`~paceline.distributed.link.Link.exposed_s`). Work in a thread beside the step slows the
    step down on a CPU: what of it was not waited for is taken from the step's threads. Waiting that
    neither the link nor the method's work accounts for, as on a busy machine, would be plain ddp's
    too.

    It pays where a step is faster by more than 5 %, and does not where it is no faster. Steps are
    compared, not what they learn.
    """
    buckets, total = method.buckets, sum(method.buckets)
    all_reduce_s = sum(link.all_reduce_s(size) for size in buckets)
    sends = f"its all-reduce of {formatting.size(total)} would take {_short(all_reduce_s)}"
    ddp: dict[str, float | None] = {"all_reduce_s": all_reduce_s, "wait_s": None, "step_s": None}
    if measured is None:
        return CommVerdict(None, "too few steps were made to measure what a step takes", ddp)
    step_s = measured.step_s
    if measured.wait_s is None or measured.computing_s is None:
        return _judge_by_bounds(method.without, sends, all_reduce_s, step_s, ddp)
    spent = measured.spent
    taken, other_s = spent.method_s, 0.0
    if method.beside:
        taken = max(0.0, spent.method_s - measured.wait_s) / measured.num_threads
    if method.sends_s is not None:
        working_s = spent.method_s + spent.moments_s if method.beside else 0.0
        other_s = max(0.0, measured.wait_s - method.sends_s - working_s)
    waits = link.exposed_s(buckets, spent.backward_s)
    ddp_step = max(0.0, measured.computing_s - taken) + spent.moments_s + waits + other_s
    ddp |= {"wait_s": waits + other_s, "step_s": ddp_step}
    gain = 1 - step_s / ddp_step if ddp_step > 0 else 0.0
    ours = f"a step takes {_short(step_s)}, {_short(measured.wait_s)} of it waiting"
    hidden = all_reduce_s - waits
    hides = (
        f"of which backward hides {_short(hidden)}"
        if hidden > 1e-5
        else "none of it hidden by backward"
    )
    theirs = f"plain ddp's about {_short(ddp_step)}: {sends}, {hides}"
    if other_s > _MARGIN * step_s:
        theirs += (
            f", and {_short(other_s)} of waiting that the link does not explain (a busy machine?)"
            " would be its too"
        )
    if gain > _MARGIN:
        return CommVerdict(True, f"{ours}; {theirs}", ddp)
    work = f"; {method.name} itself computes for {_short(spent.method_s)}"
    if gain <= 0:
        return CommVerdict(False, f"{ours}; {theirs}{work}. Fix: {method.without}", ddp)
    return CommVerdict(None, f"{ours}; {theirs}{work}. The difference is too small to tell", ddp)


def _judge_by_bounds(
    without: str, sends: str, all_reduce_s: float, step_s: float, ddp: dict[str, float | None]
) -> CommVerdict:
    """Without the seconds of waiting: plain ddp's step is no shorter than its all-reduce, and
    longer than the measured one by that at most."""
    ours = f"a step takes {_short(step_s)}"
    if all_reduce_s > (1 + _MARGIN) * step_s:
        return CommVerdict(
            True, f"{ours}; plain ddp's could not be shorter than that: {sends}", ddp
        )
    if all_reduce_s <= _MARGIN * step_s:
        return CommVerdict(
            False, f"{ours}; plain ddp would add little at most: {sends}. Fix: {without}", ddp
        )
    hidden = "how much of it backward would hide is not seen from the host of an accelerator"
    return CommVerdict(
        None,
        f"{ours}; of plain ddp {sends}, and {hidden}. Train a few steps without: {without}",
        ddp,
    )


def judge_plain(
    measured: StepTimings | None, link: Link | None, buckets: Sequence[int]
) -> str | None:
    """What there is to say of plain ddp's communication; None where it is half of a step at most,
    or not known."""
    share = wait_share(measured)
    if measured is None or share is None or share <= _MUCH:
        return None
    takes = (
        f"communication takes {100 * share:.0f} % of a step ({_short(measured.wait_s)} of"
        f" {_short(measured.step_s)})"
    )
    if link is None:
        return takes
    exposed = link.exposed_s(buckets, measured.spent.backward_s)
    by_link = (
        f"on this link ({rates(link)}, measured at the end) the all-reduce of"
        f" {formatting.size(sum(buckets))} makes it wait"
    )
    found = f"{takes}; {by_link} {_short(exposed)}"
    if exposed < _MUCH * (measured.wait_s or 0.0):
        return (
            f"{found}: the link is not what is slow. Do the ranks have enough processors, and equal"
            " work?"
        )
    return (
        f"{found}. `compression.method: powersgd` or `topk` send less, `parallel.mode: diloco` less"
        " often"
    )


def wait_share(measured: StepTimings | None) -> float | None:
    """Of a step, the share in which it waited; None where not known."""
    if measured is None or measured.wait_s is None or measured.step_s <= 0:
        return None
    return measured.wait_s / measured.step_s


def rates(link: Link) -> str:
    """``94 Mbit/s, 10 ms``."""
    rate = (
        formatting.bit_rate(link.bandwidth_bytes_s)
        if link.bandwidth_bytes_s
        else "no limit of bandwidth seen"
    )
    return f"{rate}, {_short(link.latency_s)}"


class CommAdvisor:
    """Watches the steps of a run, and says whether its way of bringing replicas together pays.

    What is judged by begins after the first step of this life of the run, and after the method's
    warm-up; of a method with a period, whole periods. Making one, and every call, is a collective.
    """

    def __init__(
        self,
        exchange: CommProfile,
        world: Communicator,
        meter: StepMetrics,
        first_step: int,
        last_step: int,
    ) -> None:
        self.exchange = exchange
        self.world = world
        self.meter = meter
        self.after = max(first_step + 1, exchange.warmup)
        self.last_step = last_step
        self.steps = 0  # in whole periods
        #: (seconds of a step, of waiting in it): of the last whole periods, and of the one that has
        #: begun.
        self._kept: deque[tuple[float, float]] = deque(
            maxlen=exchange.period * max(1, _KEPT // exchange.period)
        )
        self._begun: list[tuple[float, float]] = []
        self._before = self._spent = CommTimes(0.0)
        #: The conclusion, at the end of the run; None if there is nothing to report.
        self.summary: str | None = None
        saves = exchange.method is not None
        #: Over which plain ddp would sum gradients, and over which the method sends.
        self.link = measure_link(exchange.group) if saves else None
        self.line = (
            measure_link(exchange.line)
            if saves and exchange.line.size != exchange.group.size
            else self.link
        )

    # -- at the start
    def opening(self) -> tuple[str, str] | None:
        """What was measured and what it means, as (level, text); None where nothing was."""
        link, line, exchange = self.link, self.line, self.exchange
        if link is None or line is None:
            return None
        buckets = exchange.bucket_bytes
        plain_s = sum(link.all_reduce_s(size) for size in buckets)
        ours_s = self.sends_s(line)
        took = (
            f"{formatting.ranks(link.num_ranks)}, measured in {_short(link.wall_s)} with"
            f" {formatting.size(link.sent_bytes)}"
        )
        mean = " in the mean" if exchange.period > 1 else ""
        text = (
            f"link: {rates(link)} ({took} a rank, which count for no step); plain ddp would"
            f" all-reduce {formatting.size(sum(buckets))} a step = {_short(plain_s)};"
            f" {exchange.method} sends {formatting.size(exchange.sent_bytes)}{mean} ="
            f" {_short(ours_s)}"
        )
        if ours_s >= plain_s:
            return "warning", f"{text}: does not pay on this link. Fix: {exchange.without}"
        return (
            "info",
            (
                f"{text}: saves {_short(plain_s - ours_s)} at most, less what {exchange.method}"
                " computes and backward hides"
            ),
        )

    # -- step by step
    def after_step(self, step: int) -> tuple[str, str] | None:
        """Count a step, the number ``step`` of the run. After the first few: how it stands, as
        (level, text)."""
        if step <= self.after:
            self._before = self._spent = self.exchange.spent()
            return None
        self._begun.append((self.meter.last_step_s, self.meter.last_wait_s))
        if len(self._begun) < self.exchange.period:
            return None
        before, self.steps = self.steps, self.steps + len(self._begun)
        self._kept.extend(self._begun)
        self._begun = []
        self._spent = self.exchange.spent()
        if not before < _FIRST_WORD <= self.steps or self.link is None or step >= self.last_step:
            return None
        measured = self.measured()
        if measured is None:
            return None
        verdict = self._verdict(measured)
        return (
            "warning" if verdict.pays is False else "info",
            f"step {step}: {self.sentence(verdict)}",
        )

    def measured(self) -> StepTimings | None:
        """Over all ranks; None where too few steps were made."""
        # the same collectives on every rank
        if self.world.device.type != "cpu" or self.world.mixes_devices:
            return self._measured_on_accelerators()
        if self.steps < _FEWEST:
            return None
        now, before, kept = self._spent, self._before, len(self._kept)
        spent = [
            now.backward_s - before.backward_s,
            now.method_s - before.method_s,
            now.moments_s - before.moments_s,
        ]
        most = torch.tensor(
            [(step_s - wait_s, -wait_s) for step_s, wait_s in self._kept], dtype=torch.float64
        )
        with uncounted():
            step_s, *spent = self.world.sum(
                sum(step_s for step_s, _ in self._kept) / kept, *(one / self.steps for one in spent)
            )
            self.world.wait(self.world.all_reduce(most, dist.ReduceOp.MAX))
        ranks = self.world.size
        computing_s, least = most.mean(dim=0).tolist()
        return StepTimings(
            kept,
            step_s / ranks,
            -least,
            computing_s,
            CommTimes(*(one / ranks for one in spent)),
            torch.get_num_threads(),
        )

    def _measured_on_accelerators(self) -> StepTimings | None:
        """Waits are not seen from the host, and single steps neither; what logging has waited for
        is."""
        if self.meter.train_steps < _FEWEST:
            return None
        return StepTimings(
            self.meter.train_steps,
            self.meter.train_s / self.meter.train_steps,
            None,
            None,
            CommTimes(0.0),
        )

    def sends_s(self, line: Link) -> float:
        """Seconds that what the method sends in a step should take."""
        return line.seconds(self.exchange.messages, self.exchange.sent_bytes)

    def _verdict(self, measured: StepTimings | None) -> CommVerdict:
        assert self.link is not None
        assert self.line is not None
        exchange = self.exchange
        sends_s = None if exchange.has_other_collectives else self.sends_s(self.line)
        method = Method(
            str(exchange.method), exchange.without, exchange.bucket_bytes, exchange.beside, sends_s
        )
        return judge(method, self.link, measured)

    def sentence(self, verdict: CommVerdict) -> str:
        """For a person."""
        how = {True: "pays", False: "does not pay", None: "may or may not pay"}[verdict.pays]
        return f"{self.exchange.method} {how} on this link: {verdict.why}"

    # -- at the end
    def report(self) -> dict[str, JsonValue]:
        """The report's ``communication``; :attr:`link` was measured, or is None."""
        measured, exchange = self.measured(), self.exchange
        share = wait_share(measured)
        figures: dict[str, JsonValue] = {
            "step_s": measured.step_s if measured else None,
            "wait_s": measured.wait_s if measured else None,
            "wait_share": share,
            "steps_measured": measured.steps if measured else 0,
        }
        if exchange.method is None:
            if share is not None and share > _MUCH:  # the same on all ranks
                self.link = measure_link(exchange.group)
            self.summary = judge_plain(measured, self.link, exchange.bucket_bytes)
            figures = {"method": "none", **figures, "pays": None, "why": self.summary}
        else:
            verdict = self._verdict(measured)
            method_s = measured.spent.method_s if measured and measured.wait_s is not None else None
            figures |= {
                "method_s": method_s,
                "ddp": {**verdict.ddp},
                "pays": verdict.pays,
                "why": verdict.why,
            }
            self.summary = self.sentence(verdict)
        return figures


def make_advisor(
    strategy: Strategy, metrics: StepMetrics, first_step: int, last_step: int
) -> CommAdvisor | None:
    """Measure the link if the run's strategy saves traffic, and report the result; None if there is
    nothing to advise on. A collective."""
    profile = comm_profile(strategy)
    if profile is None:
        return None
    advisor = CommAdvisor(profile, strategy.world, metrics, first_step, last_step)
    opening = advisor.opening()
    if opening is not None:
        log_notices(logger, [opening])
    return advisor

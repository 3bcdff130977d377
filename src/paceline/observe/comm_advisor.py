"""Advise on communication: whether a method that reduces traffic pays on the measured link, and
what share of a plain ddp step is communication."""

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
from paceline.core.texts import UserText
from paceline.distributed.link import Link, measure_link
from paceline.distributed.traffic import uncounted
from paceline.observe.metrics import StepMetrics
from paceline.parallel.comm_profile import CommProfile, CommTimes

if TYPE_CHECKING:
    from pydantic import JsonValue

    from paceline.distributed.communicator import Communicator
    from paceline.parallel.strategy import Strategy

logger = logging.getLogger(__name__)

#: A smaller gain is within the error of measurement and prediction.
_MARGIN = 0.05
#: Steps needed for a verdict at the end of the run, and steps after which the first one is logged.
_MIN_STEPS, _FIRST_VERDICT = 5, 10
#: The share of a plain ddp step above which the report suggests a method.
_HIGH_SHARE = 0.5
#: The number of recent steps that are evaluated.
_MAX_STEPS = 100

_short = formatting.short_duration


@dataclass(frozen=True)
class StepTimings:
    """Timings of a step in seconds, as means over ``steps`` steps. With any method, fast ranks wait
    for the slowest, so the shortest wait and the longest computation of any rank count for each
    step.

    Args:
        step_s: duration of a full step.
        wait_s: time blocked on communication, the minimum over the ranks; None if the host does not
            wait because the queue of an accelerator does.
        computing_s: the rest of the step, the maximum over the ranks; None if ``wait_s`` is None.
        spent: see :class:`~paceline.parallel.comm_profile.CommTimes`; per step, the mean over the
            ranks.
        num_threads: number of threads that compute a step.
    """

    steps: int
    step_s: float
    wait_s: float | None
    computing_s: float | None
    spent: CommTimes
    num_threads: int = 1


@dataclass(frozen=True)
class CommVerdict:
    """Whether a method pays (None if unknown) and why. ``ddp`` has the figures predicted for plain
    ddp, which are None if unknown."""

    pays: bool | None
    why: str
    ddp: dict[str, float | None]


def evaluate(
    profile: CommProfile, sends_s: float | None, link: Link, measured: StepTimings | None
) -> CommVerdict:
    """Compare the measured step with a predicted step of plain ddp.

    The computation of a plain ddp step takes as long as in the measured step, without the work of
    the method (the slowest rank of each step counts). Then it waits for the part of its all-reduces
    that backward does not hide (:meth:`~paceline.distributed.link.Link.exposed_s`). On a
    CPU, work in a background thread slows down the step, so the part of it that the step did not
    wait for is subtracted from the computation of the step's threads. Waiting that neither the link
    nor the work of the method explains, as on a busy machine, is also added to the plain ddp step.

    A method pays if its step is more than 5 % faster, and does not pay if its step is not faster.
    The effect on convergence is not compared.

    Args:
        profile: how the strategy synchronizes replicas.
        sends_s: predicted seconds to send the data of a step over the link, or None if unknown.
        link: the measured link.
        measured: the measured step, or None if there were too few steps.
    """
    buckets, total = profile.bucket_bytes, sum(profile.bucket_bytes)
    all_reduce_s = sum(link.all_reduce_s(size) for size in buckets)
    sends = f"its all-reduce of {formatting.size(total)} would take {_short(all_reduce_s)}"
    ddp: dict[str, float | None] = {"all_reduce_s": all_reduce_s, "wait_s": None, "step_s": None}
    if measured is None:
        return CommVerdict(None, "too few steps to measure the time of a step", ddp)
    step_s, spent = measured.step_s, measured.spent
    if measured.wait_s is None or measured.computing_s is None:
        return _evaluate_by_bounds(profile.opt_out, sends, all_reduce_s, step_s, ddp)
    method_s, unexplained_s = spent.method_s, 0.0
    if profile.in_background:
        method_s = max(0.0, spent.method_s - measured.wait_s) / measured.num_threads
    if sends_s is not None:
        background_s = spent.method_s + spent.moments_s if profile.in_background else 0.0
        unexplained_s = max(0.0, measured.wait_s - sends_s - background_s)
    exposed_s = link.exposed_s(buckets, spent.backward_s)
    wait_s = exposed_s + unexplained_s
    ddp_step_s = max(0.0, measured.computing_s - method_s) + spent.moments_s + wait_s
    ddp |= {"wait_s": wait_s, "step_s": ddp_step_s}
    gain = 1 - step_s / ddp_step_s if ddp_step_s > 0 else 0.0
    hidden_s = all_reduce_s - exposed_s
    hides = "none of it hidden by backward"
    if hidden_s > 1e-5:
        hides = f"and backward hides {_short(hidden_s)} of it"
    why = (
        f"a step takes {_short(step_s)}, {_short(measured.wait_s)} of it waiting;"
        f" a plain ddp step would take about {_short(ddp_step_s)}: {sends}, {hides}"
    )
    if unexplained_s > _MARGIN * step_s:
        why += (
            f", and {_short(unexplained_s)} of waiting that the link does not explain (a busy"
            " machine?) would be part of it too"
        )
    if gain > _MARGIN:
        return CommVerdict(True, why, ddp)
    why += f"; {profile.method} itself computes for {_short(spent.method_s)}"
    if gain <= 0:
        return CommVerdict(False, f"{why}. Fix: {profile.opt_out}", ddp)
    return CommVerdict(None, f"{why}. The difference is too small to tell", ddp)


def _evaluate_by_bounds(
    opt_out: str, sends: str, all_reduce_s: float, step_s: float, ddp: dict[str, float | None]
) -> CommVerdict:
    """Compare the steps if the waiting time is unknown: a plain ddp step takes at least as long as
    its all-reduce, and at most the time of its all-reduce longer than the measured step."""
    takes = f"a step takes {_short(step_s)}"
    if all_reduce_s > (1 + _MARGIN) * step_s:
        return CommVerdict(True, f"{takes}; a plain ddp step would take longer: {sends}", ddp)
    if all_reduce_s <= _MARGIN * step_s:
        why = f"{takes}; plain ddp would add little to it: {sends}. Fix: {opt_out}"
        return CommVerdict(False, why, ddp)
    return CommVerdict(
        None,
        f"{takes}; with plain ddp {sends}, and how much of it backward would hide cannot be"
        f" measured on an accelerator. To compare, train a few steps without it: {opt_out}",
        ddp,
    )


def evaluate_plain_ddp(
    measured: StepTimings | None, link: Link | None, buckets: Sequence[int]
) -> str | None:
    """Return advice on the communication of plain ddp, or None if its share of a step is unknown or
    at most one half."""
    share = wait_share(measured)
    if measured is None or share is None or share <= _HIGH_SHARE:
        return None
    takes = (
        f"communication takes {100 * share:.0f} % of a step ({_short(measured.wait_s)} of"
        f" {_short(measured.step_s)})"
    )
    if link is None:
        return takes
    exposed_s = link.exposed_s(buckets, measured.spent.backward_s)
    text = (
        f"{takes}; the all-reduce of {formatting.size(sum(buckets))} accounts for"
        f" {_short(exposed_s)} on this link ({rates(link)}, measured at the end)"
    )
    if exposed_s < _HIGH_SHARE * (measured.wait_s or 0.0):
        return (
            f"{text}: the link is not the bottleneck. Check that the ranks have enough processors"
            " and equal work"
        )
    return (
        f"{text}. `compression.method: powersgd` or `topk` send less, `parallel.mode: diloco` sends"
        " less often"
    )


def wait_share(measured: StepTimings | None) -> float | None:
    """Return the share of a step that is spent waiting, or None if unknown."""
    if measured is None or measured.wait_s is None or measured.step_s <= 0:
        return None
    return measured.wait_s / measured.step_s


def rates(link: Link) -> str:
    """Return the rates of a link as text, such as ``94 Mbit/s, 10 ms``."""
    rate = "no bandwidth limit measured"
    if link.bandwidth_bytes_s:
        rate = formatting.bit_rate(link.bandwidth_bytes_s)
    return f"{rate}, {_short(link.latency_s)}"


class CommAdvisor:
    """Measures the steps of a run, and reports whether its method of synchronizing replicas pays.

    Steps count after the first step of this attempt and after the warm-up of the method. For a
    periodic method, only complete periods count. The constructor and every method are collectives.

    Args:
        profile: how the strategy synchronizes replicas.
        world: all ranks.
        metrics: the measurements of the steps.
        first_step: the step at which this attempt begins.
        last_step: the last step of the run.

    Attributes:
        link: the link over which plain ddp would all-reduce gradients.
        method_link: the link over which the method sends.
        summary: the conclusion at the end of the run, or None if there is nothing to report.
    """

    def __init__(
        self,
        profile: CommProfile,
        world: Communicator,
        metrics: StepMetrics,
        first_step: int,
        last_step: int,
    ) -> None:
        self.profile = profile
        self.world = world
        self.metrics = metrics
        self.after = max(first_step + 1, profile.warmup)
        self.last_step = last_step
        self.steps = 0  # counted in complete periods
        #: (seconds of a step, seconds of waiting in it) of the last complete periods, and of the
        #: current one.
        self._steps_s: deque[tuple[float, float]] = deque(
            maxlen=profile.period * max(1, _MAX_STEPS // profile.period)
        )
        self._current: list[tuple[float, float]] = []
        self._before = self._spent = CommTimes(0.0)
        self.summary: str | None = None
        self.link: Link | None = None
        if profile.method is not None:
            self.link = measure_link(profile.ddp_group)
        self.method_link = self.link
        if profile.method is not None and profile.method_group.size != profile.ddp_group.size:
            self.method_link = measure_link(profile.method_group)

    # -- at the start
    def opening(self) -> tuple[str, str] | None:
        """Return the measured link and its consequences as (level, text), or None if no link was
        measured."""
        link, profile = self.link, self.profile
        if link is None or self.method_link is None:
            return None
        plain_s = sum(link.all_reduce_s(size) for size in profile.bucket_bytes)
        method_s = self.sends_s(self.method_link)
        mean = " on average" if profile.period > 1 else ""
        saved = f"saves at most {_short(plain_s - method_s)}"
        pays = method_s < plain_s
        return "info" if pays else "warning", UserText(
            "link: {rates} ({connected}, measured in {wall} with {measured} per rank, not counted"
            " as traffic of a step); plain ddp would all-reduce {plain} per step = {plain_time};"
            " {method} sends {sent}{mean} = {method_time}: {conclusion}",
            code="link-saves-time" if pays else "link-saves-no-time",
            rates=rates(link),
            connected=formatting.ranks(link.num_ranks),
            wall=_short(link.wall_s),
            measured=formatting.size(link.sent_bytes),
            plain=formatting.size(sum(profile.bucket_bytes)),
            plain_time=_short(plain_s),
            method=profile.method,
            sent=formatting.size(profile.sent_bytes),
            mean=mean,
            method_time=_short(method_s),
            conclusion=f"{saved}, less what {profile.method} computes and what backward would hide"
            if pays
            else f"does not pay on this link. Fix: {profile.opt_out}",
            saved=_short(abs(plain_s - method_s)),
            opt_out=profile.opt_out,
        )

    # -- step by step
    def after_step(self, step: int) -> tuple[str, str] | None:
        """Count a step of the run. Return the first verdict once, as (level, text), and None
        otherwise."""
        if step <= self.after:
            self._before = self._spent = self.profile.times()
            return None
        self._current.append((self.metrics.last_step_s, self.metrics.last_wait_s))
        if len(self._current) < self.profile.period:
            return None
        steps_before = self.steps
        self.steps += len(self._current)
        self._steps_s.extend(self._current)
        self._current = []
        self._spent = self.profile.times()
        is_due = steps_before < _FIRST_VERDICT <= self.steps and step < self.last_step
        measured = self.measured() if is_due and self.link is not None else None
        if measured is None:
            return None
        verdict = self._verdict(measured)
        level = "warning" if verdict.pays is False else "info"
        return level, UserText(
            "step {step}: {verdict}",
            code="communication-pays"
            if verdict.pays
            else "communication-may-pay"
            if verdict.pays is None
            else "communication-does-not-pay",
            step=step,
            verdict=self.sentence(verdict),
            method=self.profile.method,
            why=verdict.why,
        )

    def measured(self) -> StepTimings | None:
        """Return the mean timings over all ranks, or None if there were too few steps."""
        # Every rank must take the same branch, because the second one has collectives.
        if self.world.device.type != "cpu" or self.world.mixes_devices:
            return self._measured_on_accelerators()
        if self.steps < _MIN_STEPS:
            return None
        now, before, num_steps = self._spent, self._before, len(self._steps_s)
        spent = [
            now.backward_s - before.backward_s,
            now.method_s - before.method_s,
            now.moments_s - before.moments_s,
        ]
        maxima = torch.tensor(
            [(step_s - wait_s, -wait_s) for step_s, wait_s in self._steps_s], dtype=torch.float64
        )
        with uncounted():
            step_s, *spent = self.world.sum(
                sum(step_s for step_s, _ in self._steps_s) / num_steps,
                *(seconds / self.steps for seconds in spent),
            )
            self.world.wait(self.world.all_reduce(maxima, dist.ReduceOp.MAX))
        num_ranks = self.world.size
        computing_s, negative_wait_s = maxima.mean(dim=0).tolist()
        return StepTimings(
            num_steps,
            step_s / num_ranks,
            -negative_wait_s,
            computing_s,
            CommTimes(*(seconds / num_ranks for seconds in spent)),
            torch.get_num_threads(),
        )

    def _measured_on_accelerators(self) -> StepTimings | None:
        """Return the mean time of a step. On an accelerator, the host can measure neither waiting
        times nor individual steps."""
        num_steps = self.metrics.train_steps
        if num_steps < _MIN_STEPS:
            return None
        return StepTimings(num_steps, self.metrics.train_s / num_steps, None, None, CommTimes(0.0))

    def sends_s(self, link: Link) -> float:
        """Return the predicted seconds to send the method's data of a step over a link."""
        return link.seconds(self.profile.messages, self.profile.sent_bytes)

    def _verdict(self, measured: StepTimings | None) -> CommVerdict:
        assert self.link is not None
        assert self.method_link is not None
        is_alone = not self.profile.has_other_collectives
        sends_s = self.sends_s(self.method_link) if is_alone else None
        return evaluate(self.profile, sends_s, self.link, measured)

    def sentence(self, verdict: CommVerdict) -> str:
        """Return a verdict as a sentence."""
        pays = {True: "pays", False: "does not pay", None: "may or may not pay"}[verdict.pays]
        return f"{self.profile.method} {pays} on this link: {verdict.why}"

    # -- at the end
    def report(self) -> dict[str, JsonValue]:
        """Return the ``communication`` entry of the report, and set :attr:`link` and
        :attr:`summary`."""
        measured, profile = self.measured(), self.profile
        share = wait_share(measured)
        figures: dict[str, JsonValue] = {
            "step_s": measured.step_s if measured else None,
            "wait_s": measured.wait_s if measured else None,
            "wait_share": share,
            "steps_measured": measured.steps if measured else 0,
        }
        if profile.method is None:
            if share is not None and share > _HIGH_SHARE:  # the same on all ranks
                self.link = measure_link(profile.ddp_group)
            self.summary = evaluate_plain_ddp(measured, self.link, profile.bucket_bytes)
            return {"method": "none", **figures, "pays": None, "why": self.summary}
        verdict = self._verdict(measured)
        method_s = measured.spent.method_s if measured and measured.wait_s is not None else None
        self.summary = self.sentence(verdict)
        return figures | {
            "method_s": method_s,
            "ddp": {**verdict.ddp},
            "pays": verdict.pays,
            "why": verdict.why,
        }


def make_advisor(
    strategy: Strategy, metrics: StepMetrics, first_step: int, last_step: int
) -> CommAdvisor | None:
    """Return an advisor for the run, which measures the link if the strategy reduces traffic, or
    None if there is nothing to advise on. A collective."""
    profile = strategy.comm_profile
    if profile is None:
        return None
    advisor = CommAdvisor(profile, strategy.world, metrics, first_step, last_step)
    opening = advisor.opening()
    if opening is not None:
        log_notices(logger, [opening])
    return advisor

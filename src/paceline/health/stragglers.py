"""Detect ranks that are persistently slower than the others, from their step times; links that lose
packets; and processes that were paused. Uses no threads and no store.

A rank is busy while it does not wait for other ranks. The detector compares busy times, because in
a step that ends with a collective all ranks take the same time, and only the slow one does not
wait.
"""

import statistics
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: A step counts against a rank that was busy for this much longer than the median of the others, as
#: a factor and in seconds.
_FACTOR, _MIN_S = 1.3, 0.02
#: A rank that is slower by more than ``_MUCH_S`` seconds, not because it lacks a core, is
#: reported if ``_MUCH_HITS`` of the last ``_MUCH_WINDOW`` steps count against it;
_MUCH_S, _MUCH_WINDOW, _MUCH_HITS = 0.1, 5, 5
#: one that is slower by less, or because it lacks a core, if ``_HITS`` of the last ``_WINDOW``
#: steps do. On a busy host, cores are distributed unevenly for many steps.
_WINDOW, _HITS = 40, 36
#: Number of step times from which the usual noise is computed.
_NOISE_STEPS = 20
#: If step times vary so little that a smaller factor is significant: this multiple of the usual
#: noise, and at least this factor.
_NOISE_MULTIPLE, _EVEN_FACTOR = 8.0, 1.1
_TO_SIGMA = 1.4826  # from a median of absolute differences of a normal distribution
#: A straggler is reported again if it has become slower by this factor.
_AGAIN = 2.0
#: A straggler has recovered if none of this many steps counts against it.
_EVEN_STEPS = 10
#: Number of steps from which the usual difference to the others is computed for a rank that has no
#: equal (such as a pipeline stage).
_BASELINE = 10


@dataclass(frozen=True)
class RankBusyTime:
    """Times of one step of one rank, in seconds. ``busy_s`` is the time without waiting for other
    ranks. It includes ``data_s``, waiting for data, and ``delayed_s``, waiting for a core to run
    on."""

    busy_s: float
    data_s: float
    wait_s: float
    delayed_s: float = 0.0

    @property
    def compute_s(self) -> float:
        return self.busy_s - self.data_s

    @property
    def undelayed_s(self) -> float:
        """The busy time that the rank would have had with a core for itself."""
        return max(0.0, self.busy_s - self.delayed_s)


@dataclass(frozen=True)
class Straggler:
    """A slow rank. ``slower_by_s`` is the difference per step to the median of the others,
    ``share`` its parts by cause. ``is_even`` is True if the rank is as fast as the others again."""

    rank: int
    step: int
    slower_by_s: float
    share: dict[str, float]
    steps: int
    is_even: bool = False

    @property
    def cause(self) -> str:
        return max(self.share, key=lambda name: self.share[name])

    def text(self, host: str) -> str:
        """Return the report as one line of text."""
        subject = f"rank {self.rank} on {host}"
        if self.is_even:
            return f"{subject} is as fast as the other ranks again, at step {self.step:,}"
        causes = ", ".join(
            f"{name.removesuffix('_s')} {1000 * value:.0f} ms" for name, value in self.share.items()
        )
        return (
            f"{subject} is slower than the other ranks by {1000 * self.slower_by_s:.0f} ms per step"
            f" over the last {self.steps} steps up to step {self.step:,}, mostly in"
            f" {self.cause.removesuffix('_s')} ({causes}); the other ranks wait for it"
        )


@dataclass
class _History:
    """The last step times of one rank, each with the median of the others, and the last report
    about it."""

    steps: deque[tuple[RankBusyTime, RankBusyTime]] = field(
        default_factory=lambda: deque(maxlen=_WINDOW)
    )
    baseline: list[float] = field(default_factory=list)
    reported: Straggler | None = None


class StragglerDetector:
    """Compares the ranks after each step (:meth:`add`), in order.

    Args:
        kinds: the kind of each rank, or None if it does not train. Ranks of the same kind are
            compared with each other. A pipeline rank is compared with the ranks of its stage, or
            with its own first steps if there is no other.
    """

    def __init__(self, kinds: Mapping[int, str | None]) -> None:
        self.kinds = {rank: kind for rank, kind in kinds.items() if kind is not None}
        self._histories = {rank: _History() for rank in self.kinds}
        counts = Counter(self.kinds.values())
        self._without_equal = {rank for rank, kind in self.kinds.items() if counts[kind] == 1}

    def add(self, step: int, times: Mapping[int, RankBusyTime]) -> list[Straggler]:
        """Return the ranks to report at this step, including those that have recovered. ``times``
        has the times of all ranks that train."""
        if len(self.kinds) < 2:
            return []
        of_kind = {
            kind: _SortedTimes(times[rank] for rank in self.kinds if self.kinds[rank] == kind)
            for kind in self.kinds.values()
        }
        of_all = _SortedTimes(times[rank] for rank in self.kinds)
        for rank, history in self._histories.items():
            others = of_all if rank in self._without_equal else of_kind[self.kinds[rank]]
            median = others.median_without(times[rank])
            history.steps.append((times[rank], median))
            if rank in self._without_equal and len(history.baseline) < _BASELINE:
                history.baseline.append(times[rank].busy_s - median.busy_s)
        reports = [self._evaluate(rank, step) for rank in self._histories]
        return [report for report in reports if report is not None]

    def _evaluate(self, rank: int, step: int) -> Straggler | None:
        history = self._histories[rank]
        baseline_s = 0.0
        if rank in self._without_equal:
            if len(history.baseline) < _BASELINE:
                return None
            baseline_s = statistics.median(history.baseline)
        usual = [median.busy_s + baseline_s for _, median in history.steps]
        slower = [times.busy_s - median.busy_s - baseline_s for times, median in history.steps]
        undelayed = [
            times.undelayed_s - median.undelayed_s - baseline_s for times, median in history.steps
        ]
        noise_s = self._noise_s(rank) if undelayed[-1] > _MUCH_S else None
        hits = [
            slower_s > max(_MIN_S, (_FACTOR - 1) * usual_s)
            for slower_s, usual_s in zip(slower, usual, strict=True)
        ]
        much = [
            slower_s > _much_slower_s(usual_s, noise_s)
            for slower_s, usual_s in zip(undelayed, usual, strict=True)
        ]
        if len(much) >= _MUCH_WINDOW and sum(much[-_MUCH_WINDOW:]) >= _MUCH_HITS:
            window = _MUCH_WINDOW
        elif len(hits) >= _WINDOW and sum(hits) >= _HITS:
            window = _WINDOW
        else:
            was_reported = history.reported is not None and len(hits) >= _EVEN_STEPS
            if not was_reported or any(hits[-_EVEN_STEPS:]) or any(much[-_EVEN_STEPS:]):
                return None
            history.reported = None
            return Straggler(rank, step, 0.0, {}, _EVEN_STEPS, is_even=True)
        slower_by_s = statistics.median(slower[-window:])
        share = {
            f"{cause}_s": max(
                0.0,
                statistics.median(
                    getattr(times, attribute) - getattr(median, attribute)
                    for times, median in list(history.steps)[-window:]
                ),
            )
            for cause, attribute in _CAUSES.items()
        }
        straggler = Straggler(rank, step, slower_by_s, share, window)
        reported = history.reported
        if (
            reported is not None
            and slower_by_s < _AGAIN * reported.slower_by_s
            and straggler.cause == reported.cause
        ):
            return None
        history.reported = straggler
        return straggler

    def _noise_s(self, rank: int) -> float | None:
        """Return the usual noise in the times of the other ranks (with a single other rank, in the
        difference to it), or None if too few times are known."""
        others = [
            other
            for other, kind in self.kinds.items()
            if other != rank and (rank in self._without_equal or kind == self.kinds[rank])
        ]
        if len(others) == 1:
            differences = [
                times.undelayed_s - median.undelayed_s
                for times, median in self._histories[rank].steps
            ]
            center = statistics.median(differences)
            noise = [abs(difference - center) for difference in differences]
        else:
            noise = [
                abs(times.undelayed_s - median.undelayed_s)
                for other in others
                if other not in self._without_equal and self._histories[other].reported is None
                for times, median in self._histories[other].steps
            ]
        return _TO_SIGMA * statistics.median(noise) if len(noise) >= _NOISE_STEPS else None


#: Cause of a straggler → attribute of its times.
_CAUSES = {"data": "data_s", "compute": "compute_s", "communication": "wait_s"}


def _much_slower_s(usual_s: float, noise_s: float | None) -> float:
    by_factor = (_FACTOR - 1) * usual_s
    if noise_s is not None:
        by_factor = min(by_factor, max((_EVEN_FACTOR - 1) * usual_s, _NOISE_MULTIPLE * noise_s))
    return max(_MUCH_S, by_factor)


class _SortedTimes:
    """The times of a step, sorted over the ranks, to compute medians without one of them."""

    def __init__(self, times: Iterable[RankBusyTime]) -> None:
        rows = list(times)
        self._sorted = {
            name: sorted(getattr(row, name) for row in rows)
            for name in ("busy_s", "undelayed_s", "data_s", "wait_s")
        }

    def median_without(self, times: RankBusyTime) -> RankBusyTime:
        median = {
            name: _median_without(values, getattr(times, name))
            for name, values in self._sorted.items()
        }
        busy_s = median["busy_s"]
        delayed_s = max(0.0, busy_s - median["undelayed_s"])
        return RankBusyTime(busy_s, min(median["data_s"], busy_s), median["wait_s"], delayed_s)


def _median_without(ordered: list[float], value: float) -> float:
    removed, num_left = bisect_left(ordered, value), len(ordered) - 1

    def at(index: int) -> float:
        return ordered[index if index < removed else index + 1]

    return (at((num_left - 1) // 2) + at(num_left // 2)) / 2


#: The share of retransmitted segments is computed over at least this many seconds
WINDOW_S = 10.0
#: and this many segments.
_MIN_SENT = 200
#: A link that retransmits at least this share is reported. From about this share on, TCP slows down
#: markedly.
_LOSSY = 0.005
#: A link below this share has recovered.
_RECOVERED = 0.001


@dataclass(frozen=True)
class LossyLink:
    """The share of its TCP segments that a rank had to retransmit over the last ``seconds``.
    ``has_recovered`` is True if the link was reported before and no longer loses packets."""

    rank: int
    share: float
    sent: int
    seconds: float
    has_recovered: bool

    def text(self, host: str) -> str:
        """Return the report as one line of text."""
        rank = f"rank {self.rank} on {host}"
        percent = f"{100 * self.share:.2g} %"
        if self.has_recovered:
            return (
                f"the network connection of {rank} has recovered: it retransmitted {percent} of its"
                " packets"
            )
        return (
            f"{rank} retransmitted {percent} of its packets in the last {self.seconds:.0f} s: its"
            " network connection loses packets, which slows down every rank. `paceline doctor`"
            " measures the links between the hosts"
        )


class LinkMonitor:
    """Reports ranks whose connections lose packets, each once until it has recovered."""

    def __init__(self) -> None:
        self._totals: dict[int, deque[tuple[float, int, int]]] = {}
        self._reported: set[int] = set()

    def add(self, rank: int, now_s: float, sent: int, resent: int) -> LossyLink | None:
        """Return what to report, or None. ``sent`` and ``resent`` are numbers of segments since the
        rank started."""
        totals = self._totals.setdefault(rank, deque())
        if totals and sent < totals[-1][1]:
            totals.clear()  # the counts belong to a new process
        totals.append((now_s, sent, resent))
        while len(totals) > 1 and now_s - totals[1][0] >= WINDOW_S:
            totals.popleft()
        since_s, sent_before, resent_before = totals[0]
        seconds, sent, resent = now_s - since_s, sent - sent_before, resent - resent_before
        if seconds < WINDOW_S or sent < _MIN_SENT:
            return None
        share = resent / sent
        was_reported = rank in self._reported
        if not was_reported and share >= _LOSSY:
            self._reported.add(rank)
        elif was_reported and share <= _RECOVERED:
            self._reported.discard(rank)
        else:
            return None
        return LossyLink(rank, share, sent, seconds, has_recovered=was_reported)


@dataclass(frozen=True)
class Pause:
    """A process that did not run for a while in the middle of a step."""

    step: int
    seconds: float

    def text(self, rank: int, host: str) -> str:
        """Return the report as one line of text."""
        return (
            f"rank {rank} on {host} did not run for {self.seconds:.0f} s at step {self.step:,}: its"
            " process or its whole host was paused, or one of its threads blocked all others; the"
            " other ranks waited for it"
        )

"""Ranks that are persistently slower than the others, from the times of their steps. No thread, no
store.

A rank is busy in a step for as long as it does not wait for others. What is compared is that: in a
step that ends in a collective, all ranks take the same time, and the slow one alone does not wait.
"""

import statistics
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: A step counts against a rank where it was busy for so much longer than the median of the others,
#: as a factor and in seconds.
_FACTOR, _LEAST_S = 1.3, 0.02
#: Much slower by its own doing, not for lack of a core: named after as few steps as these;
_MUCH_S, _MUCH_WINDOW, _MUCH_HITS = 0.1, 5, 5
#: slower by less, or for lack of a core: after these. Who gets the cores of a host that is busy is
#: uneven for many steps.
_WINDOW, _HITS = 40, 36
#: Steps from which the usual unevenness is taken.
_NOISE_STEPS = 20
#: Where steps are so even that less than the factor stands out: so many times the usual unevenness,
#: and at least this factor.
_NOISES, _EVEN_FACTOR = 8.0, 1.1
_TO_SIGMA = 1.4826  # from a median of absolute differences, where they are normal
#: Named anew where it has become slower by so much.
_AGAIN = 2.0
#: Even again: none of so many steps counts against it.
_EVEN_STEPS = 10
#: Of a rank that has no equal (a stage of a pipeline): steps from which its usual difference from
#: the others is taken.
_BASELINE = 10


@dataclass(frozen=True)
class RankBusyTime:
    """Seconds of one step of one rank. ``busy_s``: all but the waits for others. Of them ``data_s``
    for data, and ``held_s`` without a core to run on."""

    busy_s: float
    data_s: float
    wait_s: float
    held_s: float = 0.0

    @property
    def compute_s(self) -> float:
        return self.busy_s - self.data_s

    @property
    def own_s(self) -> float:
        """What it would have taken with a core to itself."""
        return max(0.0, self.busy_s - self.held_s)


@dataclass(frozen=True)
class Straggler:
    """``slower_by_s``: a step, than the median of the others; ``share``: of it, by cause. ``even``:
    it is so no longer."""

    rank: int
    step: int
    slower_by_s: float
    share: dict[str, float]
    steps: int
    even: bool = False

    def text(self, host: str) -> str:
        who = f"rank {self.rank} on {host}"
        if self.even:
            return f"{who} is as fast as the others again, at step {self.step:,}"
        cause = max(self.share, key=lambda name: self.share[name]).removesuffix("_s")
        parts = ", ".join(
            f"{name.removesuffix('_s')} {1000 * value:.0f} ms" for name, value in self.share.items()
        )
        return (
            f"{who} is slower than the others by {1000 * self.slower_by_s:.0f} ms a step, in the"
            f" last {self.steps} up to step {self.step:,}, most of it in {cause} ({parts}); the"
            " others wait for it"
        )


@dataclass
class _Record:
    """Of one rank: its step times beside the medians of the others, newest last."""

    steps: deque[tuple[RankBusyTime, RankBusyTime]] = field(
        default_factory=lambda: deque(maxlen=_WINDOW)
    )
    first: list[float] = field(default_factory=list)
    named_s: float | None = None
    cause: str | None = None


class StragglerDetector:
    """Told of each step once (:meth:`add`), in order.

    Args:
        kinds: rank → which ranks it is like. Stages of a pipeline are not even: a rank is compared
            with those of its own stage, and where there is none with its own first steps. None: a
            rank that does not train.
    """

    def __init__(self, kinds: Mapping[int, str | None]) -> None:
        self.kinds = {rank: kind for rank, kind in kinds.items() if kind is not None}
        self._records = {rank: _Record() for rank in self.kinds}
        numbers = Counter(self.kinds.values())
        self._single = {rank for rank, kind in self.kinds.items() if numbers[kind] == 1}

    def add(self, step: int, times: Mapping[int, RankBusyTime]) -> list[Straggler]:
        """Who is named at this step, or is no longer slow. ``times``: of all ranks that train."""
        if len(self.kinds) < 2:
            return []
        of_kind = {
            kind: _Sorted(times[one] for one in self.kinds if self.kinds[one] == kind)
            for kind in self.kinds.values()
        }
        of_all = _Sorted(times[one] for one in self.kinds) if self._single else None
        for rank, record in self._records.items():
            compared = (
                of_all if rank in self._single and of_all is not None else of_kind[self.kinds[rank]]
            )
            record.steps.append((times[rank], compared.median_without(times[rank])))
            if rank in self._single and len(record.first) < _BASELINE:
                record.first.append(record.steps[-1][0].busy_s - record.steps[-1][1].busy_s)
        return [found for rank in self._records if (found := self._judge(rank, step)) is not None]

    def _others(self, rank: int) -> list[int]:
        return [
            one
            for one, kind in self.kinds.items()
            if one != rank and (rank in self._single or kind == self.kinds[rank])
        ]

    def _judge(self, rank: int, step: int) -> Straggler | None:
        record = self._records[rank]
        base = 0.0
        if rank in self._single:
            if len(record.first) < _BASELINE:
                return None
            base = statistics.median(record.first)
        slower = [mine.busy_s - other.busy_s - base for mine, other in record.steps]
        usual = [other.busy_s + base for _, other in record.steps]
        own = [mine.own_s - other.own_s - base for mine, other in record.steps]
        noise_s = self._noise_s(rank) if own[-1] > _MUCH_S else None
        hits = [
            one > max(_LEAST_S, (_FACTOR - 1) * other)
            for one, other in zip(slower, usual, strict=True)
        ]
        much = [one > _much_s(other, noise_s) for one, other in zip(own, usual, strict=True)]
        window = 0
        if len(much) >= _MUCH_WINDOW and sum(much[-_MUCH_WINDOW:]) >= _MUCH_HITS:
            window = _MUCH_WINDOW
        elif len(hits) >= _WINDOW and sum(hits) >= _HITS:
            window = _WINDOW
        if not window:
            is_even = (
                len(hits) >= _EVEN_STEPS
                and not any(hits[-_EVEN_STEPS:])
                and not any(much[-_EVEN_STEPS:])
            )
            if record.named_s is None or not is_even:
                return None
            record.named_s = record.cause = None
            return Straggler(rank, step, 0.0, {}, _EVEN_STEPS, even=True)
        found = _straggler(
            rank, step, list(record.steps)[-window:], statistics.median(slower[-window:])
        )
        cause = max(found.share, key=lambda name: found.share[name])
        if (
            record.named_s is not None
            and found.slower_by_s < _AGAIN * record.named_s
            and cause == record.cause
        ):
            return None
        record.named_s, record.cause = found.slower_by_s, cause
        return found

    def _noise_s(self, rank: int) -> float | None:
        """The usual unevenness, from what is remembered: of the other ranks; with one other alone,
        of the difference to it."""
        others = self._others(rank)
        if len(others) == 1:
            own = [mine.own_s - other.own_s for mine, other in self._records[rank].steps]
            middle = statistics.median(own)
            found = [abs(one - middle) for one in own]
        else:
            found = [
                abs(mine.own_s - other.own_s)
                for one in others
                if one not in self._single and self._records[one].named_s is None
                for mine, other in self._records[one].steps
            ]
        return _TO_SIGMA * statistics.median(found) if len(found) >= _NOISE_STEPS else None


def _much_s(usual_s: float, noise_s: float | None) -> float:
    by_factor = (_FACTOR - 1) * usual_s
    if noise_s is not None:
        by_factor = min(by_factor, max((_EVEN_FACTOR - 1) * usual_s, _NOISES * noise_s))
    return max(_MUCH_S, by_factor)


_NAMES = ("busy_s", "own_s", "data_s", "wait_s")


class _Sorted:
    """The times of a step over ranks, for the medians without one of them."""

    def __init__(self, times: Iterable[RankBusyTime]) -> None:
        found = list(times)
        self._by_name = {name: sorted(getattr(one, name) for one in found) for name in _NAMES}

    def median_without(self, one: RankBusyTime) -> RankBusyTime:
        found = {
            name: _median_without(values, getattr(one, name))
            for name, values in self._by_name.items()
        }
        held_s = max(0.0, found["busy_s"] - found["own_s"])
        return RankBusyTime(
            found["busy_s"], min(found["data_s"], found["busy_s"]), found["wait_s"], held_s
        )


def _median_without(ordered: list[float], value: float) -> float:
    place, left = bisect_left(ordered, value), len(ordered) - 1

    def at(number: int) -> float:
        return ordered[number if number < place else number + 1]

    return (at((left - 1) // 2) + at(left // 2)) / 2


def _straggler(
    rank: int, step: int, steps: list[tuple[RankBusyTime, RankBusyTime]], slower_by_s: float
) -> Straggler:
    share = {
        f"{name}_s": max(
            0.0,
            statistics.median(
                getattr(mine, f"{part}_s") - getattr(other, f"{part}_s") for mine, other in steps
            ),
        )
        for name, part in (("data", "data"), ("compute", "compute"), ("communication", "wait"))
    }
    return Straggler(rank, step, slower_by_s, share, len(steps))


#: A share is taken over at least so many seconds
WINDOW_S = 10.0
#: and so many segments.
_LEAST_SENT = 200
#: A link that sends this share again is named; TCP slows down markedly from about there on.
_LOSSY = 0.005
#: A link is sound again from here on.
_SOUND = 0.001


@dataclass(frozen=True)
class LossyLink:
    """What one rank had to send again, over the last ``seconds``. ``is_sound``: the link was named
    before and has recovered."""

    rank: int
    share: float
    sent: int
    seconds: float
    is_sound: bool

    def text(self, host: str) -> str:
        """Return one line for the terminal."""
        who = f"rank {self.rank} on {host}"
        if self.is_sound:
            return (
                f"the network connection of {who} is sound again: {100 * self.share:.2g} % of its"
                " packets were sent twice"
            )
        return (
            f"{who} had to send {100 * self.share:.2g} % of its packets again in the last"
            f" {self.seconds:.0f} s: its network connection loses packets, which slows down every"
            " rank. `paceline doctor` measures the links between the hosts"
        )


class LinkJudge:
    """Names ranks whose connections lose packets, each once until it has recovered."""

    def __init__(self) -> None:
        self._totals: dict[int, deque[tuple[float, int, int]]] = {}
        self._named: set[int] = set()

    def add(self, rank: int, now_s: float, sent: int, resent: int) -> LossyLink | None:
        """``sent``, ``resent``: segments since the rank started."""
        totals = self._totals.setdefault(rank, deque())
        if totals and sent < totals[-1][1]:
            totals.clear()  # another process
        totals.append((now_s, sent, resent))
        while len(totals) > 1 and now_s - totals[1][0] >= WINDOW_S:
            totals.popleft()
        since_s, sent_before, resent_before = totals[0]
        seconds, sent, resent = now_s - since_s, sent - sent_before, resent - resent_before
        if seconds < WINDOW_S or sent < _LEAST_SENT:
            return None
        share = resent / sent
        is_named = rank in self._named
        if not is_named and share >= _LOSSY:
            self._named.add(rank)
        elif is_named and share <= _SOUND:
            self._named.discard(rank)
        else:
            return None
        return LossyLink(rank, share, sent, seconds, is_sound=is_named)


@dataclass(frozen=True)
class Pause:
    """A process that did not run for a while in the middle of a step."""

    step: int
    seconds: float

    def text(self, rank: int, host: str) -> str:
        """Return one line for the terminal."""
        return (
            f"rank {rank} on {host} did not run for {self.seconds:.0f} s at step {self.step:,}: its"
            " process or its whole host was paused, or one of its threads kept the others from"
            " running; the other ranks waited for it"
        )

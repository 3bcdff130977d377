"""Detect ranks that block the others, from the latest status of each rank. Pure functions, without
threads or a store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.formatting import counted

#: A rank is not reported before it has made no progress for this many of its typical steps,
_TYPICAL_STEPS = 10
#: or for this many seconds in phases that take long or have no typical duration yet.
_GRACE_S = {
    "starting": 120.0,
    "loading": 120.0,
    "compilation": 900.0,  # of one graph; kernels that are tuned take minutes
    "saving": 60.0,
    "evaluation": 60.0,
    "ended": 60.0,
}
_FIRST_STEP_S = 60.0
#: States of a process (`proc(5)`) in which it does not run.
_STATES = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "its process is stopped by a debugger",
    "Z": "its process has ended",
    "X": "its process has ended",
    "gone": "its process is gone",
    "D": "its process waits in the kernel, for a disk or a device",
}
_DEAD = frozenset({"T", "t", "Z", "X", "gone"})


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank, as this process sees it.

    Args:
        stalled_s: seconds since the rank last made progress.
        since_heartbeat_s: seconds since the last heartbeat of the rank.
        waits_for: what the rank is blocked on, if it waits for other ranks.
        typical_step_s: duration of a typical step, or None before there were enough steps.
        patience_s: how long the rank may make no progress while it sends heartbeats, because the
            others wait for it with a time limit of their own
            (:mod:`paceline.distributed.rank_zero`); None: as its phase allows.
        issued: number of collectives issued so far, by group.
        state: state of the process, if it is on this host and sends no heartbeats.
    """

    rank: int
    host: str
    pid: int
    phase: str
    step: int | None
    stalled_s: float
    since_heartbeat_s: float = 0.0
    waits_for: str | None = None
    typical_step_s: float | None = None
    patience_s: float | None = None
    issued: Mapping[str, int] = field(default_factory=dict)
    state: str | None = None

    def is_silent(self, hang_warning_s: float) -> bool:
        return self.since_heartbeat_s >= hang_warning_s


@dataclass(frozen=True)
class Hang:
    """A rank that blocks the others. ``status`` is None if all ranks wait for one another.
    ``all_wait`` is True if the rank itself waits in a collective or has ended."""

    status: RankStatus | None
    since_s: float
    why: str
    all_wait: bool = False

    @property
    def rank(self) -> int | None:
        return self.status.rank if self.status is not None else None

    def text(self) -> str:
        """Return the hang as one line of text."""
        status = self.status
        stalled = f"made no progress for {self.since_s:.0f} s"
        if status is None:
            return f"all ranks have {stalled}: {self.why}"
        step = f", step {status.step:,}" if status.step is not None else ""
        return (
            f"rank {status.rank} on {status.host} (process {status.pid}) has {stalled}, in"
            f" {status.phase}{step}: {self.why}"
        )


def grace_s(status: RankStatus, hang_warning_s: float) -> float:
    """Return how many seconds a rank may make no progress before it is reported."""
    if status.is_silent(hang_warning_s) and status.state in _DEAD:
        return hang_warning_s
    if status.patience_s is not None and not status.is_silent(hang_warning_s):
        return max(hang_warning_s, status.patience_s)
    if status.phase in _GRACE_S:
        return max(hang_warning_s, _GRACE_S[status.phase])
    if status.typical_step_s is None:
        return max(hang_warning_s, _FIRST_STEP_S)
    return max(hang_warning_s, _TYPICAL_STEPS * status.typical_step_s)


def find_hangs(ranks: Sequence[RankStatus], hang_warning_s: float) -> list[Hang]:
    """Return the ranks that block the others, the most certain first:

    1. those that send no heartbeats, or make no progress without waiting for another rank, while
       some other rank waits or makes progress;
    2. if all wait: those that have issued fewer collectives than other ranks of a group;
    3. if all wait for the same: one hang without a rank.
    """
    stalled = [
        status
        for status in ranks
        if max(status.stalled_s, status.since_heartbeat_s) > grace_s(status, hang_warning_s)
    ]
    if not stalled:
        return []
    blocking = [
        status
        for status in stalled
        if status.phase != "ended"
        and (status.waits_for is None or status.is_silent(hang_warning_s))
    ]
    lagging = _lagging(ranks)
    if blocking and len(blocking) < len(ranks):
        lagging_ranks = {status.rank for status, _ in lagging}
        most_certain = [
            status
            for status in blocking
            if status.rank in lagging_ranks or status.is_silent(hang_warning_s)
        ]
        return [_blocking_hang(status, hang_warning_s) for status in most_certain or blocking]
    running = [status for status in ranks if status.phase != "ended"]
    if len([status for status in stalled if status.phase != "ended"]) < len(running):
        return []  # some make progress: what the others wait for may come
    if lagging:
        return [Hang(status, status.stalled_s, why, all_wait=True) for status, why in lagging]
    waits_for = next((status.waits_for for status in running if status.waits_for is not None), None)
    if waits_for is None or len(running) < 2:
        return []
    why = f"each waits for others (rank {running[0].rank} for {waits_for})"
    return [Hang(None, min(status.stalled_s for status in running), why, all_wait=True)]


def _blocking_hang(status: RankStatus, hang_warning_s: float) -> Hang:
    if not status.is_silent(hang_warning_s):
        why = "it is in no collective, while the other ranks continue or wait for it"
        return Hang(status, status.stalled_s, why)
    no_heartbeat = (
        f"no heartbeat from it for {status.since_heartbeat_s:.0f} s (its network connection is"
        " cut, or its host is down or busy)"
    )
    since_s = max(status.stalled_s, status.since_heartbeat_s)
    return Hang(status, since_s, _STATES.get(status.state or "", no_heartbeat))


def _lagging(ranks: Sequence[RankStatus]) -> list[tuple[RankStatus, str]]:
    """Return (status, reason) of the ranks that have issued fewer collectives of some group than
    other ranks, furthest behind first."""
    lags: dict[int, tuple[int, RankStatus]] = {}
    for group in {name for status in ranks for name in status.issued}:
        members = [status for status in ranks if group in status.issued]
        max_issued = max(status.issued[group] for status in members)
        for status in members:
            lag = max_issued - status.issued[group]
            if lag > lags.get(status.rank, (0, status))[0]:
                lags[status.rank] = (lag, status)
    if len(lags) == len(ranks):
        return []
    reasons = []
    for lag, status in sorted(lags.values(), key=lambda pair: (-pair[0], pair[1].rank)):
        ending = "it has ended" if status.phase == "ended" else f"it waits for {status.waits_for}"
        reasons.append((status, f"it is {counted(lag, 'collective')} behind; {ending}"))
    return reasons

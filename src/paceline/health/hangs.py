"""Which rank holds up the others, from what each has last said of itself. Pure functions: no
thread, no store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.formatting import counted

#: A rank that stands still is given so many of its usual steps,
_USUAL_STEPS = 10
#: and so many seconds in phases that take long, or that have no usual length yet.
_PATIENCE_S = {
    "starting": 120.0,
    "loading": 120.0,
    "saving": 60.0,
    "evaluation": 60.0,
    "ended": 60.0,
}
_FIRST_STEP_S = 60.0
#: States of a process (`proc(5)`) in which it does nothing until somebody acts.
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
    """A rank, as this process sees it.

    Args:
        still_s: since its last sign of progress.
        silent_s: since its last beat.
        waits_for: what it stands still for, where it waits for others.
        usual_s: its usual step; None before it has made some.
        issued: collectives so far, by group.
        state: of its process, where it is on this host and gives no beats.
    """

    rank: int
    host: str
    pid: int
    phase: str
    step: int | None
    still_s: float
    silent_s: float = 0.0
    waits_for: str | None = None
    usual_s: float | None = None
    issued: Mapping[str, int] = field(default_factory=dict)
    state: str | None = None


@dataclass(frozen=True)
class Hang:
    """Who holds up the others; ``rank`` None: they wait for one another. ``all_wait``: this one too
    is in a collective, or has ended."""

    seen: RankStatus | None
    since_s: float
    why: str
    all_wait: bool = False

    @property
    def rank(self) -> int | None:
        return self.seen.rank if self.seen is not None else None

    def text(self) -> str:
        """One line for a person."""
        if self.seen is None:
            return f"all ranks have stood still for {self.since_s:.0f} s: {self.why}"
        one = self.seen
        step = f", step {one.step:,}" if one.step is not None else ""
        return (
            f"rank {one.rank} on {one.host} (process {one.pid}) has stood still for"
            f" {self.since_s:.0f} s, in {one.phase}{step}: {self.why}"
        )


def patience_s(one: RankStatus, hang_after_s: float) -> float:
    """How long this rank may stand still before it is named, in seconds."""
    if one.silent_s >= hang_after_s and one.state in _DEAD:
        return hang_after_s
    if one.phase in _PATIENCE_S:
        return max(hang_after_s, _PATIENCE_S[one.phase])
    if one.usual_s is None:
        return max(hang_after_s, _FIRST_STEP_S)
    return max(hang_after_s, _USUAL_STEPS * one.usual_s)


def find_hangs(ranks: Sequence[RankStatus], hang_after_s: float) -> list[Hang]:
    """The ranks that hold up the others, the surest first:

    1. those that give no beats, or stand still without waiting for anyone, while some other rank
      waits or goes on;
    2. where all wait: those that have issued fewer collectives than others of a group;
    3. where all wait for the same: nobody, which is a hang without a rank.
    """
    still = [one for one in ranks if max(one.still_s, one.silent_s) > patience_s(one, hang_after_s)]
    if not still:
        return []
    alone = [
        one
        for one in still
        if one.phase != "ended" and (one.waits_for is None or _is_silent(one, hang_after_s))
    ]
    if alone and len(alone) < len(ranks):
        lagging = {one.rank for one, _ in _behind(ranks)}
        surest = [one for one in alone if one.rank in lagging or _is_silent(one, hang_after_s)]
        return [_of(one, hang_after_s) for one in surest or alone]
    living = [one for one in ranks if one.phase != "ended"]
    if len([one for one in still if one.phase != "ended"]) < len(living):
        return []  # some go on: what the others wait for may come
    behind = _behind(ranks)
    if behind:
        return [Hang(one, one.still_s, why, all_wait=True) for one, why in behind]
    waiting = next((one.waits_for for one in living if one.waits_for is not None), None)
    if waiting is None or len(living) < 2:
        return []
    why = f"each waits for others (rank {living[0].rank} for {waiting})"
    return [Hang(None, min(one.still_s for one in living), why, all_wait=True)]


def _is_silent(one: RankStatus, hang_after_s: float) -> bool:
    return one.silent_s >= hang_after_s


def _of(one: RankStatus, hang_after_s: float) -> Hang:
    if _is_silent(one, hang_after_s):
        fallback = (
            f"no beat from it for {one.silent_s:.0f} s (a link that is cut, or a host that is down"
            " or busy)"
        )
        return Hang(one, max(one.still_s, one.silent_s), _STATES.get(one.state or "", fallback))
    return Hang(one, one.still_s, "it is in no collective, and the others go on or wait for it")


def _behind(ranks: Sequence[RankStatus]) -> list[tuple[RankStatus, str]]:
    """(rank, why) of those that have issued fewer collectives of some group than others, most of
    all first."""
    found: dict[int, tuple[int, RankStatus]] = {}
    for group in {name for one in ranks for name in one.issued}:
        members = [one for one in ranks if group in one.issued]
        most = max(one.issued[group] for one in members)
        for one in members:
            lag = most - one.issued[group]
            if lag > found.get(one.rank, (0, one))[0]:
                found[one.rank] = (lag, one)
    if not found or len(found) == len(ranks):
        return []
    ordered = sorted(found.values(), key=lambda pair: (-pair[0], pair[1].rank))
    return [(one, _lag_text(lag, one)) for lag, one in ordered]


def _lag_text(lag: int, one: RankStatus) -> str:
    ending = "it has ended" if one.phase == "ended" else f"it waits for {one.waits_for}"
    return f"it is {counted(lag, 'collective')} behind; {ending}"

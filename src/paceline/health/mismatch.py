"""Ranks that issue different collectives, found by comparing what each has issued last. Pure
functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.formatting import counted
from paceline.distributed.call_log import CallRecord


def find_mismatch(
    rings: Mapping[int, Sequence[CallRecord]], sites: bool = False
) -> tuple[list[int], str] | None:
    """The first place where ranks of one group have issued different collectives: (the ranks that
    differ from most, what each called and where). None where there is none.

    Args:
        rings: rank → its last calls, in order.
        sites: let calls differ by their place in the code alone. To be asked for where ranks hang:
            a program may well call the same collective in two places.
    """
    kinds = (_kind, _place) if sites else (_kind,)
    for kind in kinds:
        tables = [
            (group, number, calls)
            for group, number, calls in _by_number(rings)
            if len({*map(kind, calls.values())}) > 1
        ]
        if tables:
            _, number, calls = min(tables, key=lambda one: one[1])
            return _tell(rings, number, calls, kind)
    return None


def describe(call: CallRecord) -> str:
    """``all_reduce of 10 float32 at file.py:3 in f``."""
    size = f" of {call['numel']:,} {call['dtype']}" if call["numel"] is not None else ""
    site = f" at {call['site'][0]}" if call["site"] else ""
    return f"{call['function']}{size}{site}"


def _kind(call: CallRecord) -> tuple[Any, ...]:
    return call["function"], call["dtype"], call["numel"]


def _place(call: CallRecord) -> tuple[Any, ...]:
    return (*_kind(call), *call["site"])


def _by_number(
    rings: Mapping[int, Sequence[CallRecord]],
) -> list[tuple[str, int, dict[int, CallRecord]]]:
    """(group, number, rank → call) wherever several ranks remember that call."""
    found: dict[tuple[str, int], dict[int, CallRecord]] = {}
    for rank, ring in sorted(rings.items()):
        for call in ring:
            if call["number"] is not None:
                found.setdefault((call["group"], call["number"]), {})[rank] = call
    return [
        (group, number, calls) for (group, number), calls in sorted(found.items()) if len(calls) > 1
    ]


def _tell(
    rings: Mapping[int, Sequence[CallRecord]],
    number: int,
    calls: Mapping[int, CallRecord],
    kind: Any,
) -> tuple[list[int], str]:
    by_kind: dict[Any, list[int]] = {}
    for rank, call in calls.items():
        by_kind.setdefault(kind(call), []).append(rank)
    most = max(map(len, by_kind.values()))
    usual = [ranks for ranks in by_kind.values() if len(ranks) == most]
    odd = [
        rank for ranks in by_kind.values() if len(ranks) < most or len(usual) > 1 for rank in ranks
    ]
    told = [f"{_ranks(ranks)}: {describe(calls[ranks[0]])}" for ranks in by_kind.values()]
    text = (
        f"the ranks have issued different collectives (number {number + 1:,} of their group). "
        + "; ".join(told)
    )
    first, parted = _where_places_part(rings, number, calls)
    skipped = _skipped(rings, first, parted, _place) or _skipped(rings, number, calls, kind)
    return odd, f"{text}. {skipped}" if skipped else text


def _where_places_part(
    rings: Mapping[int, Sequence[CallRecord]], number: int, calls: Mapping[int, CallRecord]
) -> tuple[int, Mapping[int, CallRecord]]:
    """The first of the calls up to this one that came from different places in the code: equal ones
    may have gone together before unequal ones met."""
    group = next(iter(calls.values()))["group"]
    earlier = {at: found for name, at, found in _by_number(rings) if name == group and at < number}
    while number - 1 in earlier and len({_place(one) for one in earlier[number - 1].values()}) > 1:
        number, calls = number - 1, earlier[number - 1]
    return number, calls


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _skipped(
    rings: Mapping[int, Sequence[CallRecord]],
    number: int,
    calls: Mapping[int, CallRecord],
    kind: Any,
) -> str | None:
    """Where one rank's calls are those of another, shifted by some: who left out what."""
    ranks = sorted(
        calls, key=lambda rank: -Counter(kind(one) for one in calls.values())[kind(calls[rank])]
    )
    usual, group = ranks[0], calls[ranks[0]]["group"]
    for rank in ranks[1:]:
        if kind(calls[rank]) == kind(calls[usual]):
            continue
        for behind, ahead in ((rank, usual), (usual, rank)):
            lag = _shift(
                _from(rings[behind], group, number),
                _from(rings[ahead], group, number),
                rings[ahead],
                kind,
            )
            if lag:
                left_out = describe(calls[ahead])
                return (
                    f"Rank {behind} is {counted(lag, 'collective')} behind: it did not call"
                    f" {left_out}"
                )
    return None


def _from(ring: Sequence[CallRecord], group: str, number: int) -> list[CallRecord]:
    return [
        one
        for one in ring
        if one["group"] == group and one["number"] is not None and one["number"] >= number
    ]


def _shift(
    behind: Sequence[CallRecord],
    ahead: Sequence[CallRecord],
    before: Sequence[CallRecord],
    kind: Any,
    most: int = 8,
) -> int | None:
    """How many calls ``behind`` left out of ``ahead``. Where that rank has not come further, what
    followed the call the last time (in ``before``) stands for what would have followed."""
    future = [*ahead, *_followed(ahead, before)]
    for lag in range(1, most + 1):
        pairs = list(zip(behind, future[lag:], strict=False))
        if pairs and all(
            kind(one) == kind(other) and _same_place(one, other) for one, other in pairs
        ):
            return lag
    return None


def _same_place(one: CallRecord, other: CallRecord) -> bool:
    return bool(one["site"][:1] == other["site"][:1])


def _followed(ahead: Sequence[CallRecord], before: Sequence[CallRecord]) -> list[CallRecord]:
    """What came after the last of ``ahead`` when it was called the time before."""
    last = ahead[-1]
    own = [one for one in before if one["group"] == last["group"] and one["number"] is not None]
    earlier = [
        place
        for place, one in enumerate(own)
        if _place(one) == _place(last) and (one["number"] or 0) < (last["number"] or 0)
    ]
    return own[earlier[-1] + 1 : -len(ahead)] if earlier else []

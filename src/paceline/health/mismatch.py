"""Detect ranks that issue different collectives, by comparing the last calls of each rank. Pure
functions."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from paceline.core.formatting import counted, rank_names
from paceline.distributed.call_log import CallRecord

#: Maximum lag between two ranks that is recognized, in number of collectives.
_MAX_LAG = 8
#: rank → its last calls, in order.
Calls = Mapping[int, Sequence[CallRecord]]
#: Returns the properties that must be equal in calls that belong together.
Signature = Callable[[CallRecord], tuple[object, ...]]


def find_mismatch(calls: Calls, sites: bool = False) -> tuple[list[int], str] | None:
    """Return the first place where ranks of one group have issued different collectives: (the ranks
    that differ from the majority, what each called and where); None if there is none.

    Args:
        calls: rank → its last calls, in order.
        sites: whether to compare the places in the code as well. Only for ranks that hang, because
            a program may call the same collective in two places.
    """
    by_number = _by_number(calls)
    for signature in (_operation, _operation_and_site) if sites else (_operation,):
        differing = [
            (number, group)
            for (group, number), by_rank in by_number.items()
            if len({*map(signature, by_rank.values())}) > 1
        ]
        if differing:
            number, group = min(differing)
            return _describe_mismatch(calls, number, by_number[group, number], signature)
    return None


def describe(call: CallRecord) -> str:
    """Describe a call: ``all_reduce of 10 float32 at file.py:3 in f``."""
    size = f" of {call['numel']:,} {call['dtype']}" if call["numel"] is not None else ""
    site = f" at {call['site'][0]}" if call["site"] else ""
    return f"{call['function']}{size}{site}"


def _operation(call: CallRecord) -> tuple[object, ...]:
    return call["function"], call["dtype"], call["numel"]


def _operation_and_site(call: CallRecord) -> tuple[object, ...]:
    return (*_operation(call), *call["site"])


def _by_number(calls: Calls) -> dict[tuple[str, int], dict[int, CallRecord]]:
    """Return {(group, number): {rank: call}} for each call that several ranks have recorded."""
    by_number: dict[tuple[str, int], dict[int, CallRecord]] = {}
    for rank, rank_calls in sorted(calls.items()):
        for call in rank_calls:
            if call["number"] is not None:
                by_number.setdefault((call["group"], call["number"]), {})[rank] = call
    return {key: by_rank for key, by_rank in by_number.items() if len(by_rank) > 1}


def _describe_mismatch(
    calls: Calls, number: int, by_rank: Mapping[int, CallRecord], signature: Signature
) -> tuple[list[int], str]:
    by_signature: dict[tuple[object, ...], list[int]] = {}
    for rank, call in by_rank.items():
        by_signature.setdefault(signature(call), []).append(rank)
    max_ranks = max(map(len, by_signature.values()))
    is_tie = [len(ranks) for ranks in by_signature.values()].count(max_ranks) > 1
    differing = [
        rank
        for ranks in by_signature.values()
        if len(ranks) < max_ranks or is_tie
        for rank in ranks
    ]
    descriptions = "; ".join(
        f"{rank_names(ranks)}: {describe(by_rank[ranks[0]])}" for ranks in by_signature.values()
    )
    text = (
        f"the ranks have issued different collectives (number {number + 1:,} of their group)."
        f" {descriptions}"
    )
    first_number, first_by_rank = _first_different_site(calls, number, by_rank)
    omitted = _omitted_call(calls, first_number, first_by_rank, _operation_and_site)
    omitted = omitted or _omitted_call(calls, number, by_rank, signature)
    return differing, f"{text}. {omitted}" if omitted else text


def _first_different_site(
    calls: Calls, number: int, by_rank: Mapping[int, CallRecord]
) -> tuple[int, Mapping[int, CallRecord]]:
    """Return the first of the consecutive calls up to this one that came from different places in
    the code: equal calls may have been matched with each other before unequal ones were."""
    group = next(iter(by_rank.values()))["group"]
    by_number = _by_number(calls)
    while True:
        previous = by_number.get((group, number - 1), {})
        if len({*map(_operation_and_site, previous.values())}) < 2:
            return number, by_rank
        number, by_rank = number - 1, previous


def _omitted_call(
    calls: Calls, number: int, by_rank: Mapping[int, CallRecord], signature: Signature
) -> str | None:
    """Return which rank omitted which call, if the calls of one rank are the calls of another
    rank shifted by a lag."""
    votes = Counter(map(signature, by_rank.values()))
    usual, *ranks = sorted(by_rank, key=lambda rank: -votes[signature(by_rank[rank])])
    group = by_rank[usual]["group"]
    for rank in ranks:
        if signature(by_rank[rank]) == signature(by_rank[usual]):
            continue
        for behind, ahead in ((rank, usual), (usual, rank)):
            lag = _lag(
                _calls_from(calls[behind], group, number),
                _calls_from(calls[ahead], group, number),
                calls[ahead],
                signature,
            )
            if lag:
                return (
                    f"Rank {behind} is {counted(lag, 'collective')} behind: it did not call"
                    f" {describe(by_rank[ahead])}"
                )
    return None


def _calls_from(calls: Sequence[CallRecord], group: str, number: int) -> list[CallRecord]:
    return [
        call
        for call in calls
        if call["group"] == group and call["number"] is not None and call["number"] >= number
    ]


def _lag(
    behind: Sequence[CallRecord],
    ahead: Sequence[CallRecord],
    history: Sequence[CallRecord],
    signature: Signature,
) -> int | None:
    """Return how many calls of ``ahead`` the rank ``behind`` omitted. If the other rank has made no
    further calls, the calls that followed the same call the previous time (in ``history``) are used
    instead."""
    expected = [*ahead, *_previously_followed(ahead, history)]
    for lag in range(1, _MAX_LAG + 1):
        pairs = list(zip(behind, expected[lag:], strict=False))
        if pairs and all(
            signature(call) == signature(other) and call["site"][:1] == other["site"][:1]
            for call, other in pairs
        ):
            return lag
    return None


def _previously_followed(
    ahead: Sequence[CallRecord], history: Sequence[CallRecord]
) -> list[CallRecord]:
    """Return the calls that followed the previous occurrence of the last call of ``ahead``."""
    last = ahead[-1]
    group_calls = _calls_from(history, last["group"], 0)
    earlier = [
        index
        for index, call in enumerate(group_calls)
        if _operation_and_site(call) == _operation_and_site(last)
        and (call["number"] or 0) < (last["number"] or 0)
    ]
    return group_calls[earlier[-1] + 1 : -len(ahead)] if earlier else []

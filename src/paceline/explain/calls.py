"""The counted calls of ranks as messages and collectives of a frame, and as spans."""

from collections import Counter
from collections.abc import Sequence

from paceline.distributed.call_log import CountedCall
from paceline.explain.record import Collective, DrawnMessage, Span


def collectives_of(
    calls_by_rank: Sequence[Sequence[CountedCall]], label: str = ""
) -> tuple[Collective, ...]:
    """Return the collectives of all groups, with the calls of the same kind of a group together."""
    numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for rank, calls in enumerate(calls_by_rank):
        for call in calls:
            if call.kind != "send" and call.ranks[0] == rank:
                key = (call.kind.replace("_", "-"), tuple(call.ranks))
                numbers[key] += 1
                sizes[key] += call.size_bytes
    return tuple(
        Collective(kind if number == 1 else f"{number} × {kind}", ranks, label, sizes[kind, ranks])
        for (kind, ranks), number in numbers.items()
    )


def messages_of(
    calls_by_rank: Sequence[Sequence[CountedCall]], label: str = ""
) -> tuple[DrawnMessage, ...]:
    """Return the messages between two ranks."""
    return tuple(
        DrawnMessage(rank, target, label, size_bytes)
        for rank, calls in enumerate(calls_by_rank)
        for call in calls
        for target, size_bytes in call.messages
    )


def spans_of(rank: int, calls: Sequence[CountedCall]) -> list[Span]:
    """Return the calls of a rank as spans of its network."""
    return [
        Span(rank, "network", kind, kind, call.start_s, call.end_s, call.size_bytes)
        for call in calls
        for kind in [call.kind.replace("_", "-")]
    ]

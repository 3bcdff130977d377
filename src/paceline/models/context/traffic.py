"""The bytes that a rank of a context group sends. Imports no torch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import gcd

from paceline.data.context.rows import divide_row
from paceline.distributed.collective_bytes import scatter_bytes
from paceline.models.context.blocks import ring_steps
from paceline.models.context.facts import AttentionFacts
from paceline.models.context.methods import GATHER, RING

#: Bytes of an element in which the gradients of gathered keys and values are summed.
_SUM_BYTES = 4
#: A row of some samples, a rank, and a number of ranks that divide the row.
_Part = tuple[tuple[int, ...], int, int]


def busiest_rank_bytes(
    facts: AttentionFacts,
    method: str,
    rows: Sequence[tuple[int, ...]],
    size: int,
    item_bytes: int,
    forwards: float = 1.0,
) -> dict[str, int]:
    """Return the mean bytes per row, in forward and backward of all layers, that the rank sends
    that sends most, by collective.

    Args:
        rows: number of tokens of each sample, for each row.
        size: number of ranks of the group.
        item_bytes: bytes of an element of keys and values.
        forwards: how often the forward of a layer runs; with recomputation, 2.
    """
    layers = Counter(facts.windows)
    totals = []
    for rank in range(size):
        sent: Counter[str] = Counter()
        for lengths in rows:
            for window, count in layers.items():
                part = (lengths, rank, size)
                for kind, size_bytes in _of_layer(
                    facts, method, part, window, item_bytes, forwards
                ):
                    sent[kind] += count * round(size_bytes)
        totals.append(sent)
    busiest = max(totals, key=lambda sent: sum(sent.values()))
    return {kind: round(size_bytes / max(1, len(rows))) for kind, size_bytes in busiest.items()}


def _of_layer(
    facts: AttentionFacts,
    method: str,
    part: _Part,
    window: int | None,
    item_bytes: int,
    forwards: float,
) -> Iterator[tuple[str, float]]:
    """Yield the collectives of one layer and the bytes that a rank sends in them."""
    lengths, rank, size = part
    division = divide_row(lengths, size)
    pair_width = facts.key_heads * (facts.head_size + facts.value_size)
    if method == RING:
        steps = ring_steps(lengths, size, rank, window)[1:]
        sent = sum(step.num_sent for step in steps) * (forwards + 1)
        returned = sum(step.num_received for step in steps)
        yield "send", (sent + returned) * pair_width * item_bytes
    elif method == GATHER:
        # Parts are padded to the longest.
        padded = size * max(map(division.num_local, range(size))) * pair_width
        yield "all_gather", scatter_bytes(padded * item_bytes, size) * forwards
        yield "reduce_scatter", scatter_bytes(padded * max(item_bytes, _SUM_BYTES), size)
    else:
        # Key heads are repeated until each rank has the key heads of its query heads.
        key_heads = facts.key_heads * size // gcd(facts.key_heads, size)
        states = facts.query_heads * facts.head_size
        states += key_heads * (facts.head_size + facts.value_size)
        outputs = facts.query_heads * facts.value_size
        own, of_heads = division.num_local(rank), division.num_tokens / size
        # All heads of the rank's tokens, and all tokens of its heads.
        elements = forwards * (own * states + of_heads * outputs)
        elements += of_heads * states + own * outputs
        yield "all_to_all", scatter_bytes(elements * item_bytes, size)

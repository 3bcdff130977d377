"""The bytes that a rank of a context group sends. Imports no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import gcd

from paceline.data.context.rows import divide_row
from paceline.distributed.collective_bytes import scatter_bytes
from paceline.models.context.blocks import ring_steps
from paceline.models.context.geometry import AttentionGeometry
from paceline.models.context.methods import GATHER, RING, ULYSSES

#: Bytes of an element in which the gradients of gathered keys and values are summed.
_SUM_BYTES = 4


def exchange_bytes(
    geometry: AttentionGeometry,
    method: str,
    lengths: tuple[int, ...],
    size: int,
    rank: int,
    *,
    element_bytes: int,
    forwards: float = 1.0,
) -> Mapping[str, float]:
    """Return the bytes that a rank sends for one row in forward and backward of all layers, by
    collective.

    Args:
        lengths: number of tokens of each sample of the row.
        size: number of ranks of the group.
        element_bytes: bytes of an element of keys and values.
        forwards: how often the forward of a layer runs; with recomputation, 2.
    """
    layers = Counter(geometry.windows)
    sent: dict[str, float] = {}
    for window, count in layers.items():
        of_layer = _of_layer(geometry, method, lengths, size, rank, window, element_bytes, forwards)
        for kind, size_bytes in of_layer.items():
            sent[kind] = sent.get(kind, 0.0) + count * size_bytes
    return sent


def _of_layer(
    geometry: AttentionGeometry,
    method: str,
    lengths: tuple[int, ...],
    size: int,
    rank: int,
    window: int | None,
    element_bytes: int,
    forwards: float,
) -> dict[str, float]:
    pair_width = geometry.key_heads * (geometry.key_size + geometry.value_size)
    if method == RING:
        steps = ring_steps(lengths, size, rank, window)[1:]
        sent = sum(step.num_sent for step in steps) * (forwards + 1)
        returned = sum(step.num_received for step in steps)
        return {"send": (sent + returned) * pair_width * element_bytes}
    division = divide_row(lengths, size)
    if method == GATHER:
        padded = max(division.num_local(each) for each in range(size)) * size * pair_width
        sum_bytes = max(element_bytes, _SUM_BYTES)
        return {
            "all_gather": scatter_bytes(padded * element_bytes, size) * forwards,
            "reduce_scatter": scatter_bytes(padded * sum_bytes, size),
        }
    assert method == ULYSSES, method
    own, key_heads = division.num_local(rank), geometry.key_heads
    repeated = key_heads * size // gcd(key_heads, size)
    states = geometry.heads * geometry.key_size
    states += repeated * (geometry.key_size + geometry.value_size)
    outputs = geometry.heads * geometry.value_size
    # What a rank sends of its own tokens, and of its own heads.
    by_token = own * states, own * outputs
    by_head = division.num_tokens * states / size, division.num_tokens * outputs / size
    elements = forwards * (by_token[0] + by_head[1]) + by_head[0] + by_token[1]
    return {"all_to_all": scatter_bytes(elements * element_bytes, size)}


def busiest_rank_bytes(
    geometry: AttentionGeometry,
    method: str,
    rows: Sequence[tuple[int, ...]],
    size: int,
    *,
    element_bytes: int,
    forwards: float,
) -> dict[str, int]:
    """Return the mean bytes per row of the rank that sends most, by collective."""
    totals: list[dict[str, float]] = []
    for rank in range(size):
        sent: dict[str, float] = {}
        for lengths in rows:
            of_row = exchange_bytes(
                geometry,
                method,
                lengths,
                size,
                rank,
                element_bytes=element_bytes,
                forwards=forwards,
            )
            for kind, size_bytes in of_row.items():
                sent[kind] = sent.get(kind, 0.0) + size_bytes / len(rows)
        totals.append(sent)
    busiest = max(totals, key=lambda each: sum(each.values()))
    return {kind: round(size_bytes) for kind, size_bytes in busiest.items()}

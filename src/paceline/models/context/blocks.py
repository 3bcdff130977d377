"""Which blocks of queries and keys each step of ring attention computes, and which keys it needs
from other ranks. Imports no torch.

In step s, a rank computes the attention of its queries to the keys of the rank that is s places
before it. A block is a rectangle of the queries and keys of one sample. Its rows and columns that
the causal mask or the window hides are cut off, so each query of a block attends to at least one
of its keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from paceline.data.context.rows import Piece, RowDivision, divide_row

#: Adjacent tokens of a rank: the index of the first, and the index after the last.
TokenRange = tuple[int, int]


class Window(NamedTuple):
    """How far a query of a block attends, counted from the key on the diagonal that ends at the
    block's last query and last key; -1: without limit.

    Args:
        left: number of keys before the diagonal.
        right: number of keys after the diagonal.
    """

    left: int
    right: int


#: A query attends to all keys of the block.
FULL = Window(-1, -1)
#: A query attends to the keys up to its own.
CAUSAL = Window(-1, 0)


class AttentionBlock(NamedTuple):
    """Queries of a rank, and keys of one rank to which they attend.

    Args:
        queries: range among the tokens of the rank that computes the block.
        keys: range among the keys that this rank receives in the step.
    """

    queries: TokenRange
    keys: TokenRange
    window: Window

    @property
    def num_queries(self) -> int:
        return self.queries[1] - self.queries[0]

    @property
    def num_keys(self) -> int:
        return self.keys[1] - self.keys[0]


@dataclass(frozen=True)
class RingStep:
    """What one rank does in one step.

    Args:
        source: rank of the context group whose keys it computes with.
        target: rank of the context group that computes with its keys.
        received: ranges among the source's tokens, in ascending order.
        sent: ranges among its own tokens, in ascending order.
    """

    source: int
    target: int
    blocks: tuple[AttentionBlock, ...]
    received: tuple[TokenRange, ...]
    sent: tuple[TokenRange, ...]

    @property
    def num_received(self) -> int:
        return num_tokens(self.received)

    @property
    def num_sent(self) -> int:
        return num_tokens(self.sent)


def num_tokens(ranges: Iterable[TokenRange]) -> int:
    return sum(stop - start for start, stop in ranges)


@lru_cache(maxsize=128)
def ring_steps(
    lengths: tuple[int, ...], size: int, rank: int, window: int | None = None
) -> tuple[RingStep, ...]:
    """Return the steps of a rank; in the first, it computes with its own keys.

    Args:
        lengths: number of tokens of each sample of the row.
        size: number of ranks of the context group.
        window: number of tokens that a token attends to, including itself; None: all before it in
            its sample.
    """
    division = divide_row(lengths, size)
    steps = []
    for step in range(size):
        source, target = (rank - step) % size, (rank + step) % size
        blocks = _find_blocks(division, rank, source, window)
        if step == 0:
            own = ((0, division.num_local(rank)),)
            steps.append(RingStep(source, target, tuple(blocks), own, own))
            continue
        received = _union(block.keys for block in blocks)
        sent = _union(block.keys for block in _find_blocks(division, target, rank, window))
        blocks = [block._replace(keys=_among(block.keys, received)) for block in blocks]
        steps.append(RingStep(source, target, tuple(blocks), received, sent))
    return tuple(steps)


def _find_blocks(
    division: RowDivision, rank: int, source: int, window: int | None
) -> list[AttentionBlock]:
    """Return the blocks of a rank's queries and the keys of a source, whose ranges are among all
    tokens of the source."""
    pieces: dict[int, list[Piece]] = {}
    for piece in division.pieces[source]:
        pieces.setdefault(piece.segment, []).append(piece)
    blocks: list[AttentionBlock] = []
    for queries in division.pieces[rank]:
        for keys in pieces.get(queries.segment, ()):
            block = _block(queries, keys, window)
            if block is None:
                continue
            joined = _join(blocks[-1], block) if blocks else None
            if joined is None:
                blocks.append(block)
            else:
                blocks[-1] = joined
    return blocks


def _block(queries: Piece, keys: Piece, window: int | None) -> AttentionBlock | None:
    """Return the visible part of two pieces of one sample, or None if no query attends to a key."""
    if keys.start == queries.start:
        own = (queries.offset, queries.offset + queries.length)
        is_limited = window is not None and window < queries.length
        return AttentionBlock(own, own, Window(window - 1, 0) if is_limited and window else CAUSAL)
    if keys.start > queries.start:
        return None
    first, last = keys.start, queries.stop
    reach = FULL
    if window is not None:
        # The query at position p attends to the keys after p - window.
        first = max(first, queries.start - window + 1)
        last = min(last, keys.stop - 1 + window)
        if first >= keys.stop or last <= queries.start:
            return None
        if last - window > first:
            reach = Window(keys.stop - last + window - 1, -1)
    return AttentionBlock(
        (queries.offset, queries.offset + last - queries.start),
        (keys.offset + first - keys.start, keys.offset + keys.length),
        reach,
    )


def _join(one: AttentionBlock, other: AttentionBlock) -> AttentionBlock | None:
    """Return a single block for two adjacent full ones, or None if there is none."""
    if one.window != FULL or other.window != FULL:
        return None
    if one.keys == other.keys and one.queries[1] == other.queries[0]:
        return one._replace(queries=(one.queries[0], other.queries[1]))
    if one.queries == other.queries and one.keys[1] == other.keys[0]:
        return one._replace(keys=(one.keys[0], other.keys[1]))
    return None


def _union(ranges: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """Return the tokens of all ranges as separate ranges in ascending order."""
    union: list[TokenRange] = []
    for start, stop in sorted(ranges):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return tuple(union)


def _among(tokens: TokenRange, ranges: Sequence[TokenRange]) -> TokenRange:
    """Return a range of tokens as a range among the tokens of ``ranges``; one of them contains
    it."""
    before = 0
    for start, stop in ranges:
        if start <= tokens[0] < stop:
            return before + tokens[0] - start, before + tokens[1] - start
        before += stop - start
    raise ValueError(f"{tokens} is not within {ranges}")

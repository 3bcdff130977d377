"""How tensors are laid out in flat buckets. Imports no torch."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class BucketLayout:
    """Where tensors lie in a bucket.

    Args:
        members: which of the tensors, by number, in the bucket's order.
        offsets: where each begins, in elements; aligned to 64 bytes.
        size: elements of the bucket with its padding, a multiple of the number of shards.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int


def lay_out(
    tensors: Sequence[tuple[int, int, Hashable]], cap_bytes: float, shards: int = 1
) -> list[BucketLayout]:
    """Deal tensors, given as (elements, bytes an element, kind), to buckets.

    Buckets run from the last tensor to the first, the order in which backward comes to them. A
    bucket holds one kind (dtype, device) and up to ``cap_bytes``; a larger tensor gets one of its
    own. It can be cut into ``shards`` aligned parts of one size.
    """
    groups: list[list[int]] = []
    size = 0
    for number in reversed(range(len(tensors))):
        numel, element_bytes, kind = tensors[number]
        same = bool(groups) and tensors[groups[-1][0]][2] == kind
        if not same or size + numel * element_bytes > cap_bytes:
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += numel * element_bytes
    found = []
    for group in groups:
        step = max(1, _ALIGN_BYTES // tensors[group[0]][1])
        offsets, end = [], 0
        for number in group:
            offsets.append(end)
            end += math.ceil(tensors[number][0] / step) * step
        found.append(
            BucketLayout(
                tuple(group), tuple(offsets), math.ceil(end / (step * shards)) * step * shards
            )
        )
    return found

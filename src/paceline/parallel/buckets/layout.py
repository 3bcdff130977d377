"""The layout of tensors in flat buckets. Imports no torch."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class BucketLayout:
    """The positions of tensors in a bucket.

    Args:
        members: indices of the tensors, in their order in the bucket.
        offsets: index of each tensor's first element in the bucket, aligned to 64 bytes.
        size: number of elements in the bucket with padding, a multiple of the number of shards.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int


def lay_out(
    tensors: Sequence[tuple[int, int, Hashable]], cap_bytes: float, shards: int = 1
) -> list[BucketLayout]:
    """Assign tensors to buckets.

    Buckets are filled from the last tensor to the first, the order in which backward reaches them.
    A bucket contains tensors of one kind, of at most ``cap_bytes`` in total. A larger tensor gets
    its own bucket.

    Args:
        tensors: (elements, bytes per element, kind) of each tensor; the kind is its dtype and
            device.
        shards: number of equal, aligned parts into which each bucket can be split.
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
    layouts = []
    for group in groups:
        step = max(1, _ALIGN_BYTES // tensors[group[0]][1])
        offsets, end = [], 0
        for number in group:
            offsets.append(end)
            end += math.ceil(tensors[number][0] / step) * step
        size = math.ceil(end / (step * shards)) * step * shards
        layouts.append(BucketLayout(tuple(group), tuple(offsets), size))
    return layouts

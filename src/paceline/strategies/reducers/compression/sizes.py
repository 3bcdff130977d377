"""Bytes that each compressor sends and keeps of a bucket. Imports no torch."""

import math
from collections import Counter
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.config.schema.compression import Compression
from paceline.distributed.collective_bytes import all_reduce_bytes, scatter_bytes
from paceline.parallel.gradient_compression import (
    is_sparse,
    momentum_correction,
    uses_local_moments,
)

#: Share of the elements that is sent in the first step of a warm-up (Lin et al., 2018, section 3.3:
#: sparsity rises from 75 %).
_WARMUP_START = 0.25
#: Number format → bytes per number, bytes per message for its scale.
FORMATS = {"bf16": (2, 0), "fp16": (2, 4), "int8": (1, 4)}


@dataclass(frozen=True)
class TensorSlot:
    """A parameter's place in a bucket, starting at element ``offset``."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> slice:
        """The slot's elements of a bucket."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class BucketShape:
    """The layout of a bucket.

    Args:
        number: its place in the order in which buckets are sent.
        size: number of elements, including the padding between parameters, which stays zero.
        slots: the parameters in the bucket's order.
    """

    number: int
    size: int
    slots: tuple[TensorSlot, ...]

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(slot.numel for slot in self.slots)


def num_chosen(settings: Compression, bucket: BucketShape, step: int | None = None) -> int:
    """Return how many elements of a bucket `topk` and `randomk` send. In a warm-up the share falls
    exponentially (Lin et al., 2018, section 3.3)."""
    ratio = settings.ratio
    if step is not None and step < settings.warmup_steps:
        start = max(ratio, _WARMUP_START)
        ratio = start * (ratio / start) ** (step / settings.warmup_steps)
    return min(bucket.numel, max(1, math.ceil(round(ratio * bucket.numel, 6))))


def matrix_of(shape: tuple[int, ...], rank: int) -> tuple[int, int, int] | None:
    """Return (rows, columns, rank) of a parameter as a matrix; None if low rank would save
    nothing."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rank, rows, columns)
    return (rows, columns, rank) if (rows + columns) * rank < rows * columns else None


def matrices_of(bucket: BucketShape, rank: int) -> list[tuple[TensorSlot, tuple[int, int, int]]]:
    """Return the slots that `powersgd` compresses, with (rows, columns, rank)."""
    sized = [(slot, matrix_of(slot.shape, rank)) for slot in bucket.slots]
    return [(slot, size) for slot, size in sized if size is not None]


def kept_bytes(config: Config, bucket: BucketShape) -> int:
    """Return the bytes that a rank keeps of a bucket from step to step."""
    settings = config.compression
    size = 4 * bucket.size * (uses_local_moments(config) + (momentum_correction(config) > 0))
    if is_sparse(settings) or settings.chain[0] == "powersgd":
        size += 4 * bucket.size  # the residual
    if settings.chain[0] == "powersgd":
        matrices = matrices_of(bucket, settings.rank)
        size += sum(4 * columns * rank for _, (_, columns, rank) in matrices)
    return size


def num_rounds(settings: Compression) -> int:
    """Return how often each collective of :func:`sent_bytes` is called for a bucket, one call after
    the other."""
    return 2 if settings.chain[0] == "powersgd" else 1


def sent_bytes(
    settings: Compression, bucket: BucketShape, num_ranks: int, step: int | None = None
) -> dict[str, int]:
    """Return the bytes that one rank sends for a bucket, by collective.

    Args:
        step: the step, during the warm-up; None: after it.
    """
    method = settings.chain[0]
    code = settings.chain[1] if len(settings.chain) > 1 else None
    if method in FORMATS:
        return _summed(bucket.size, method, num_ranks)
    if method == "signsgd":
        return _gathered(4 + math.ceil(bucket.size / 8), num_ranks)
    if method == "powersgd":
        matrices = matrices_of(bucket, settings.rank)
        firsts = sum(rows * rank for _, (rows, _, rank) in matrices)
        firsts += bucket.numel - sum(slot.numel for slot, _ in matrices)
        seconds = sum(columns * rank for _, (_, columns, rank) in matrices)
        sent: Counter[str] = Counter()
        for numel in filter(None, (firsts, seconds)):
            sent.update(_summed(numel, code, num_ranks))
        return dict(sent)
    count = num_chosen(settings, bucket, step)
    if method == "randomk":
        return _summed(count, code, num_ranks)
    width, header = (4, 0) if code is None else FORMATS[code]
    return _gathered(4 * count + header + round_up(count) * width, num_ranks)


def _gathered(message_bytes: int, num_ranks: int) -> dict[str, int]:
    return {"all_gather": scatter_bytes(message_bytes * num_ranks, num_ranks)}


def _summed(numel: int, code: str | None, num_ranks: int) -> dict[str, int]:
    """Return the bytes of a sum over the ranks; every number is sent as ``code`` (None:
    float32)."""
    if code is None:
        return {"all_reduce": all_reduce_bytes(4 * numel, num_ranks)}
    width, header = FORMATS[code]
    message = header + chunk_size(numel, num_ranks) * width
    sent = scatter_bytes(message * num_ranks, num_ranks)
    return {"all_to_all": sent, "all_gather": sent}


def chunk_size(numel: int, num_ranks: int) -> int:
    """Return the numbers per message if each rank adds up its part of ``numel``. A multiple of
    four, so that the next message starts where float32 can be read, whatever a number's width."""
    return max(4, math.ceil(numel / (4 * num_ranks)) * 4)


def round_up(count: int) -> int:
    """Return the next multiple of four."""
    return math.ceil(count / 4) * 4

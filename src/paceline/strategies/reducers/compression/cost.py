"""What summing gradients with compression, or by one of Paceline's own all-reduce algorithms, sends
and keeps. Imports no torch."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.core.texts import UserText
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.models.shape.record import ModelShape, TensorShape
from paceline.parallel.buckets.layout import lay_out
from paceline.parallel.gradient_compression import (
    is_sparse,
    momentum_correction,
    uses_local_moments,
)
from paceline.strategies.reducers.all_reduce.schedules import steps
from paceline.strategies.reducers.compression.sizes import (
    FORMATS,
    BucketShape,
    TensorSlot,
    kept_bytes,
    sent_bytes,
)


def break_even_ratio(config: Config, num_ranks: int) -> float | None:
    """Return the ``compression.ratio`` at which `topk` or `randomk` sends as many bytes as `ddp`
    without compression; None for other methods.

    With `topk` a rank sends 4 bytes of index and a value for each chosen element to N-1 others,
    with a float32 all-reduce 2 · 4 (N-1)/N bytes for each element. `randomk` all-reduces its
    values, without an index.
    """
    chain = config.compression.chain
    if not is_sparse(config.compression) or num_ranks < 2:
        return None
    value_bytes = FORMATS[chain[1]][0] if len(chain) > 1 else 4
    return 4 / value_bytes if chain[0] == "randomk" else 8 / ((4 + value_bytes) * num_ranks)


def compression_notice(config: Config, num_ranks: int) -> tuple[str, str] | None:
    """Return a warning for a ratio that saves nothing."""
    limit, ratio = break_even_ratio(config, num_ranks), config.compression.ratio
    if limit is None or ratio < limit:
        return None
    settings = config.compression
    index = ", because each value is sent with a 4-byte index"
    amount = "as many bytes as" if ratio == limit else f"{ratio / limit:.2g} times the bytes of"
    text = UserText(
        "compression.ratio: {ratio} with {settings} on {num_ranks} ranks sends {amount} no"
        " compression{index}. It saves bytes below the break-even ratio {limit}",
        code="compression-sends-more",
        ratio=f"{ratio:g}",
        settings=settings.text,
        num_ranks=num_ranks,
        amount=amount,
        index=index if settings.chain[0] == "topk" else "",
        limit=f"{limit:.3g}",
    )
    return "warning", text


@dataclass(frozen=True)
class CommunicationCost:
    """The cost of summing gradients.

    Args:
        traffic: bytes that the busiest rank sends in a step, by collective.
        retained_bytes: bytes that are kept from step to step in addition to the optimizer's state.
        holds_moments: the optimizer's state is part of them.
    """

    traffic: Mapping[str, int]
    retained_bytes: int = 0
    holds_moments: bool = False


def communication_cost(
    shape: ModelShape, config: Config, num_ranks: int
) -> CommunicationCost | None:
    """Return the cost of gradients that are not summed by the backend's all-reduce; None if they
    are."""
    algorithm, settings = config.parallel.all_reduce_algorithm, config.compression
    if num_ranks == 1 or (algorithm == "native" and not settings.chain):
        return None
    cap_bytes = config.parallel.bucket_cap_mb * 2**20
    buckets = shape.memoize(("buckets", cap_bytes), lambda: _counted(shape.trained, cap_bytes))
    if not settings.chain:
        sent = [0] * num_ranks
        for bucket, element_bytes, count in buckets:
            for step in steps(algorithm, num_ranks, bucket.size):
                for send in step.sends:
                    sent[send.source] += count * (send.stop - send.start) * element_bytes
        return CommunicationCost({"send": max(sent)})
    traffic: Counter[str] = Counter()
    retained_bytes = 0
    for bucket, _, count in buckets:
        for collective, size_bytes in sent_bytes(settings, bucket, num_ranks).items():
            traffic[collective] += count * size_bytes
        retained_bytes += count * kept_bytes(config, bucket)
    holds_moments = uses_local_moments(config) or momentum_correction(config) > 0
    if holds_moments:
        traffic["all_reduce"] += all_reduce_bytes(4, num_ranks)  # the norm
    return CommunicationCost(traffic, retained_bytes, holds_moments)


def _counted(
    trained: Sequence[TensorShape], cap_bytes: float
) -> list[tuple[BucketShape, int, int]]:
    """Return one of the buckets that contain tensors of the same shapes, with its bytes per
    element, and the number of such buckets: the blocks of a model are mostly equal."""
    counts: Counter[Hashable] = Counter()
    first: dict[Hashable, tuple[BucketShape, int]] = {}
    for bucket, element_bytes in bucket_shapes(trained, cap_bytes):
        key = bucket.size, tuple(slot.shape for slot in bucket.slots), element_bytes
        counts[key] += 1
        first.setdefault(key, (bucket, element_bytes))
    return [(*first[key], count) for key, count in counts.items()]


def bucket_shapes(
    trained: Sequence[TensorShape], cap_bytes: float
) -> Iterator[tuple[BucketShape, int]]:
    """Yield the buckets of these parameters' gradients, with the bytes per element."""
    layouts = lay_out(
        [(tensor.numel, tensor.element_bytes, tensor.element_bytes) for tensor in trained],
        cap_bytes,
    )
    for number, layout in enumerate(layouts):
        members = [trained[member] for member in layout.members]
        slots = [
            TensorSlot(tensor.name, offset, tensor.shape)
            for tensor, offset in zip(members, layout.offsets, strict=True)
        ]
        yield BucketShape(number, layout.size, tuple(slots)), members[0].element_bytes

"""Which strategies can sum gradients by an algorithm of our own, or compressed; and what that sends
and keeps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes, steps
from paceline.models.shape.record import TensorShape
from paceline.parallel.compression.settings import momentum_correction, uses_local_moments
from paceline.parallel.compression.sizes import (
    FORMATS,
    BucketShape,
    TensorSlot,
    kept_bytes,
    sent_bytes,
)
from paceline.parallel.ddp.layout import lay_out


def break_even_ratio(config: Config, num_ranks: int) -> float | None:
    """The ``compression.ratio`` from which `topk` or `randomk` sends at least as many bytes as
    `ddp` without compression; None for other methods.

    With `topk` a rank sends 4 bytes of index and a value for each chosen element to N-1 others,
    with a float32 all-reduce 2 · 4 (N-1)/N bytes for each element. `randomk` all-reduces its
    values, without an index.
    """
    chain = config.compression.chain
    if chain[:1] not in (("topk",), ("randomk",)) or num_ranks < 2:
        return None
    value_bytes = FORMATS[chain[1]][0] if len(chain) > 1 else 4
    return 4 / value_bytes if chain[0] == "randomk" else 8 / ((4 + value_bytes) * num_ranks)


def compression_notice(config: Config, num_ranks: int) -> tuple[str, str] | None:
    """A warning for a ratio that saves nothing."""
    limit, ratio = break_even_ratio(config, num_ranks), config.compression.ratio
    if limit is None or ratio < limit:
        return None
    settings = config.compression
    index = (
        ", because each value travels with a 4-byte index" if settings.chain[0] == "topk" else ""
    )
    amount = "as many bytes as" if ratio == limit else f"{ratio / limit:.2g} times the bytes of"
    text = (
        f"compression.ratio: {ratio:g} with {settings.text} on {num_ranks} ranks sends {amount} no"
        f" compression{index}. It saves bytes below the break-even ratio {limit:.3g}"
    )
    return "warning", text


@dataclass(frozen=True)
class CommunicationCost:
    """Bytes that the busiest rank sends in a step, by collective; what is kept from step to step
    beside the optimizer's state; whether the optimizer's own state is kept there too."""

    traffic: Mapping[str, int]
    kept: int = 0
    holds_moments: bool = False


def communication_cost(
    trained: Sequence[TensorShape], config: Config, num_ranks: int
) -> CommunicationCost | None:
    """For gradients summed otherwise than by the backend's all-reduce; None where it is that."""
    own, settings = config.parallel.all_reduce, config.compression
    if num_ranks == 1 or (own == "native" and not settings.chain):
        return None
    buckets = bucket_shapes(trained, config.parallel.bucket_cap_mb * 2**20)
    if not settings.chain:
        sent = [0] * num_ranks
        for shape, element_bytes in buckets:
            for rank, amount in enumerate(_own_all_reduce(own, num_ranks, shape.size)):
                sent[rank] += amount * element_bytes
        return CommunicationCost({"send": max(sent)})
    traffic: Counter[str] = Counter()
    kept = 0
    local, momentum = uses_local_moments(config), momentum_correction(config)
    for shape, _ in buckets:
        traffic.update(sent_bytes(settings, shape, num_ranks))
        kept += kept_bytes(config, shape)
    if local or momentum:
        traffic["all_reduce"] += all_reduce_bytes(4, num_ranks)  # the norm
    return CommunicationCost(traffic, kept, local or momentum > 0)


def bucket_shapes(
    trained: Sequence[TensorShape], cap_bytes: float
) -> list[tuple[BucketShape, int]]:
    """The buckets of these parameters' gradients, with the bytes an element."""
    layouts = lay_out(
        [(one.numel, one.element_bytes, one.element_bytes) for one in trained], cap_bytes
    )
    found = []
    for number, layout in enumerate(layouts):
        members = [trained[member] for member in layout.members]
        slots = [
            TensorSlot(one.name, at, one.shape)
            for one, at in zip(members, layout.offsets, strict=True)
        ]
        found.append((BucketShape(number, layout.size, tuple(slots)), members[0].element_bytes))
    return found


def _own_all_reduce(algorithm: str, num_ranks: int, numel: int) -> list[int]:
    """Elements that each rank sends."""
    sent = [0] * num_ranks
    for step in steps(algorithm, num_ranks, numel):
        for one in step.sends:
            sent[one.source] += one.stop - one.start
    return sent

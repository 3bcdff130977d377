"""Memory and traffic of ZeRO stage 1, and the cost terms that the ZeRO strategies share."""

import math
from dataclasses import dataclass, field
from itertools import accumulate

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.buckets.layout import lay_out
from paceline.parallel.cost import Cost, ModelShape, TensorShape, Workload, total_bytes


def batch_norm_names(shape: ModelShape) -> frozenset[str]:
    """Return the names of the parameters of modules with a running mean: batch and instance
    normalizations."""
    modules = {
        buffer.name.rpartition(".")[0]
        for buffer in shape.buffers
        if buffer.name.rpartition(".")[2] == "running_mean"
    }
    return frozenset(
        tensor.name for tensor in shape.parameters if tensor.name.rpartition(".")[0] in modules
    )


def low_bytes_of(tensor: TensorShape, low_bytes: int, normed: frozenset[str]) -> int:
    """Return the bytes per element of a trained weight, and of its gradient when backward computes
    it."""
    is_low = low_bytes and tensor.element_bytes == 4 and tensor.name not in normed
    return low_bytes if is_low else tensor.element_bytes


def reduced_bytes_of(weight_bytes: int, low_bytes: int, config: Config) -> int:
    """Return the bytes per element of a gradient that is reduced, for a weight with
    ``weight_bytes`` in the computation."""
    is_widened = low_bytes and config.parallel.reduce_dtype == "float32"
    return 4 if is_widened and weight_bytes == low_bytes else weight_bytes


def statistics_traffic(shape: ModelShape, num_ranks: int) -> dict[str, int]:
    """Return the traffic of running statistics, which are broadcast once per step."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    size = sum(
        buffer.size_bytes for buffer in shape.buffers if buffer.name.rpartition(".")[2] in names
    )
    return {"broadcast": size} if size and num_ranks > 1 else {}


class _RankParts:
    """The parts of tensors whose state each rank has. All ranks between the first and the last of a
    tensor have a part of the same size, so the time does not grow with ranks × tensors."""

    def __init__(self, shape: ModelShape, num_ranks: int) -> None:
        self._optimizer = shape.optimizer
        self._num_ranks = num_ranks
        self._changes = [0] * (num_ranks + 1)
        self._parts: list[tuple[str, int, int, int]] = []

    def add(self, name: str, begin: int, end: int, shard_size: int) -> None:
        """Add the elements from ``begin`` to ``end`` of a bucket whose shards have this size."""
        first, last = begin // shard_size, max(begin, end - 1) // shard_size
        if first == last:
            self._add(name, first, last, end - begin)
            return
        self._add(name, first, first, (first + 1) * shard_size - begin)
        self._add(name, last, last, end - last * shard_size)
        if last - first > 1:
            self._add(name, first + 1, last - 1, shard_size)

    def _add(self, name: str, first: int, last: int, elements: int) -> None:
        size = self._optimizer.bytes_of(name, elements)
        self._changes[first] += size
        self._changes[last + 1] -= size
        self._parts.append((name, first, last, elements))

    def largest(self) -> tuple[int, list[tuple[str, int]]]:
        """Return the bytes of the rank with most, and its parts."""
        sizes = list(accumulate(self._changes[: self._num_ranks]))
        largest = max(sizes)
        rank = sizes.index(largest)
        parts = [
            (name, elements) for name, first, last, elements in self._parts if first <= rank <= last
        ]
        return largest, parts


@dataclass
class _Buckets:
    """What the buckets of a model add up to, in bytes.

    Args:
        masters: a rank's float32 copies of weights in low precision.
        gathered, reduced: what a rank sends of the weights and of the gradients.
        state, largest: the optimizer's state of the rank with most, and the parts of its
            parameters.
    """

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    gathered: int = 0
    reduced: int = 0
    state: int = 0
    largest: list[tuple[str, int]] = field(default_factory=list)


def _sum_up(shape: ModelShape, num_ranks: int, config: Config) -> _Buckets:
    low_bytes = shape.low_bytes if num_ranks > 1 else 0
    normed = batch_norm_names(shape)
    tensors, trained = [], shape.trained
    for tensor in trained:
        weight_bytes = low_bytes_of(tensor, low_bytes, normed)
        gradient_bytes = reduced_bytes_of(weight_bytes, low_bytes, config)
        tensors.append((tensor.numel, gradient_bytes, weight_bytes))
    result = _Buckets()
    parts = _RankParts(shape, num_ranks)
    for layout in lay_out(tensors, config.parallel.bucket_cap_mb * 2**20, num_ranks):
        _, gradient_bytes, weight_bytes = tensors[layout.members[0]]
        shard_size = layout.size // num_ranks
        result.weights += layout.size * weight_bytes
        result.gradients += layout.size * gradient_bytes
        result.masters += shard_size * 4 if weight_bytes == low_bytes else 0
        result.gathered += scatter_bytes(layout.size * weight_bytes, num_ranks)
        result.reduced += scatter_bytes(layout.size * gradient_bytes, num_ranks)
        for member, begin in zip(layout.members, layout.offsets, strict=True):
            end = begin + tensors[member][0]
            parts.add(trained[member].name, begin, end, shard_size)
    result.state, result.largest = parts.largest()
    return result


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Estimate the cost of ZeRO stage 1, with the padding of the buckets.

    Per trained parameter, N ranks and Adam: 8 + 8/N bytes in float32 (weights and gradients 4
    each), 6 + 12/N in mixed precision (gradients 4), and 4 + 12/N with gradients in 16 bits
    (Rajbhandari et al., 2020, section 5.1, figure 1). A reduce-scatter of the gradients and an
    all-gather of the weights: 2Ψ(N-1)/N elements (section 7.2.1).
    """
    num_ranks, parallel = axes.data, config.parallel
    buckets = shape.memoize(
        ("zero1", num_ranks, parallel.reduce_dtype, parallel.bucket_cap_mb),
        lambda: _sum_up(shape, num_ranks, config),
    )
    on_host = at_once = 0
    if parallel.state_offload == "optimizer":
        on_host, at_once = shape.offloaded_moments(buckets.largest)
    frozen = shape.parameter_bytes - total_bytes(shape.trained)
    return Cost(
        parameters=frozen + buckets.weights + buckets.masters + shape.buffer_bytes,
        gradients=buckets.gradients,
        optimizer=buckets.state - on_host,
        activations=max(work.activation_bytes(shape), at_once),
        traffic={"reduce_scatter": buckets.reduced, "all_gather": buckets.gathered}
        | statistics_traffic(shape, num_ranks),
        host=on_host,
        host_traffic={"optimizer": 2 * on_host} if on_host else {},
        updated=math.ceil(total_bytes(shape.trained) / num_ranks),
    )

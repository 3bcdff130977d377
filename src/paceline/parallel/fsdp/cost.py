"""What ZeRO stages 2 and 3 hold and send."""

import math
from collections.abc import Container
from functools import lru_cache

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes, scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import modules_around
from paceline.parallel.cost import Cost, ModelShape, TensorShape, Workload
from paceline.parallel.zero1.common import (
    batch_norm_names,
    low_bytes_of,
    statistics_traffic,
    step_count_bytes,
)


def shard_dim(shape: tuple[int, ...], num_shards: int) -> int:
    """Dimension along which a parameter is cut: the first, unless that has fewer rows than there
    are shards (which would leave most of each shard padding, as with the low-rank matrices of LoRA)
    and another one divides."""
    if shape[0] < num_shards:
        for dim, size in enumerate(shape):
            if size % num_shards == 0:
                return dim
    return 0


def _cut(one: TensorShape, num_shards: int) -> tuple[int, int]:
    """Elements of a parameter on the fullest rank, and gathered: with the padding of its cut."""
    return _cut_sizes(one.shape, num_shards)


@lru_cache(maxsize=4096)
def _cut_sizes(shape: tuple[int, ...], num_shards: int) -> tuple[int, int]:
    if not shape:
        return 1, 1
    dim = shard_dim(shape, num_shards)
    rows = math.ceil(shape[dim] / num_shards)
    rest = math.prod(shape) // shape[dim] if shape[dim] else 0
    return rows * rest, rows * rest * num_shards


def _block_of(name: str, blocks: Container[str]) -> str:
    """The block that a parameter belongs to; "" for the root."""
    return next((one for one in modules_around(name) if one in blocks), "")


def _blocks_by_parameter(shape: ModelShape) -> dict[str, str]:
    """Parameter → block that is gathered with it. A block that shares a parameter with the rest
    goes with the root."""
    key = "blocks by parameter"
    if key in shape.memo:
        return shape.memo[key]  # type: ignore[no-any-return]
    blocks = frozenset(shape.blocks)
    found = {one.name: _block_of(one.name, blocks) for one in shape.parameters}
    shared = {
        block
        for alias, first in shape.aliases.items()
        for block in (_block_of(alias, blocks), found[first])
        if _block_of(alias, blocks) != found[first]
    }
    shape.memo[key] = {name: "" if block in shared else block for name, block in found.items()}
    return shape.memo[key]  # type: ignore[no-any-return]


def _reached_by_backward(shape: ModelShape) -> set[str]:
    """Parameters whose block takes part in backward: the blocks from the first trained parameter
    on, and the root."""
    blocks = _blocks_by_parameter(shape)
    trained = {blocks[one.name] for one in shape.trained}
    reached: set[str] = {""}
    begun = False
    for one in shape.parameters:
        begun = begun or one.trainable
        if begun or blocks[one.name] in trained:
            reached.add(blocks[one.name])
    return {name for name, block in blocks.items() if block in reached}


def _largest_gathered(shape: ModelShape, num_shards: int, normed: frozenset[str]) -> int:
    """Bytes of weights that are gathered at a time in stage 3: the root's and two blocks', the next
    being fetched meanwhile, and one block's gradients before they are cut."""
    blocks = _blocks_by_parameter(shape)
    sizes: dict[str, int] = {}
    for one in shape.parameters:
        if one.shape:
            size = _cut(one, num_shards)[1] * low_bytes_of(one, shape.low_bytes, normed)
            sizes[blocks[one.name]] = sizes.get(blocks[one.name], 0) + size
    root = sizes.pop("", 0)
    largest = sorted(sizes.values())[-2:]
    return root + sum(largest) + max([root, *largest])


def estimate_zero2(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """See :func:`_estimate`."""
    return _estimate(shape, axes, work, config, reshard_after_forward=False)


def estimate_zero3(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """See :func:`_estimate`."""
    return _estimate(shape, axes, work, config, reshard_after_forward=True)


def _estimate(
    shape: ModelShape,
    axes: ParallelDims,
    work: Workload,
    config: Config,
    reshard_after_forward: bool,
) -> Cost:
    """Per trained parameter, N shards, Adam: stage 3 16/N bytes (4 weights, 4 gradients, 8
    moments: Rajbhandari et al., 2020, section 5.3, figure 1), the weights gathered for the
    moment counted with the activations; stage 2 besides the gathered weights, 2 bytes in mixed
    precision or 4 (section 5.2; the paper's 2 + 14/N has gradients in the low precision, FSDP2
    keeps float32). A frozen parameter is whole on every rank in stage 2, and sharded in stage
    3.

    Each micro-batch reduce-scatters the gradients, Ψ(N-1)/N; trained weights are gathered once
    a step in stage 2, and all weights in forward and backward of each micro-batch in stage 3
    (section 7.2). Over D replicas of the shards an all-reduce of a shard's gradients once a
    step, both reductions in float32. Padding of each parameter's cut is counted."""
    weights = whole = gathered = gradients = state = reduced = 0
    normed = batch_norm_names(shape)
    backward = _reached_by_backward(shape)
    num_shards, gathers = axes.shard, 0
    for one in shape.parameters:
        each = low_bytes_of(one, shape.low_bytes, normed)
        if not one.trainable and not reshard_after_forward:
            whole += one.numel * (each if one.shape else one.element_bytes)
            continue
        cut, padded = _cut(one, num_shards)
        weights += cut * one.element_bytes
        gathered += padded * each if one.shape else 0
        if reshard_after_forward:
            gathers += (
                work.micro_batches * (2 if one.name in backward else 1) * padded * each
                if one.shape
                else 0
            )
        if one.trainable:
            gradients += cut * one.element_bytes
            state += cut * shape.optimizer_bytes_per_element + step_count_bytes(config)
            low_bytes = each if axes.data == 1 else one.element_bytes
            reduced += padded * low_bytes if one.shape else 0
    if not reshard_after_forward:
        gathers = gathered
    scalars = sum(one.size_bytes for one in shape.trained if not one.shape)
    traffic = {
        "reduce_scatter": work.micro_batches * scatter_bytes(reduced, num_shards),
        "all_gather": scatter_bytes(gathers, num_shards),
        "all_reduce": (
            all_reduce_bytes(gradients - scalars, axes.data)
            + all_reduce_bytes(scalars, axes.replicas)
        ),
        **statistics_traffic(shape, axes.replicas),
    }
    on_host = config.parallel.cpu_offload == "all"
    stays = whole + (0 if reshard_after_forward else gathered)
    passing = _largest_gathered(shape, num_shards, normed) if reshard_after_forward else 0
    return Cost(
        parameters=(0 if on_host else weights) + stays + shape.buffer_bytes,
        gradients=0 if on_host else gradients,
        optimizer=0 if on_host else state,
        activations=work.activation_bytes + passing,
        traffic=traffic,
    )

"""Memory and traffic of ZeRO stages 2 and 3."""

import math
from collections.abc import Container, Mapping
from functools import lru_cache

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes, scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import modules_around
from paceline.parallel.cost import Cost, ModelShape, Workload
from paceline.parallel.zero1.cost import (
    batch_norm_names,
    low_bytes_of,
    statistics_traffic,
)


def shard_dim(shape: tuple[int, ...], num_shards: int) -> int:
    """Return the dimension along which a parameter is sharded.

    It is the first dimension, unless it is smaller than the number of shards and another dimension
    divides evenly. Otherwise most of the shards would be padding, as for the low-rank matrices of
    LoRA.
    """
    if shape[0] < num_shards:
        for dim, size in enumerate(shape):
            if size % num_shards == 0:
                return dim
    return 0


@lru_cache(maxsize=4096)
def _shard_sizes(shape: tuple[int, ...], num_shards: int) -> tuple[int, int]:
    """Return the number of elements of a parameter on the rank that holds the most, and the number
    on all ranks including padding."""
    if not shape:
        return 1, 1
    dim = shard_dim(shape, num_shards)
    rows = math.ceil(shape[dim] / num_shards)
    row_size = math.prod(shape) // shape[dim] if shape[dim] else 0
    return rows * row_size, rows * row_size * num_shards


def _block_of(name: str, blocks: Container[str]) -> str:
    """Return the block that a parameter belongs to; "" for the root."""
    return next((module for module in modules_around(name) if module in blocks), "")


def _blocks_by_parameter(shape: ModelShape) -> dict[str, str]:
    """Return the block with which each parameter is gathered.

    A block that shares a parameter with the rest of the model is gathered with the root.
    """
    blocks = frozenset(shape.blocks)
    block_of = {tensor.name: _block_of(tensor.name, blocks) for tensor in shape.parameters}
    shared = {
        block
        for alias, first in shape.aliases.items()
        for block in (_block_of(alias, blocks), block_of[first])
        if _block_of(alias, blocks) != block_of[first]
    }
    return {name: "" if block in shared else block for name, block in block_of.items()}


def _reached_by_backward(shape: ModelShape, blocks: Mapping[str, str]) -> set[str]:
    """Return the parameters of the blocks that take part in backward: those from the first trained
    parameter on, and the root."""
    trained = {blocks[tensor.name] for tensor in shape.trained}
    reached: set[str] = {""}
    begun = False
    for tensor in shape.parameters:
        begun = begun or tensor.trainable
        if begun or blocks[tensor.name] in trained:
            reached.add(blocks[tensor.name])
    return {name for name, block in blocks.items() if block in reached}


def _unsharded(
    shape: ModelShape, blocks: Mapping[str, str], num_shards: int, normed: frozenset[str]
) -> tuple[int, int, int]:
    """Return the bytes of gathered weights, and of gradients that are not sharded yet: of the root
    when backward starts, of the root and a block during backward, and of both at its end, when most
    gradients exist.

    When the root is gathered for backward, it exists twice: as message and as weights.

    The root (embedding and head) is gathered until the end of backward. If it has a tied weight,
    both of its gradients and their sum exist at the end.
    """
    gathered: dict[str, int] = {}
    trained: dict[str, int] = {}
    head = 0
    for tensor in shape.parameters:
        if not tensor.shape:
            continue
        element_bytes = low_bytes_of(tensor, shape.low_bytes, normed)
        size, block = _shard_sizes(tensor.shape, num_shards)[1] * element_bytes, blocks[tensor.name]
        gathered[block] = gathered.get(block, 0) + size
        if tensor.trainable:
            trained[block] = trained.get(block, 0) + size
            head = max(head, size) if not block else head
    is_tied = any(not blocks[name] for name in shape.aliases.values())
    root, root_trained = gathered.pop("", 0), trained.pop("", 0)
    two_blocks = 2 * max(gathered.values(), default=0)
    gradients = 2 * max(trained.values(), default=0)
    end = root + max(head + two_blocks + gradients, (3 if is_tied else 1) * root_trained)
    return 2 * root, 2 * root + two_blocks, end


def estimate_zero2(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Estimate the cost of ZeRO stage 2; see :func:`_estimate`."""
    return _estimate(shape, axes, work, config, reshard_after_forward=False)


def estimate_zero3(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Estimate the cost of ZeRO stage 3; see :func:`_estimate`."""
    return _estimate(shape, axes, work, config, reshard_after_forward=True)


def _estimate(
    shape: ModelShape,
    axes: ParallelDims,
    work: Workload,
    config: Config,
    reshard_after_forward: bool,
) -> Cost:
    """Estimate the cost of sharded training, with the padding of each parameter's shards.

    Per trained parameter, N shards and Adam, stage 3 takes 16/N bytes (4 weights, 4 gradients, 8
    moments: Rajbhandari et al., 2020, section 5.3, figure 1); the weights that are gathered at a
    time count as activations. Stage 2 also holds the gathered weights, 2 bytes in mixed precision
    or 4 (section 5.2; the paper's 2 + 14/N has gradients in the low precision, FSDP2 keeps
    float32). Every rank holds a frozen parameter in full in stage 2; in stage 3 it is sharded.

    The peak is at the start of backward, when all activations exist but, in the first micro-batch,
    no gradients yet; or at its end, when all gradients exist but few activations. What the larger
    of them needs beyond the training state counts as activations.

    Each micro-batch reduce-scatters the gradients, Ψ(N-1)/N. Stage 2 gathers trained weights once
    per step, stage 3 all weights in forward and backward of each micro-batch (section 7.2). With D
    replicas a shard's gradients are all-reduced once per step, both reductions in float32.
    """
    sharded_weights = full_weights = gathered = gradients = state = reduced = gathers = 0
    root_gradients = 0
    normed = batch_norm_names(shape)
    blocks = shape.memoize("blocks by parameter", lambda: _blocks_by_parameter(shape))
    backward = _reached_by_backward(shape, blocks)
    for tensor in shape.parameters:
        low_bytes = low_bytes_of(tensor, shape.low_bytes, normed)
        if not tensor.trainable and not reshard_after_forward:
            full_weights += tensor.numel * (low_bytes if tensor.shape else tensor.element_bytes)
            continue
        size, padded = _shard_sizes(tensor.shape, axes.shard)
        sharded_weights += size * tensor.element_bytes
        if tensor.shape:
            gathered += padded * low_bytes
            passes = 2 if tensor.name in backward else 1
            gathers += work.micro_batches * passes * padded * low_bytes
        if tensor.trainable:
            gradients += size * tensor.element_bytes
            root_gradients += 0 if blocks[tensor.name] else size * tensor.element_bytes
            state += shape.optimizer.bytes_of(tensor.name, size)
            reduced_bytes = low_bytes if axes.data == 1 else tensor.element_bytes
            reduced += padded * reduced_bytes if tensor.shape else 0
    on_host = config.parallel.state_offload == "all"
    local_gradients = 0 if on_host else gradients
    root, first_block, end = _unsharded(shape, blocks, axes.shard, normed)
    end += 0 if on_host else gradients - root_gradients
    if not reshard_after_forward:
        full_weights += gathered
        gathers = gathered
        end -= gathered  # the last backward frees them
    forward = work.activation_bytes
    if reshard_after_forward:
        forward = max(forward, sum(work.block_activation_bytes) + root, first_block)
    forward += local_gradients if work.micro_batches > 1 else 0
    scalars = sum(tensor.size_bytes for tensor in shape.trained if not tensor.shape)
    traffic = {
        "reduce_scatter": work.micro_batches * scatter_bytes(reduced, axes.shard),
        "all_gather": scatter_bytes(gathers, axes.shard),
        "all_reduce": (
            all_reduce_bytes(gradients - scalars, axes.data)
            + all_reduce_bytes(scalars, axes.replicas)
        ),
        **statistics_traffic(shape, axes.replicas),
    }
    return Cost(
        parameters=(0 if on_host else sharded_weights) + full_weights + shape.buffer_bytes,
        gradients=local_gradients,
        optimizer=0 if on_host else state,
        activations=max(0, forward - local_gradients, end - local_gradients),
        traffic=traffic,
        host=sharded_weights + gradients + state if on_host else 0,
        # The shards are copied to be gathered, in forward and backward or once per step.
        host_traffic={
            "parameters": (2 * work.micro_batches if reshard_after_forward else 1) * sharded_weights
            + work.micro_batches * gradients
        }
        if on_host
        else {},
    )

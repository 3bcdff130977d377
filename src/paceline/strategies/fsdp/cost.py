"""Memory and traffic of ZeRO stages 2 and 3."""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import all_reduce_bytes, scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import modules_around
from paceline.parallel.cost import Cost, ModelShape, Workload
from paceline.strategies.fsdp.timeline import GatheredUnit, StepTimeline
from paceline.strategies.zero1.cost import (
    batch_norm_names,
    low_bytes_of,
    reduced_bytes_of,
    statistics_traffic,
)

#: The units that backward begins with, which stay gathered after forward: the head with the last
#: norm, and the root.
_HEAD = "(head)"
_KEPT = frozenset({"", _HEAD})


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


def _unit_of(name: str, units: Mapping[str, str]) -> str:
    """Return the unit that a parameter belongs to; "" for the root."""
    return next((units[module] for module in modules_around(name) if module in units), "")


def _units_by_parameter(shape: ModelShape) -> dict[str, str]:
    """Return the unit with which each parameter is gathered: a block, the embedding, the head or
    the root.

    A block that shares a parameter with the rest of the model is gathered with the root.
    """
    units = dict.fromkeys(shape.head, _HEAD)
    units |= {module: module for module in (shape.embedding, *shape.blocks) if module}
    unit_of = {tensor.name: _unit_of(tensor.name, units) for tensor in shape.parameters}
    shared = {
        unit
        for alias, first in shape.aliases.items()
        for unit in (_unit_of(alias, units), unit_of[first])
        if _unit_of(alias, units) != unit_of[first]
    }
    return {name: "" if unit in shared else unit for name, unit in unit_of.items()}


def reached_by_backward(shape: ModelShape) -> tuple[frozenset[str], frozenset[str]]:
    """Return the parameters of the blocks and of the embedding from the first trained parameter on,
    and the same with the unit before it: FSDP prefetches it, so backward gathers all of these."""
    units = shape.memoize("units by parameter", lambda: _units_by_parameter(shape))
    trained = {units[tensor.name] for tensor in shape.trained}
    reached: set[str] = set()
    begun = False
    prefetched = ""
    for tensor in shape.parameters:
        unit = units[tensor.name]
        begun = begun or tensor.trainable
        if begun or unit in trained:
            reached.add(unit)
        elif unit not in _KEPT and not reached - _KEPT:
            prefetched = unit
    first, gathered = reached - _KEPT, (reached | {prefetched}) - _KEPT
    return (
        frozenset(name for name, unit in units.items() if unit in first),
        frozenset(name for name, unit in units.items() if unit in gathered),
    )


@dataclass
class _Sharded:
    """What the sharded tensors of a model add up to.

    Args:
        unit_of: parameter → its unit.
        weights: bytes of a rank's parts of the weights.
        full_weights: bytes of the weights that are not sharded.
        state: bytes of a rank's part of the optimizer's state.
        scalars: bytes of the trained scalars.
        copies, backward_copies: bytes of a rank's parts that a forward and a backward gather.
        backward_gathers: bytes of the weights that a backward gathers.
    """

    units: dict[str, GatheredUnit]
    unit_of: Mapping[str, str]
    weights: int = 0
    full_weights: int = 0
    state: int = 0
    scalars: int = 0
    copies: int = 0
    backward_copies: int = 0
    backward_gathers: int = 0


def _sum_up(
    shape: ModelShape,
    axes: ParallelDims,
    config: Config,
    reshard_after_forward: bool,
    backward: Container[str],
) -> _Sharded:
    normed = batch_norm_names(shape)
    unit_of = shape.memoize("units by parameter", lambda: _units_by_parameter(shape))
    names = (*shape.blocks, *_KEPT, shape.embedding)
    result = _Sharded({name: GatheredUnit() for name in names}, unit_of)
    for tensor in shape.parameters:
        low_bytes = low_bytes_of(tensor, shape.low_bytes, normed)
        if not tensor.trainable and not reshard_after_forward:
            element_bytes = low_bytes if tensor.shape else tensor.element_bytes
            result.full_weights += tensor.numel * element_bytes
            continue
        unit = result.units[unit_of[tensor.name]]
        size, padded = _shard_sizes(tensor.shape, axes.shard)
        part_bytes = size * tensor.element_bytes
        result.weights += part_bytes
        if tensor.shape:
            unit.weights += padded * low_bytes
            result.copies += part_bytes
            if tensor.name in backward:
                result.backward_gathers += padded * low_bytes
                result.backward_copies += part_bytes
        if tensor.trainable:
            result.state += shape.optimizer.bytes_of(tensor.name, size)
            unit.shards += part_bytes
            if tensor.shape:
                unit.gradients += padded * low_bytes
                unit.message += padded * (
                    reduced_bytes_of(low_bytes, shape.low_bytes, config)
                    if axes.data == 1
                    else tensor.element_bytes
                )
                size_bytes = padded * low_bytes
                unit.largest = max(unit.largest, size_bytes)
                if tensor.is_fused:
                    unit.smallest_fused = min(unit.smallest_fused or size_bytes, size_bytes)
                    unit.fused += size_bytes
            else:
                result.scalars += tensor.size_bytes
    return result


@dataclass(frozen=True)
class DividedExperts:
    """Experts that ranks divide: units inside of the blocks, which fewer ranks share.

    Args:
        shape: the experts that a rank of the group has.
        copies: number of ranks with the same experts, over which they are sharded.
        backward: names of the parameters that a backward gathers.
    """

    shape: ModelShape
    copies: int
    backward: frozenset[str]


def _expert_units(experts: DividedExperts, config: Config) -> dict[str, GatheredUnit]:
    """Return the experts of each block."""
    axes = ParallelDims(shard=experts.copies)
    units = _sum_up(experts.shape, axes, config, True, experts.backward).units
    if config.parallel.state_offload != "all":
        return units
    return {name: replace(unit, shards=0) for name, unit in units.items()}


def estimate_zero2(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Estimate the cost of ZeRO stage 2; see :func:`_estimate`."""
    return _estimate(shape, axes, work, config, reshard_after_forward=False)


def estimate_zero3(
    shape: ModelShape,
    axes: ParallelDims,
    work: Workload,
    config: Config,
    backward: frozenset[str] | None = None,
    experts: DividedExperts | None = None,
) -> Cost:
    """Estimate the cost of ZeRO stage 3; see :func:`_estimate`.

    Args:
        backward: names of the parameters of the blocks and of the embedding that a backward
            gathers, if ``shape`` is only a part of the model.
        experts: the experts, if ``shape`` is the model without them.
    """
    return _estimate(shape, axes, work, config, True, backward, experts)


def _estimate(
    shape: ModelShape,
    axes: ParallelDims,
    work: Workload,
    config: Config,
    reshard_after_forward: bool,
    backward: frozenset[str] | None = None,
    experts: DividedExperts | None = None,
) -> Cost:
    """Estimate the cost of sharded training, with the padding of each parameter's shards.

    Per trained parameter, N shards and Adam, stage 3 takes 16/N bytes (4 weights, 4 gradients, 8
    moments: Rajbhandari et al., 2020, section 5.3, figure 1); the weights that are gathered at a
    time count as activations. Stage 2 also holds the gathered weights, 2 bytes in mixed precision
    or 4 (section 5.2; the paper's 2 + 14/N has gradients in the low precision, FSDP2 keeps
    float32). Every rank holds a frozen parameter in full in stage 2; in stage 3 it is sharded.

    Not everything exists at the same time; :class:`StepTimeline` determines the peak. What it needs
    beyond the training state counts as activations.

    Each micro-batch reduce-scatters the gradients, Ψ(N-1)/N. Stage 2 gathers trained weights once
    per step, stage 3 all weights in forward and backward of each micro-batch (section 7.2), except
    that the head and the root are still gathered when backward begins. With D replicas a shard's
    gradients are all-reduced once per step, both reductions in float32. Without replicas,
    `parallel.reduce_dtype` decides.
    A forward pass without gradients gathers all weights in both stages.
    """
    on_host = config.parallel.state_offload == "all"
    reduce_dtype = config.parallel.reduce_dtype if axes.data == 1 else None
    if backward is None:
        _, backward = shape.memoize("in backward", lambda: reached_by_backward(shape))
    key = "sharded", axes.shard, reduce_dtype, reshard_after_forward
    tensors = shape.memoize(
        key, lambda: _sum_up(shape, axes, config, reshard_after_forward, backward)
    )
    sharded_weights, full_weights, state = tensors.weights, tensors.full_weights, tensors.state
    scalars, unit_of = tensors.scalars, tensors.unit_of
    units = tensors.units
    saved = work.activations.on_device or (0,) * len(shape.blocks)
    gathered = sum(unit.weights for unit in units.values())
    gradients = sum(unit.shards for unit in units.values())
    reduced = sum(unit.message for unit in units.values())
    forwards = 1 + config.extra_forwards
    copies = work.micro_batches * (forwards * tensors.copies + tensors.backward_copies)
    if reshard_after_forward:
        gathers = work.micro_batches * (forwards * gathered + tensors.backward_gathers)
    else:
        full_weights += gathered
        gathers = gathered * (1 + work.micro_batches * config.extra_forwards)
    traffic = {
        "reduce_scatter": work.micro_batches * scatter_bytes(reduced, axes.shard),
        "all_gather": scatter_bytes(gathers, axes.shard),
        "all_reduce": (
            all_reduce_bytes(gradients - scalars, axes.data)
            + all_reduce_bytes(scalars, axes.replicas)
        ),
        **statistics_traffic(shape, axes.replicas),
    }
    if on_host:
        units = {name: replace(unit, shards=0) for name, unit in units.items()}
    of_experts = {} if experts is None else _expert_units(experts, config)
    present = shape.memoize("units with parameters", lambda: set(unit_of.values()))
    blocks = [
        (units[name], size)
        for name, size in zip(shape.blocks, saved, strict=True)
        if name in present
    ]
    timeline = StepTimeline(
        units[""],
        units[shape.embedding] if shape.embedding else GatheredUnit(),
        [unit for unit, _ in blocks],
        units[_HEAD],
        [of_experts.get(name, GatheredUnit()) for name in shape.blocks if name in present]
        if of_experts
        else [],
        [size for _, size in blocks],
        work,
        axes.shard,
        reshard_after_forward,
        ends_tied=any(not unit_of[name] for name in shape.aliases.values()),
        gathers_experts=experts is None or experts.copies > 1,
    )
    peak = timeline.peak_bytes()
    local_gradients = 0 if on_host else gradients
    counted = local_gradients + (0 if reshard_after_forward else gathered)
    counted += sum(unit.shards for unit in of_experts.values())  # part of the cost of the experts
    return Cost(
        parameters=(0 if on_host else sharded_weights) + full_weights + shape.buffer_bytes,
        gradients=local_gradients,
        optimizer=0 if on_host else state,
        activations=max(0, peak - counted),
        not_at_peak=max(0, counted - max(peak, local_gradients)),
        traffic=traffic,
        host=sharded_weights + gradients + state if on_host else 0,
        # The shards are copied to be gathered, in forward and backward or once per step.
        host_traffic={
            "parameters": (copies if reshard_after_forward else sharded_weights)
            + work.micro_batches * gradients
        }
        if on_host
        else {},
        updated=gradients,
        gathered=gathered if reshard_after_forward else 0,
    )

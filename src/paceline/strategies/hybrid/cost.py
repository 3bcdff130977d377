"""Memory and traffic of each rank of a hybrid, from the model's shape alone."""

import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import all_reduce_bytes, scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.activations import (
    NO_ACTIVATIONS,
    Activations,
    TrainedMatrices,
    trained_matrices,
)
from paceline.models.shape.record import LayerUse, ModelShape, TensorShape, modules_around
from paceline.models.tensor_plan.style import (
    COLUMN,
    COLUMN_GATHERED,
    EXPERTS,
    LATENT,
    ROW,
    ROW_SPLIT,
    cut_dim,
    is_summed,
    kind_of,
    local_ranges,
    parse_style,
    uses_sequence_parallel,
)
from paceline.parallel.buckets.layout import lay_out
from paceline.parallel.cost import Cost, Workload
from paceline.strategies.expert.cost import exchange_bytes, expert_width, split_experts
from paceline.strategies.fsdp.cost import DividedExperts, estimate_zero3, reached_by_backward
from paceline.strategies.pipeline.cost import PipelineCost, pipeline_cost
from paceline.strategies.reducers.compression.cost import communication_cost
from paceline.strategies.tensor.vocabulary_cost import vocabulary_traffic
from paceline.strategies.zero1.cost import statistics_traffic


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Estimate the memory of the fullest rank and the traffic of the rank that sends most.

    The two may be in different stages of a pipeline. Each axis divides what the ones before it
    leave: a stage's parameters, the part of each tensor-parallel layer, the shards of these.
    """
    stages = _stages(shape, axes, work, config)
    costs = [_stage_cost(stage, shape, axes, work, config) for stage in stages]
    fullest = max(costs, key=lambda cost: cost.total)
    busiest = max(costs, key=lambda cost: cost.traffic_per_step)
    return replace(fullest, traffic=busiest.traffic)


@dataclass(frozen=True)
class _Stage:
    shape: ModelShape
    send_bytes: int = 0
    activations: Activations = NO_ACTIVATIONS


def _stages(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> list[_Stage]:
    if axes.pipeline == 1:
        return [_Stage(shape, activations=work.activations)]
    settings = config.parallel
    pipeline = pipeline_cost(
        shape,
        axes.pipeline,
        settings.stages_per_rank,
        settings.pipeline_schedule,
        work,
        axes.tensor,
    )
    copies = Counter(name for names in pipeline.parameters for name in names)
    stage_shapes = shape.memoize(
        ("stage shapes", pipeline.parameters, pipeline.buffers),
        lambda: _stage_shapes(shape, pipeline),
    )
    stages = []
    for rank, stage_shape in enumerate(stage_shapes):
        # Each rank sends the gradients of its part of tied weights.
        part = _part_of_stage(stage_shape, axes.tensor)
        tied, local = (
            sum(
                tensor.size_bytes * (copies[tensor.name] - 1)
                for tensor in held.trained
                if copies[tensor.name] > 1
            )
            for held in (stage_shape, part)
        )
        sends = pipeline.send_bytes[rank] - tied + local // axes.shard
        stages.append(_Stage(stage_shape, sends, pipeline.activations[rank]))
    return stages


def _stage_shapes(shape: ModelShape, pipeline: PipelineCost) -> list[ModelShape]:
    """Return the shape of what each rank of the pipeline holds."""
    parameters = {tensor.name: tensor for tensor in shape.parameters}
    buffers = {tensor.name: tensor for tensor in shape.buffers}
    shapes = []
    for names, buffer_names in zip(pipeline.parameters, pipeline.buffers, strict=True):
        members = set(names)
        modules = {module for name in names for module in modules_around(name)}
        stage_shape = replace(
            shape,
            parameters=tuple(parameters[name] for name in names),
            buffers=tuple(buffers[name] for name in buffer_names),
            tensor_plan={
                name: style
                for name, style in shape.tensor_plan.items()
                if name in modules or name in members
            },
            aliases={alias: first for alias, first in shape.aliases.items() if first in members},
        )
        shapes.append(stage_shape)
    return shapes


def _stage_cost(
    stage: _Stage,
    model: ModelShape,
    axes: ParallelDims,
    work: Workload,
    config: Config,
    backward: frozenset[str] | None = None,
) -> Cost:
    part = _part_of_stage(stage.shape, axes.tensor)
    if axes.expert > 1:
        return _with_experts(part, axes, work, config)
    if axes.shard > 1:
        sharded = ParallelDims(data=axes.data, shard=axes.shard)
        stage_work = replace(work, activations=stage.activations)
        base = estimate_zero3(part, sharded, stage_work, config, backward)
    else:
        activations = stage.activations.peak(trained_matrices(part))
        base = replace(_replicated(part, axes, config), activations=activations)
    added: dict[str, int] = {}
    if axes.tensor > 1:
        added = _tensor_traffic(stage.shape, model, part, axes, work, config)
        of_ends = stage.activations
        vocabulary = vocabulary_traffic(
            model, axes, work, config, of_ends.has_embedding, of_ends.has_head
        )
        added["all_reduce"] = added.get("all_reduce", 0) + vocabulary
    added["send"] = stage.send_bytes
    traffic = dict(base.traffic)
    for collective, size_bytes in added.items():
        if size_bytes:
            traffic[collective] = traffic.get(collective, 0) + size_bytes
    return replace(base, traffic=traffic)


def _with_experts(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Return the cost if ranks divide the experts. The ranks with the same experts reduce or shard
    them."""
    rest_shape, experts_shape = shape.memoize(
        ("experts", axes.expert), lambda: split_experts(shape, axes.expert)
    )
    # Experts are units inside of the blocks: FSDP prefetches the block before, not its experts.
    reached, gathered = shape.memoize("in backward", lambda: reached_by_backward(shape))
    copies, activations = axes.size // axes.expert, work.activations
    if axes.shard > 1:
        divided = DividedExperts(experts_shape, copies, reached)
        sharded = ParallelDims(data=axes.data, shard=axes.shard)
        rest = estimate_zero3(rest_shape, sharded, work, config, gathered, divided)
        # What exists at the peak is part of the estimate of the rest.
        state = replace(work, activations=NO_ACTIVATIONS)
        shared = ParallelDims(shard=copies)
        experts = estimate_zero3(experts_shape, shared, state, config, reached)
    else:
        peak = activations.peak(_with_fused(trained_matrices(rest_shape), experts_shape))
        rest = replace(_replicated(rest_shape, replace(axes, expert=1), config), activations=peak)
        experts = _replicated(experts_shape, ParallelDims(data=copies), config)
    traffic = Counter(rest.traffic)
    traffic.update(experts.traffic)
    traffic["all_to_all"] += exchange_bytes(shape, axes, work, config)
    return replace(
        rest,
        parameters=rest.parameters + experts.parameters,
        gradients=rest.gradients + experts.gradients,
        optimizer=rest.optimizer + experts.optimizer,
        traffic=traffic,
    )


def _with_fused(rest: TrainedMatrices, experts: ModelShape) -> TrainedMatrices:
    """Return the trained matrices of a model with a part of its experts."""
    fused = trained_matrices(experts)
    return replace(rest, largest_fused=fused.largest_fused, smallest_fused=fused.smallest_fused)


def _part_of_stage(shape: ModelShape, size: int) -> ModelShape:
    if size == 1:
        return shape
    return shape.memoize(("tensor part", size), lambda: _tensor_part(shape, size))


def _tensor_part(shape: ModelShape, size: int) -> ModelShape:
    """Return the part of ``shape`` that each of ``size`` tensor-parallel ranks holds."""
    parameters = []
    for tensor in shape.parameters:
        cut, local = local_ranges(tensor.name, tensor.shape, shape.tensor_plan, size)
        if local:
            part = list(tensor.shape)
            part[cut] = sum(rows.length for rows in local)
            tensor = replace(tensor, shape=tuple(part))
        parameters.append(tensor)
    return replace(shape, parameters=tuple(parameters))


def _replicated(shape: ModelShape, axes: ParallelDims, config: Config) -> Cost:
    """Estimate as `ddp` over the axis data: gradients in aligned buckets, all-reduced once per step
    (Rajbhandari et al., "ZeRO", 2020, section 7.1)."""
    cap_bytes = config.parallel.bucket_cap_mb * 2**20
    gradients = shape.memoize(
        ("gradients in buckets", cap_bytes), lambda: _gradient_bytes(shape, cap_bytes)
    )
    optimizer = shape.memoize("optimizer", lambda: _optimizer_bytes(shape))
    traffic: Mapping[str, int] = {"all_reduce": all_reduce_bytes(gradients, axes.data)}
    reduction = communication_cost(shape, config, axes.data)
    if reduction is not None:
        optimizer += reduction.retained_bytes
        traffic = reduction.traffic
    return Cost(
        parameters=shape.parameter_bytes + shape.buffer_bytes,
        gradients=gradients,
        optimizer=optimizer,
        traffic={**traffic, **statistics_traffic(shape, axes.data)},
    )


def _gradient_bytes(shape: ModelShape, cap_bytes: float) -> int:
    trained = shape.trained
    layouts = lay_out(
        [(tensor.numel, tensor.element_bytes, tensor.element_bytes) for tensor in trained],
        cap_bytes,
    )
    return sum(layout.size * trained[layout.members[0]].element_bytes for layout in layouts)


def _optimizer_bytes(shape: ModelShape) -> int:
    return sum(shape.optimizer.bytes_of(tensor.name, tensor.numel) for tensor in shape.trained)


# -- tensor-parallel layers
def _tensor_traffic(
    stage: ModelShape,
    model: ModelShape,
    part: ModelShape,
    axes: ParallelDims,
    work: Workload,
    config: Config,
) -> dict[str, int]:
    """Return the bytes that a rank sends within tensor-parallel layers, by collective.

    Each row layer all-reduces its output in forward, and the gradient of each input of column
    layers is all-reduced in backward: four all-reduces of tokens × hidden per transformer layer
    (Shoeybi et al., "Megatron-LM", 2019, section 3). With sequence parallelism each is a
    reduce-scatter and an all-gather in the other direction (Korthikanti et al., 2022, section
    4.2.2): as many bytes, and additionally the first block's input and the last one's output.
    Recomputation repeats the collectives of the forward, except at the end of a block.
    """
    recomputed = config.train_args.recomputed_share(len(model.blocks))
    layers = stage.memoize("layers", lambda: Counter(_layers(stage, model)))
    size = axes.tensor
    sequence = uses_sequence_parallel(
        config.parallel.sequence_parallel, size, axes.pipeline, model.splits_tokens
    )
    outer_bytes = stage.parameters[0].element_bytes if stage.parameters else 4
    element_bytes = stage.low_bytes or outer_bytes
    tokens = work.micro_batches * work.positions
    # Each rank has the same number of tokens. The padding is exact if every micro-batch has the
    # same number, else (size - 1) / 2 on average.
    is_exact = float(work.positions).is_integer()
    padded = work.micro_batches * (
        math.ceil(work.positions / size) * size if is_exact else work.positions + (size - 1) / 2
    )
    traffic = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}

    def add(collective: str, elements: float) -> None:
        sent_bytes = all_reduce_bytes if collective == "all_reduce" else scatter_bytes
        traffic[collective] += count * sent_bytes(elements * element_bytes, size)

    for layer, count in layers.items():
        forwards = 1 + recomputed * layer.is_repeated
        if sequence:
            if layer.kind == COLUMN:
                add("all_gather", padded * layer.width * forwards)
                add("reduce_scatter", padded * layer.width * layer.needs_gradient)
            elif layer.kind == ROW or layer.kind == _DOWN:
                add("reduce_scatter", padded * layer.width * forwards)
                add("all_gather", padded * layer.width)
        elif layer.kind in (COLUMN, COLUMN_GATHERED, LATENT):
            add("all_reduce", tokens * layer.width * layer.needs_gradient)
        elif layer.kind == EXPERTS:
            # the output; the gradients of the input and of the weights of each token's experts
            add("all_reduce", tokens * layer.width * (forwards + layer.needs_gradient))
            sent = all_reduce_bytes(tokens * layer.gathered * outer_bytes, size)
            traffic["all_reduce"] += count * sent
        elif layer.kind in (ROW, ROW_SPLIT, _DOWN):
            add("all_reduce", tokens * layer.width * forwards)
        elif layer.kind == _UP:
            add("all_reduce", tokens * layer.width)
        elif layer.kind == _GATHER:
            add("all_gather", tokens * layer.width * forwards)
        if layer.kind in (ROW_SPLIT, _DOWN):
            add("all_gather", tokens * layer.gathered * layer.needs_gradient)
    partial = part.memoize(("partial", sequence), lambda: _partial_bytes(stage, part, sequence))
    shared = stage.memoize(("shared", size), lambda: _shared_bytes(stage, size))
    traffic["all_reduce"] += all_reduce_bytes(
        sum(size_bytes // axes.shard for size_bytes in partial) + shared // axes.shard, size
    )
    if sequence and stage.blocks:
        hidden = model.block_output_elements[0] if model.block_output_elements else 0.0
        if axes.shard > 1 and stage.low_bytes:
            outer_bytes = min(outer_bytes, stage.low_bytes)
        gathers = 1 + (bool(stage.parameters) and stage.parameters[0].trainable)
        traffic["all_gather"] += gathers * scatter_bytes(padded * hidden * outer_bytes, size)
    return {collective: size_bytes for collective, size_bytes in traffic.items() if size_bytes}


#: LoRA's second matrix beside a column layer, and its first beside a row layer; the output of a
#: column layer that all ranks have in full.
_UP, _DOWN, _GATHER = "lora_B", "lora_A", "gather"


@dataclass(frozen=True)
class _Layer:
    """A use of layers that share a collective.

    Args:
        kind: the kind of their style, or ``_UP``, ``_DOWN`` or ``_GATHER``.
        width: features that the collective communicates.
        needs_gradient, is_repeated: see :class:`~paceline.models.shape.record.LayerUse`.
        gathered: features whose gradient is gathered; of experts, the number of experts per token.
    """

    kind: str
    width: int
    needs_gradient: bool = True
    is_repeated: bool = True
    gathered: int = 0


def _layers(stage: ModelShape, model: ModelShape) -> list[_Layer]:
    """Return the collectives of one forward and backward. Column layers with the same input share
    one, and each adapter has its own."""
    shapes = {tensor.name: tensor for tensor in stage.parameters}
    inside = _by_module(stage)
    adapters_of = _adapters(stage)
    uses_of = model.layer_uses
    if uses_of is None:
        uses_of = _likely_uses(stage, model, adapters_of)
    layers: list[_Layer] = []
    for name, style in stage.tensor_plan.items():
        kind, number = kind_of(style), parse_style(style).number
        weight = shapes.get(f"{name}.weight") or shapes.get(f"{name}.base_layer.weight")
        experts = inside.get(name, [])
        if kind == EXPERTS and experts:
            width = expert_width(experts)
            layers += [
                _Layer(EXPERTS, width, use.needs_gradient, use.is_repeated, number)
                for use in uses_of.get(name, ())
            ]
        elif kind == LATENT and weight is not None:
            layers += [_Layer(LATENT, number, use.needs_gradient) for use in uses_of.get(name, ())]
        if weight is None or kind not in (COLUMN, COLUMN_GATHERED, ROW, ROW_SPLIT):
            continue
        rows, columns = reversed(weight.shape) if parse_style(style).transposed else weight.shape
        adapters = adapters_of.get(name, [])
        is_column = kind in (COLUMN, COLUMN_GATHERED)
        for use in uses_of.get(name, ()):
            if is_column and not use.shares_input:
                layers.append(_Layer(kind, columns, use.needs_gradient))
            elif not is_column:
                gathered = columns if kind == ROW_SPLIT else 0
                layers.append(_Layer(kind, rows, use.needs_gradient, use.is_repeated, gathered))
            if kind == COLUMN_GATHERED:
                layers.append(_Layer(_GATHER, rows, is_repeated=use.is_repeated))
        for matrix in adapters:
            is_up = ".lora_B." in matrix.name
            for use in uses_of.get(matrix.name.removesuffix(".weight"), ()):
                if is_up and is_column:
                    layers.append(_Layer(_UP, matrix.shape[1]))
                    if kind == COLUMN_GATHERED:
                        layers.append(_Layer(_GATHER, rows, is_repeated=use.is_repeated))
                elif not is_up and not is_column:
                    gathered = columns if kind == ROW_SPLIT else 0
                    layers.append(
                        _Layer(
                            _DOWN, matrix.shape[0], use.needs_gradient, use.is_repeated, gathered
                        )
                    )
    return layers


def _likely_uses(
    stage: ModelShape, model: ModelShape, adapters_of: Mapping[str, list[TensorShape]]
) -> dict[str, tuple[LayerUse, ...]]:
    """Return the uses of layers if the model was not traced: each layer runs once, in the order of
    the plan, and successive column layers with the same parent and input width share an input."""
    inside = _by_module(stage)
    order = {tensor.name: number for number, tensor in enumerate(model.parameters)}
    first_trained = min((order[tensor.name] for tensor in model.trained), default=len(order))
    last_rows = _last_rows(stage)
    uses: dict[str, LayerUse] = {}
    shared: tuple[str, int] | None = None
    for name, style in stage.tensor_plan.items():
        kind, adapters = kind_of(style), adapters_of.get(name, [])
        uses |= {matrix.name.removesuffix(".weight"): LayerUse() for matrix in adapters}
        first = next(iter(inside.get(name, [])), None)
        if first is None:
            continue
        is_reached = first_trained < order[first.name]
        if kind in (COLUMN, COLUMN_GATHERED):
            is_transposed = parse_style(style).transposed
            key = (name.rpartition(".")[0], first.shape[0 if is_transposed else -1])
            uses[name] = LayerUse(is_reached, shares_input=key == shared)
            shared = key
        elif kind == LATENT:
            uses[name], shared = LayerUse(), None
        else:
            # the input of lora_B, which is kept for backward, is computed after the sum
            ends_block = name in last_rows and not adapters
            needs_gradient = is_reached or kind != EXPERTS
            uses[name], shared = LayerUse(needs_gradient, is_repeated=not ends_block), None
    return {name: (use,) for name, use in uses.items()}


def _shared_bytes(stage: ModelShape, size: int) -> int:
    """Return the bytes of one all-reduce for the gradients of weights that several ranks hold, in
    which each group of ranks has a separate range."""
    total = 0
    for tensor in stage.trained:
        dim, local = local_ranges(tensor.name, tensor.shape, stage.tensor_plan, size)
        for part in local:
            if part.copies > 1:
                rows = part.length * (size // part.copies)
                total += tensor.numel // tensor.shape[dim] * rows * 4
    return total


def _by_module(shape: ModelShape) -> dict[str, list[TensorShape]]:
    """Return the parameters within each module."""
    inside: dict[str, list[TensorShape]] = {}
    for tensor in shape.parameters:
        for module in modules_around(tensor.name):
            inside.setdefault(module, []).append(tensor)
    return inside


def _adapters(shape: ModelShape) -> dict[str, list[TensorShape]]:
    """Return the LoRA matrices of each module."""
    adapters: dict[str, list[TensorShape]] = {}
    for tensor in shape.parameters:
        for kind in (_UP, _DOWN):
            module, marker, _ = tensor.name.partition(f".{kind}.")
            if marker:
                adapters.setdefault(module, []).append(tensor)
    return adapters


def _last_rows(shape: ModelShape) -> set[str]:
    """Return the last row layer of each block."""
    last: dict[str, str] = {}
    blocks = set(shape.blocks)
    for name, style in shape.tensor_plan.items():
        block = next((module for module in (*modules_around(name), name) if module in blocks), None)
        of_experts = kind_of(shape.tensor_plan.get(name.rpartition(".")[0], COLUMN)) == EXPERTS
        if block is not None and kind_of(style) in (ROW, ROW_SPLIT, EXPERTS) and not of_experts:
            last[block] = name
    return set(last.values())


def _partial_bytes(stage: ModelShape, part: ModelShape, sequence: bool) -> list[int]:
    """Return the bytes of each trained parameter for which a tensor-parallel rank computes only a
    part of the gradient."""
    dims, blocks = (
        {tensor.name: len(tensor.shape) for tensor in stage.parameters},
        set(stage.blocks),
    )
    return [
        tensor.size_bytes
        for tensor in part.trained
        if _is_partial(tensor.name, dims[tensor.name], stage.tensor_plan, blocks, sequence)
    ]


def _is_partial(
    name: str, dims: int, plan: Mapping[str, str], blocks: Container[str], sequence: bool
) -> bool:
    if is_summed(name, plan):
        return True
    modules = modules_around(name)
    if not sequence or not any(module in blocks for module in modules):
        return False
    bias_of_row = name.endswith(".bias") and any(
        kind_of(plan[module]) == ROW for module in modules if module in plan
    )
    return cut_dim(name, dims, plan) is None and not bias_of_row

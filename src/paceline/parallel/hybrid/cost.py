"""What each rank of a hybrid holds and sends, from the model's shape alone."""

import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes, scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import ModelShape, TensorShape, modules_around
from paceline.models.tensor_plan.style import (
    COLUMN,
    COLUMN_GATHERED,
    EXPERTS,
    LATENT,
    ROW,
    ROW_SPLIT,
    cut_dim,
    held_ranges,
    is_summed,
    kind_of,
    parse_style,
)
from paceline.parallel.compression.cost import communication_cost
from paceline.parallel.cost import Cost, Workload
from paceline.parallel.ddp.layout import lay_out
from paceline.parallel.fsdp.cost import estimate_zero3
from paceline.parallel.pipeline.cost import PipelineCost, pipeline_cost
from paceline.parallel.zero1.common import statistics_traffic, step_count_bytes


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """The rank that is the fullest, with the traffic of the one that sends most: perhaps different
    stages of a pipeline.

    Each axis divides what the ones before it left: a stage's parameters, the part of each cut
    layer, the shards of these.
    """
    stages = _stages(shape, axes, work, config)
    found = [_stage_cost(one, shape, axes, work, config) for one in stages]
    fullest = max(found, key=lambda one: one.total)
    busiest = max(found, key=lambda one: one.traffic_per_step)
    return replace(fullest, traffic=busiest.traffic)


@dataclass(frozen=True)
class _Stage:
    shape: ModelShape
    send_bytes: int = 0
    activations: int = 0


def _stages(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> list[_Stage]:
    if axes.pipeline == 1:
        return [_Stage(shape, activations=work.activation_bytes)]
    settings = config.parallel
    line = pipeline_cost(
        shape,
        axes.pipeline,
        settings.stages_per_rank,
        settings.pipeline_schedule,
        work,
        axes.tensor,
    )
    copies = Counter(name for names in line.parameters for name in names)
    found = []
    for rank, held in enumerate(_stage_shapes(shape, line)):
        # Gradients of tied weights are sent as each rank holds them: a shard.
        tied = sum(one.size_bytes * (copies[one.name] - 1) for one in held.trained)
        sends = line.send_bytes[rank] - tied + tied // axes.shard
        found.append(_Stage(held, sends, line.activation_bytes[rank]))
    return found


def _stage_shapes(shape: ModelShape, line: PipelineCost) -> list[ModelShape]:
    """What each rank of the pipeline holds, as a shape; computed once per shape and division."""
    key = ("stage shapes", line.parameters, line.buffers)
    if key not in shape.memo:
        parameters = {one.name: one for one in shape.parameters}
        buffers = {one.name: one for one in shape.buffers}
        held = []
        for names, buffer_names in zip(line.parameters, line.buffers, strict=True):
            mine = set(names)
            modules = {module for name in names for module in modules_around(name)}
            part = replace(
                shape,
                parameters=tuple(parameters[name] for name in names),
                buffers=tuple(buffers[name] for name in buffer_names),
                tensor_plan={
                    name: style
                    for name, style in shape.tensor_plan.items()
                    if name in modules or name in mine
                },
                aliases={alias: first for alias, first in shape.aliases.items() if first in mine},
            )
            held.append(part)
        shape.memo[key] = held
    return shape.memo[key]  # type: ignore[no-any-return]


def _tensor_cut(shape: ModelShape, size: int) -> ModelShape:
    """The part of ``shape`` that each of ``size`` tensor-parallel ranks holds; computed once per
    shape."""
    if size == 1:
        return shape
    key = ("tensor cut", size)
    if key not in shape.memo:
        shape.memo[key] = replace(
            shape, parameters=tuple(_part(one, shape.tensor_plan, size) for one in shape.parameters)
        )
    return shape.memo[key]  # type: ignore[no-any-return]


def _stage_cost(
    stage: _Stage, whole: ModelShape, axes: ParallelDims, work: Workload, config: Config
) -> Cost:
    cut = _tensor_cut(stage.shape, axes.tensor)
    base = _sharded(cut, axes, work, config) if axes.shard > 1 else _replicated(cut, axes, config)
    traffic = dict(base.traffic)
    within = _tensor_traffic(stage.shape, whole, cut, axes, work, config) if axes.tensor > 1 else {}
    for name, size in (*within.items(), ("send", stage.send_bytes)):
        if size:
            traffic[name] = traffic.get(name, 0) + size
    passing = base.activations - (work.activation_bytes if axes.shard > 1 else 0)
    return replace(base, activations=stage.activations + passing, traffic=traffic)


def _part(one: TensorShape, plan: Mapping[str, str], size: int) -> TensorShape:
    dim, held = held_ranges(one.name, one.shape, plan, size)
    if not held:
        return one
    length = sum(part.length for part in held)
    return replace(
        one, shape=tuple(length if at == dim else whole for at, whole in enumerate(one.shape))
    )


def _replicated(shape: ModelShape, axes: ParallelDims, config: Config) -> Cost:
    """As `ddp` over the axis data: gradients in aligned buckets, all-reduced once a step
    (Rajbhandari et al., "ZeRO", 2020, section 7.1)."""
    trained = shape.trained
    cap_bytes = config.parallel.bucket_cap_mb * 2**20
    layouts = lay_out(
        [(one.numel, one.element_bytes, one.element_bytes) for one in trained], cap_bytes
    )
    gradients = sum(one.size * trained[one.members[0]].element_bytes for one in layouts)
    other = communication_cost(trained, config, axes.data)
    traffic = (
        {"all_reduce": all_reduce_bytes(gradients, axes.data)} if other is None else other.traffic
    )
    optimizer = sum(
        one.numel * shape.optimizer_bytes_per_element + step_count_bytes(config) for one in trained
    )
    return Cost(
        parameters=shape.parameter_bytes + shape.buffer_bytes,
        gradients=gradients,
        optimizer=optimizer + (0 if other is None else other.kept),
        traffic={**traffic, **statistics_traffic(shape, axes.data)},
    )


def _sharded(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """As `zero3` over the axes shard and data, of what the other axes leave."""
    return estimate_zero3(shape, ParallelDims(data=axes.data, shard=axes.shard), work, config)


# -- within the cut layers
def _tensor_traffic(
    stage: ModelShape,
    whole: ModelShape,
    cut: ModelShape,
    axes: ParallelDims,
    work: Workload,
    config: Config,
) -> dict[str, int]:
    """Each row layer all-reduces its output in forward, each input of column layers has its
    gradient all-reduced in backward: four all-reduces of tokens × hidden a transformer layer
    (Shoeybi et al., "Megatron-LM", 2019, section 3). With sequence parallelism each is a
    reduce-scatter, and an all-gather the other way (Korthikanti et al., 2022, section 4.2.2): as
    many bytes, and the first block's input and the last one's output once more. Recomputed
    activations pay their forward again, but for the end of a block."""
    # transformers lets the embeddings' output require a gradient where adapters meet activation
    # checkpointing.
    adapted = config.train_args.gradient_checkpointing and any(
        ".lora_A." in one.name for one in whole.parameters
    )
    key = ("layers", adapted)
    if key not in stage.memo:
        stage.memo[key] = _layers(stage, whole, adapted)
    layers = stage.memo[key]
    size, recomputed = axes.tensor, config.train_args.gradient_checkpointing
    sequence = config.parallel.sequence_parallel
    element = stage.low_bytes or (stage.parameters[0].element_bytes if stage.parameters else 4)
    outer_bytes = stage.parameters[0].element_bytes if stage.parameters else 4
    tokens = work.micro_batches * work.positions
    # Parts of the tokens are equal: exact where every micro-batch has as many, else half a part
    # more in the mean.
    exact = float(work.positions).is_integer()
    padded = work.micro_batches * (
        math.ceil(work.positions / size) * size if exact else work.positions + (size - 1) / 2
    )
    traffic = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}

    def add(kind: str, count: float) -> None:
        amount = count * element
        traffic[kind] += (
            all_reduce_bytes(amount, size) if kind == "all_reduce" else scatter_bytes(amount, size)
        )

    for layer in layers:
        again = 1 + (recomputed and not layer.ends_block)
        if sequence:
            if layer.kind in (COLUMN, ROW):
                forward, backward = (
                    ("all_gather", "reduce_scatter")
                    if layer.kind == COLUMN
                    else ("reduce_scatter", "all_gather")
                )
                add(forward, padded * layer.width * again)
                add(backward, padded * layer.width * (layer.reached or layer.kind == ROW))
            elif layer.kind == _DOWN:
                add("reduce_scatter", padded * layer.width * again)
                add("all_gather", padded * layer.width)
        elif layer.kind in (COLUMN, COLUMN_GATHERED, LATENT):
            add("all_reduce", tokens * layer.width * layer.reached)
        elif (
            layer.kind == EXPERTS
        ):  # the output; the gradients of the input and of the weights of each token's experts
            add("all_reduce", tokens * (layer.width * again + layer.width * layer.reached))
            traffic["all_reduce"] += all_reduce_bytes(tokens * layer.gathered * outer_bytes, size)
        elif layer.kind in (ROW, ROW_SPLIT, _DOWN):
            add("all_reduce", tokens * layer.width * again)
        elif layer.kind == _UP:
            add("all_reduce", tokens * layer.width)
        if layer.gathered and layer.kind != EXPERTS:
            kind = layer.kind == COLUMN_GATHERED
            add("all_gather", tokens * layer.gathered * (again if kind else layer.reached))
    summed = sum(one.size_bytes // max(1, axes.shard) for one in _partial(stage, cut, sequence))
    traffic["all_reduce"] += all_reduce_bytes(
        summed + _shared_bytes(stage, size) // max(1, axes.shard), size
    )
    if sequence and stage.blocks:
        hidden = whole.block_output_elements[0] if whole.block_output_elements else 0.0
        outer = stage.parameters[0].element_bytes if stage.parameters else 4
        outer = min(outer, stage.low_bytes) if axes.shard > 1 and stage.low_bytes else outer
        traffic["all_gather"] += scatter_bytes(padded * hidden * outer, size)
        if adapted or (stage.parameters and stage.parameters[0].trainable):
            traffic["all_gather"] += scatter_bytes(padded * hidden * outer, size)
    return {name: amount for name, amount in traffic.items() if amount}


#: LoRA's second matrix beside a column layer, its first beside a row layer.
_UP, _DOWN = "lora_B", "lora_A"


@dataclass(frozen=True)
class _Layer:
    """Layers that share a collective. ``width``: features that it moves; ``reached``: a gradient
    comes to its input; ``gathered``: features put together besides; ``ends_block``: nothing after
    it is recomputed."""

    kind: str
    width: int
    reached: bool = True
    ends_block: bool = False
    gathered: int = 0


def _layers(stage: ModelShape, whole: ModelShape, inputs_trained: bool) -> list[_Layer]:
    """The collectives of one forward and backward, in order: column layers one after another with
    one parent and one input width share theirs, and each adapter has its own."""
    shapes = {one.name: one for one in stage.parameters}
    order = {one.name: number for number, one in enumerate(whole.parameters)}
    first_trained = min((order[one.name] for one in whole.trained), default=len(order))
    if inputs_trained:
        first_trained = -1
    last_rows = _last_rows(stage)
    adapters_of = _adapters(stage)
    found: list[_Layer] = []
    shared: tuple[str, int] | None = None
    for name, style in stage.tensor_plan.items():
        kind = kind_of(style)
        special = _special(name, style, shapes, order, first_trained, name in last_rows)
        if special is not None:
            found.append(special)
            shared = None
        weight = shapes.get(f"{name}.weight") or shapes.get(f"{name}.base_layer.weight")
        if weight is None or kind not in (COLUMN, COLUMN_GATHERED, ROW, ROW_SPLIT):
            continue
        rows, columns = reversed(weight.shape) if parse_style(style).transposed else weight.shape
        reached = first_trained < order[weight.name]
        adapters = adapters_of.get(name, [])
        if kind in (COLUMN, COLUMN_GATHERED):
            key = (name.rpartition(".")[0], columns)
            if key != shared:
                found.append(_Layer(kind, columns, reached))
            shared = key
            if kind == COLUMN_GATHERED:
                found.append(_Layer("", 0, gathered=rows))
            found += [_Layer(_UP, one.shape[1]) for one in adapters if ".lora_B." in one.name]
        else:
            shared = None
            # lora_B's input, which is kept for backward, comes after the sum
            ends = name in last_rows and not adapters
            found.append(_Layer(kind, rows, True, ends, columns if kind == ROW_SPLIT else 0))
            found += [_Layer(_DOWN, one.shape[0]) for one in adapters if ".lora_A." in one.name]
    return found


def _special(
    name: str,
    style: str,
    shapes: Mapping[str, TensorShape],
    order: Mapping[str, int],
    first_trained: int,
    ends_block: bool,
) -> _Layer | None:
    """The collectives of experts, and of the projection before a latent attention's column
    layers."""
    kind, number = kind_of(style), parse_style(style).number
    if kind == EXPERTS:
        weights = [one for parameter, one in shapes.items() if parameter.startswith(f"{name}.")]
        if not weights:
            return None
        # [experts, outputs, inputs] of the last one: what comes out of the experts is as wide as
        # what goes in.
        width = min(_widths(weights))
        return _Layer(EXPERTS, width, first_trained < order[weights[0].name], ends_block, number)
    if kind == LATENT:
        weight = shapes.get(f"{name}.weight") or shapes.get(f"{name}.base_layer.weight")
        return None if weight is None else _Layer(LATENT, number)
    return None


def _widths(weights: list[TensorShape]) -> set[int]:
    """Sizes that all weights of experts have in common: that of the activations between layers."""
    common = set(weights[0].shape[1:])
    for one in weights:
        if len(one.shape) == 3:
            common &= set(one.shape[1:])
    return common or {weights[0].shape[-1]}


def _shared_bytes(stage: ModelShape, size: int) -> int:
    """Gradients of weights that several ranks hold, each with a place in one all-reduce; computed
    once per shape."""
    key = ("shared bytes", size)
    if key in stage.memo:
        return int(stage.memo[key])
    total = 0
    for one in stage.trained:
        dim, held = held_ranges(one.name, one.shape, stage.tensor_plan, size)
        for part in held:
            if part.copies > 1:
                total += one.numel // one.shape[dim] * part.length * (size // part.copies) * 4
    stage.memo[key] = total
    return total


def _adapters(shape: ModelShape) -> dict[str, list[TensorShape]]:
    """Module → LoRA's matrices beside it."""
    found: dict[str, list[TensorShape]] = {}
    for one in shape.parameters:
        for kind in (_UP, _DOWN):
            module, marker, _ = one.name.partition(f".{kind}.")
            if marker:
                found.setdefault(module, []).append(one)
    return found


def _last_rows(shape: ModelShape) -> set[str]:
    """The last row layer of each block."""
    last: dict[str, str] = {}
    blocks = set(shape.blocks)
    for name, style in shape.tensor_plan.items():
        block = next((one for one in (*modules_around(name), name) if one in blocks), None)
        of_experts = kind_of(shape.tensor_plan.get(name.rpartition(".")[0], COLUMN)) == EXPERTS
        if block is not None and kind_of(style) in (ROW, ROW_SPLIT, EXPERTS) and not of_experts:
            last[block] = name
    return set(last.values())


def _partial(stage: ModelShape, cut: ModelShape, sequence: bool) -> list[TensorShape]:
    """Trained parameters of which each tensor-parallel rank computes a part of the gradient;
    computed once per shape."""
    key = ("partial", sequence)
    if key not in cut.memo:
        dims, blocks = {one.name: len(one.shape) for one in stage.parameters}, set(stage.blocks)
        cut.memo[key] = [
            one
            for one in cut.trained
            if _is_partial(one.name, dims[one.name], stage.tensor_plan, blocks, sequence)
        ]
    return cut.memo[key]  # type: ignore[no-any-return]


def _is_partial(
    name: str, dims: int, plan: Mapping[str, str], blocks: Container[str], sequence: bool
) -> bool:
    if is_summed(name, plan):
        return True
    around = modules_around(name)
    if not sequence or not any(one in blocks for one in around):
        return False
    bias_of_row = name.endswith(".bias") and any(
        kind_of(plan[one]) == ROW for one in around if one in plan
    )
    return cut_dim(name, dims, plan) is None and not bias_of_row

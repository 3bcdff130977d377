"""What each rank of a pipeline holds and sends, from the model's shape alone. No torch here."""

from dataclasses import dataclass

from paceline.models.shape.record import ModelShape, modules_around
from paceline.models.tensor_plan.style import COLUMN, kind_of
from paceline.parallel.cost import Workload
from paceline.parallel.pipeline.stages import StagePlan, divide, num_chunks, rank_of_stage


@dataclass(frozen=True)
class PipelineCost:
    """One entry for each rank of the pipeline.

    Args:
        division: the stages.
        parameters: names of what the rank holds, tied weights under their first name.
        buffers: likewise.
        send_bytes: that the rank sends in a step: hidden states forward, their gradients back,
            gradients of tied weights.
        in_flight: micro-batches whose activations the rank keeps at once (of each of its stages).
        activation_bytes: of the micro-batches in flight; 0 where not known.
    """

    division: StagePlan
    parameters: tuple[tuple[str, ...], ...]
    buffers: tuple[tuple[str, ...], ...]
    send_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    activation_bytes: tuple[int, ...]


def pipeline_cost(
    shape: ModelShape,
    num_ranks: int,
    chunks: int,
    schedule: str,
    work: Workload,
    tensor_ranks: int = 1,
) -> PipelineCost:
    """The pipeline's share of a strategy's cost.

    Each boundary between stages passes tokens × hidden elements forward and as many back, each
    micro-batch (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters",
    2021, section 3.2). Micro-batches in flight: all under GPipe (Huang et al., 2019), at most ranks
    - r on rank r under 1F1B (Narayanan et al., section 2.2.1).

    Args:
        num_ranks: of the pipeline.
        chunks: ``parallel.stages_per_rank``; means something to the schedules of several stages a
            rank alone.
        tensor_ranks: that each layer of the tensor plan is cut over. Between a column layer and its
            row layer a rank has, and hands on, its part of the features alone.

    Raises:
        ConfigError: fewer layers than stages.
    """
    num_stages = num_ranks * num_chunks(schedule, chunks)
    division, parameters, buffers = _holdings(shape, num_ranks, num_stages)
    within_pair = _within_pair(shape) if tensor_ranks > 1 else set()
    element_bytes = shape.parameters[0].element_bytes if shape.parameters else 4
    send = [0] * num_ranks
    # forward to the next stage, and the gradient back
    for stage, (_, beyond) in enumerate(division.blocks[:-1]):
        elements = shape.block_output_elements[beyond - 1] if shape.block_output_elements else 0.0
        parts = tensor_ranks if beyond in within_pair else 1
        boundary = round(work.micro_batches * work.positions * elements * element_bytes / parts)
        send[rank_of_stage(stage, num_ranks)] += boundary
        send[rank_of_stage(stage + 1, num_ranks)] += boundary
    for parameter in shape.trained:
        ranks = division.ranks_of(parameter.name, num_ranks)
        for rank in ranks if len(ranks) > 1 else []:
            send[rank] += parameter.size_bytes * (len(ranks) - 1)
    in_flight = tuple(
        _in_flight(schedule, rank, num_ranks, num_stages, work.micro_batches)
        for rank in range(num_ranks)
    )
    per_block = work.block_activation_bytes or (0,) * len(shape.blocks)
    activations = [0] * num_ranks
    for stage, (first, beyond) in enumerate(division.blocks):
        rank = rank_of_stage(stage, num_ranks)
        activations[rank] += in_flight[rank] * sum(per_block[first:beyond])
    return PipelineCost(
        division=division,
        parameters=parameters,
        buffers=buffers,
        send_bytes=tuple(send),
        in_flight=in_flight,
        activation_bytes=tuple(activations),
    )


Names = tuple[tuple[str, ...], ...]


def _holdings(shape: ModelShape, num_ranks: int, num_stages: int) -> tuple[StagePlan, Names, Names]:
    """The stages, and for each rank the names of its parameters and of its buffers; computed once
    per shape."""
    key = ("pipeline holdings", num_ranks, num_stages)
    if key not in shape.memo:
        sizes = {parameter.name: parameter.numel for parameter in shape.parameters}
        division = divide(
            sizes,
            shape.blocks,
            num_stages,
            shape.aliases,
            [buffer.name for buffer in shape.buffers],
            shape.phases,
        )

        def held(names: list[str]) -> Names:
            by_rank: list[list[str]] = [[] for _ in range(num_ranks)]
            for name in names:
                for rank in division.ranks_of(name, num_ranks):
                    by_rank[rank].append(name)
            return tuple(tuple(names) for names in by_rank)

        parameters = held([parameter.name for parameter in shape.parameters])
        shape.memo[key] = (division, parameters, held([buffer.name for buffer in shape.buffers]))
    return shape.memo[key]  # type: ignore[no-any-return]


def _within_pair(shape: ModelShape) -> set[int]:
    """Each number of leading blocks whose last cut layer is a column layer, so that its row layer
    is in a later block."""
    block_index = {name: index for index, name in enumerate(shape.blocks)}
    # block → (place in the plan, style) of its last cut layer
    last_style: dict[int, tuple[int, str]] = {}
    for place, (name, style) in enumerate(shape.tensor_plan.items()):
        for module in (*modules_around(name), name):
            if module in block_index:
                last_style[block_index[module]] = (place, style)
    latest = (-1, "")
    result = set()
    for block in range(len(shape.blocks)):
        latest = max(latest, last_style.get(block, latest))
        if latest[1] and kind_of(latest[1]) == COLUMN:
            result.add(block + 1)
    return result


def _in_flight(
    schedule: str, rank: int, num_ranks: int, num_stages: int, micro_batches: int
) -> int:
    if schedule == "1f1b" and micro_batches >= num_ranks:
        return min(micro_batches, num_ranks - rank)
    if schedule == "zero_bubble":
        return micro_batches  # inputs of the weights' backward are kept until it is their turn
    if schedule == "interleaved_1f1b":
        return min(micro_batches, 2 * num_ranks - rank)
    return micro_batches

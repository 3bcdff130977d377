"""Memory and traffic of each rank of a pipeline, from the model's shape alone. Imports no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.models.shape.activations import Activations
from paceline.models.shape.record import ModelShape, modules_around
from paceline.models.tensor_plan.style import COLUMN, kind_of
from paceline.parallel.cost import Workload
from paceline.strategies.pipeline.stages import StagePlan, divide, num_chunks, rank_of_stage


@dataclass(frozen=True)
class PipelineCost:
    """The cost of a pipeline, one entry per rank.

    Args:
        parameters: names of the parameters that the rank holds, tied weights under their first
            name.
        buffers: names of the buffers that the rank holds.
        send_bytes: bytes that the rank sends per step: hidden states, their gradients, and
            gradients of tied weights.
        activations: activations of all micro-batches that the rank has started and not finished.
    """

    parameters: tuple[tuple[str, ...], ...]
    buffers: tuple[tuple[str, ...], ...]
    send_bytes: tuple[int, ...]
    activations: tuple[Activations, ...]


def pipeline_cost(
    shape: ModelShape,
    num_ranks: int,
    chunks: int,
    schedule: str,
    work: Workload,
    tensor_ranks: int = 1,
) -> PipelineCost:
    """Estimate the pipeline's part of a strategy's cost.

    Each boundary between stages passes tokens × hidden elements forward and as many back per
    micro-batch (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters",
    2021, section 3.2).

    Args:
        num_ranks: ranks of the pipeline.
        chunks: ``parallel.stages_per_rank``, used by the schedules with several stages per rank.
        tensor_ranks: ranks over which each layer of the tensor plan is split. Between a column
            layer and its row layer a rank computes, and sends, only its part of the features.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    num_stages = num_ranks * num_chunks(schedule, chunks)
    division, parameters, buffers = shape.memoize(
        ("pipeline tensors", num_ranks, num_stages),
        lambda: _tensors_by_rank(shape, num_ranks, num_stages),
    )
    within_pair: set[int] = set()
    if tensor_ranks > 1:
        within_pair = shape.memoize("within pair", lambda: _within_pair(shape))
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
        for rank in ranks if len(ranks) > 1 else ():
            send[rank] += parameter.size_bytes * (len(ranks) - 1)
    activations = tuple(
        _activations(work, division.blocks, rank, num_ranks, schedule) for rank in range(num_ranks)
    )
    return PipelineCost(parameters, buffers, tuple(send), activations)


def _activations(
    work: Workload, stages: Sequence[tuple[int, int]], rank: int, num_ranks: int, schedule: str
) -> Activations:
    """Return the activations of one rank. The last stage has the head and its logits, of one
    micro-batch at a time.

    Args:
        stages: the first block of each stage, and the block after its last.
    """
    local = [stage for stage in range(len(stages)) if rank_of_stage(stage, num_ranks) == rank]
    num_unfinished = _max_unfinished(schedule, rank, num_ranks, work.micro_batches)
    is_last = len(stages) - 1 in local
    # The outputs of the stages exist until their backward; the next message arrives early.
    outputs = num_unfinished * (len(local) - is_last)
    return work.activations.of_stages(
        [number for stage in local for number in range(*stages[stage])],
        has_embedding=0 in local,
        has_head=is_last,
        num_unfinished=num_unfinished,
        messages=outputs + (0 not in local),
    )


Names = tuple[tuple[str, ...], ...]


def _tensors_by_rank(
    shape: ModelShape, num_ranks: int, num_stages: int
) -> tuple[StagePlan, Names, Names]:
    """Return the stages, and the names of each rank's parameters and of its buffers."""
    parameters = {parameter.name: parameter.numel for parameter in shape.parameters}
    buffers = [buffer.name for buffer in shape.buffers]
    division = divide(parameters, shape.blocks, num_stages, shape.aliases, buffers, shape.phases)

    def by_rank(names: Iterable[str]) -> Names:
        names_of: list[list[str]] = [[] for _ in range(num_ranks)]
        for name in names:
            for rank in division.ranks_of(name, num_ranks):
                names_of[rank].append(name)
        return tuple(tuple(names) for names in names_of)

    return division, by_rank(parameters), by_rank(buffers)


def _within_pair(shape: ModelShape) -> set[int]:
    """Return each number of leading blocks whose last tensor-parallel layer is a column layer, so
    that its row layer is in a later block."""
    block_index = {name: index for index, name in enumerate(shape.blocks)}
    # block → (position in the plan, style) of its last tensor-parallel layer
    last_style: dict[int, tuple[int, str]] = {}
    for position, (name, style) in enumerate(shape.tensor_plan.items()):
        for module in (*modules_around(name), name):
            if module in block_index:
                last_style[block_index[module]] = (position, style)
    latest = (-1, "")
    result = set()
    for block in range(len(shape.blocks)):
        latest = max(latest, last_style.get(block, latest))
        if latest[1] and kind_of(latest[1]) == COLUMN:
            result.add(block + 1)
    return result


def _max_unfinished(schedule: str, rank: int, num_ranks: int, micro_batches: int) -> int:
    """Return how many micro-batches' activations a rank holds at once for each of its stages.

    These are all of them under GPipe (Huang et al., 2019), and at most ranks - r on rank r under
    1F1B (Narayanan et al., section 2.2.1). Under zero bubble the inputs of the weights' backward
    are kept.
    """
    if schedule == "1f1b" and micro_batches >= num_ranks:
        return min(micro_batches, num_ranks - rank)
    if schedule == "interleaved_1f1b":
        return min(micro_batches, 2 * num_ranks - rank)
    return micro_batches

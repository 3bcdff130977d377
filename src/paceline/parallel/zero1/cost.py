"""What ZeRO stage 1 holds and sends."""

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes
from paceline.parallel.ddp.layout import lay_out
from paceline.parallel.zero1.common import (
    batch_norm_names,
    low_bytes_of,
    statistics_traffic,
    step_count_bytes,
)


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Per trained parameter, N ranks, Adam: 8 + 8/N bytes in float32 (weights and gradients 4
    each), 4 + 12/N in mixed precision (Rajbhandari et al., 2020, section 5.1, figure 1). A
    reduce-scatter of the gradients and an all-gather of the weights: 2Ψ(N-1)/N (section 7.2.1).
    Padding of the buckets is counted."""
    num_ranks = axes.data
    low_bytes = shape.low_bytes if num_ranks > 1 else 0
    normed = batch_norm_names(shape)
    element_bytes = [low_bytes_of(one, low_bytes, normed) for one in shape.trained]
    tensors = [
        (one.numel, size, size) for one, size in zip(shape.trained, element_bytes, strict=True)
    ]
    weights = masters = traffic = 0
    elements, steps = [0] * num_ranks, [0] * num_ranks
    for layout in lay_out(tensors, config.parallel.bucket_cap_mb * 2**20, num_ranks):
        each = tensors[layout.members[0]][1]
        weights += layout.size * each
        masters += layout.size // num_ranks * 4 if each == low_bytes else 0
        traffic += scatter_bytes(layout.size * each, num_ranks)
        size = layout.size // num_ranks
        for member, offset in zip(layout.members, layout.offsets, strict=True):
            end = offset + tensors[member][0]
            for rank in range(offset // size, (max(offset, end - 1)) // size + 1):
                elements[rank] += max(0, min(end, (rank + 1) * size) - max(offset, rank * size))
                steps[rank] += 1
    counted = step_count_bytes(config)
    state = max(
        one * shape.optimizer_bytes_per_element + counted * step
        for one, step in zip(elements, steps, strict=True)
    )
    frozen = shape.parameter_bytes - total_bytes(shape.trained)
    return Cost(
        parameters=frozen + weights + masters + shape.buffer_bytes,
        gradients=weights,
        optimizer=state,
        activations=work.activation_bytes,
        traffic={"reduce_scatter": traffic, "all_gather": traffic}
        | statistics_traffic(shape, num_ranks),
    )

"""What a whole replica on each rank holds and sends."""

from collections.abc import Mapping

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.compression.cost import communication_cost
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Everything whole on each rank; the gradients' all-reduce: 2(N-1)/N × their bytes
    (Rajbhandari et al., "ZeRO", 2020, section 7.1: 2Ψ)."""
    gradients = total_bytes(shape.trained)
    elements = sum(one.numel for one in shape.trained)
    optimizer = elements * shape.optimizer_bytes_per_element
    traffic: Mapping[str, int] = {"all_reduce": all_reduce_bytes(gradients, axes.data)}
    other = communication_cost(shape.trained, config, axes.data)
    if other is not None:
        optimizer = other.kept + (0 if other.holds_moments else optimizer)
        traffic = other.traffic
    return Cost(
        parameters=shape.parameter_bytes + shape.buffer_bytes,
        gradients=gradients,
        optimizer=optimizer,
        activations=work.activation_bytes,
        traffic=traffic,
    )


def estimate_threaded(
    shape: ModelShape, axes: ParallelDims, work: Workload, config: Config
) -> Cost:
    """Device 0 holds what a `ddp` rank holds; the others hold no optimizer state, so the load
    is lopsided.

    Traffic is what passes between devices in a step, all of it through device 0: it sends its
    weights and buffers to N-1 devices and gets as many gradients back, 2(N-1)Ψ, where a rank of
    an all-reduce sends 2(N-1)/N Ψ (Patarasuk & Yuan, 2009, section 3). The scheme:
    torch.nn.DataParallel's documentation."""
    gradients = total_bytes(shape.trained)
    # each begins at a multiple of 64 bytes
    in_buckets = sum(-(-one.size_bytes // 64) * 64 for one in shape.trained)
    elements = sum(one.numel for one in shape.trained)
    others = axes.data - 1
    return Cost(
        parameters=shape.parameter_bytes + shape.buffer_bytes,
        gradients=in_buckets,
        optimizer=elements * shape.optimizer_bytes_per_element,
        activations=work.activation_bytes,
        traffic={"copy": others * (2 * gradients + shape.buffer_bytes)},
    )

"""Memory and traffic of data parallelism with a full replica on each rank."""

from collections.abc import Mapping

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.compression.cost import communication_cost
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Estimate the cost of a full replica on each rank.

    The all-reduce of the gradients sends 2(N-1)/N × their bytes (Rajbhandari et al., "ZeRO", 2020,
    section 7.1: 2Ψ).
    """
    gradients = total_bytes(shape.trained)
    optimizer = shape.moment_bytes
    traffic: Mapping[str, int] = {"all_reduce": all_reduce_bytes(gradients, axes.data)}
    reduction = communication_cost(shape.trained, config, axes.data)
    if reduction is not None:
        optimizer = reduction.retained_bytes + (0 if reduction.holds_moments else optimizer)
        traffic = reduction.traffic
    on_host = at_once = 0
    if config.parallel.state_offload == "optimizer":
        parts = [(tensor.name, tensor.numel) for tensor in shape.trained]
        on_host, at_once = shape.offloaded_moments(parts)
    return Cost(
        parameters=shape.parameter_bytes + shape.buffer_bytes,
        gradients=gradients,
        optimizer=optimizer - on_host,
        activations=max(work.activation_bytes(shape), at_once),
        traffic=traffic,
        host=on_host,
        host_traffic={"optimizer": 2 * on_host} if on_host else {},
    )


def estimate_threaded(
    shape: ModelShape, axes: ParallelDims, work: Workload, config: Config
) -> Cost:
    """Estimate the cost of `dp` on device 0, which holds what a `ddp` rank holds.

    The other devices hold no optimizer state. All traffic of a step passes through device 0: it
    sends its weights and buffers to N-1 devices and receives as many gradients, 2(N-1)Ψ, where a
    rank of an all-reduce sends 2(N-1)/N Ψ (Patarasuk & Yuan, 2009, section 3). The scheme is
    described in the documentation of torch.nn.DataParallel.
    """
    gradients = total_bytes(shape.trained)
    return Cost(
        parameters=shape.parameter_bytes + shape.buffer_bytes,
        # each gradient starts at a multiple of 64 bytes in its bucket
        gradients=sum(-(-tensor.size_bytes // 64) * 64 for tensor in shape.trained),
        optimizer=shape.moment_bytes,
        activations=work.activation_bytes(shape),
        traffic={"copy": (axes.data - 1) * (2 * gradients + shape.buffer_bytes)},
    )

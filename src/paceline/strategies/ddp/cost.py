"""Memory and traffic of data parallelism with a full replica on each rank."""

from collections.abc import Mapping

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes
from paceline.strategies.reducers.compression.cost import communication_cost


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Estimate the cost of a full replica on each rank.

    The all-reduce of the gradients sends 2(N-1)/N × their bytes (Rajbhandari et al., "ZeRO", 2020,
    section 7.1: 2Ψ).
    """
    gradients = total_bytes(shape.trained)
    optimizer = shape.moment_bytes
    traffic: Mapping[str, int] = {"all_reduce": all_reduce_bytes(gradients, axes.data)}
    reduction = communication_cost(shape, config, axes.data)
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
        updated=gradients,
    )

"""What local training takes: memory of the fullest rank, and the mean traffic of a step."""

from collections import Counter
from collections.abc import Sequence

from paceline.config.schema import Config
from paceline.distributed.collectives.schedules import all_reduce_bytes, scatter_bytes
from paceline.distributed.environment import RankEnv, from_environment
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes
from paceline.parallel.local_sgd.schedule import (
    SyncSchedule,
    fragment,
    mean_held,
    mean_traffic,
    num_workers,
    share,
)


def _estimate(
    name: str, shape: ModelShape, axes: ParallelDims, work: Workload, config: Config
) -> Cost:
    """All of `ddp`; for `diloco` the outer parameters and their momentum in float32, a share a rank
    of a worker; and what overlapped synchronisations keep while they are under way.

    Sent, as a mean over a period of H steps after the warm-up: within a worker of g ranks the
    gradients' all-reduce at each step; between workers, once a period, an all-reduce of 1/g of the
    parameters, and within a worker its all-gather (Douillard et al., "DiLoCo", 2023, section 2: 1/H
    of the communication).
    """
    settings, rhythm = config.local_sgd, SyncSchedule.of(config.local_sgd)
    workers = num_workers(settings, _env(axes.data))
    ranks = axes.data // workers
    dtype = settings.outer_dtype if name == "diloco" else "float32"
    elements = sum(one.numel for one in shape.trained)
    gradients = total_bytes(shape.trained)
    ranges = [fragment(elements, rhythm.fragments, one) for one in range(rhythm.fragments)]
    shares = [share(*one, ranks, 0)[1] - one[0] for one in ranges]
    moments = (shape.optimizer_bytes_per_element // 4) if settings.average_optimizer_state else 0
    traffic = Counter({"all_reduce": all_reduce_bytes(gradients, ranks) * rhythm.period})
    for size in shares:
        for _ in range(1 + moments):
            traffic.update(mean_traffic(size, workers, dtype))
            traffic["all_gather"] += scatter_bytes(4 * size * ranks, ranks)
    outer = 8 * sum(shares) if name == "diloco" else 0
    return Cost(
        parameters=shape.parameter_bytes + shape.buffer_bytes,
        gradients=gradients,
        optimizer=elements * shape.optimizer_bytes_per_element
        + outer
        + _in_flight(name, rhythm, shares, workers, dtype),
        activations=work.activation_bytes,
        traffic={key: round(size / rhythm.period) for key, size in traffic.items() if size},
    )


def mean_bytes(shares: Sequence[int], workers: int, dtype: str) -> int:
    """Bytes that a rank sends to the other workers for one synchronization of fragments of which it
    has ``shares`` elements."""
    return sum(sum(mean_traffic(size, workers, dtype).values()) for size in shares)


def _in_flight(name: str, rhythm: SyncSchedule, shares: list[int], workers: int, dtype: str) -> int:
    """Bytes of the synchronisations under way, where most are. `local_sgd` keeps what a rank sent
    beside the message."""
    own = 4 if name == "local_sgd" else 0
    most = 0
    for step in range(rhythm.warmup + rhythm.period, rhythm.warmup + 2 * rhythm.period):
        held = 0
        for number, age in rhythm.in_flight(step):
            held += (
                mean_held(shares[number], workers, dtype, second=age >= rhythm.half)
                + own * shares[number]
            )
        most = max(most, held)
    return most


def _env(ranks: int) -> RankEnv:
    """The ranks as their launcher has spread them over machines; all on one where no launcher
    says."""
    env = from_environment()
    return env if env.world_size == ranks else RankEnv(world_size=ranks, local_world_size=ranks)


def estimate_local_sgd(
    shape: ModelShape, axes: ParallelDims, work: Workload, config: Config
) -> Cost:
    """See :func:`_estimate`."""
    return _estimate("local_sgd", shape, axes, work, config)


def estimate_diloco(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """See :func:`_estimate`."""
    return _estimate("diloco", shape, axes, work, config)

"""What local training costs: memory of the rank with the most, and the mean traffic per step.
Imports no torch."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import all_reduce_bytes, scatter_bytes
from paceline.distributed.environment import RankEnv, from_environment
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes
from paceline.strategies.local_sgd.schedule import (
    SyncSchedule,
    fragment_range,
    mean_memory,
    mean_traffic,
    num_workers,
    share,
)


def estimate(
    name: str, shape: ModelShape, axes: ParallelDims, work: Workload, config: Config
) -> Cost:
    """Return the cost of the strategy ``name``: the cost of `ddp`; for `diloco` also the
    outer parameters and their momentum in float32, divided over the ranks of a worker; and the
    buffers of pending synchronizations.

    Traffic is the mean over a period of H steps after the warm-up: within a worker of g ranks the
    gradients' all-reduce at each step; between workers, once per period, an all-reduce of 1/g of
    the parameters, and within a worker its all-gather (Douillard et al., "DiLoCo", 2023, section 2:
    1/H of the communication).
    """
    settings, schedule = config.local_sgd, SyncSchedule.of(config.local_sgd)
    # The ranks as the launcher has divided them over machines; without one, all on one machine.
    env = from_environment()
    if env.world_size != axes.data:
        env = RankEnv(world_size=axes.data, local_world_size=axes.data)
    workers = num_workers(settings, env)
    ranks = axes.data // workers
    dtype = settings.outer_dtype if name == "diloco" else "float32"
    elements = sum(tensor.numel for tensor in shape.trained)
    gradients = total_bytes(shape.trained)
    shares = []
    for number in range(schedule.fragments):
        start, stop = fragment_range(elements, schedule.fragments, number)
        shares.append(share(start, stop, ranks, 0)[1] - start)
    averages_optimizer = settings.average_optimizer_state
    moments = shape.optimizer.element_bytes // 4 if averages_optimizer else 0
    traffic = Counter({"all_reduce": all_reduce_bytes(gradients, ranks) * schedule.period})
    for size in shares:
        for _ in range(1 + moments):
            traffic.update(mean_traffic(size, workers, dtype))
            traffic["all_gather"] += scatter_bytes(4 * size * ranks, ranks)
    outer = 8 * sum(shares) if name == "diloco" else 0
    # The activations are freed before the workers are synchronized.
    synchronizing = _sync_bytes(name, max(shares), ranks, workers, config)
    return Cost(
        parameters=shape.parameter_bytes + shape.buffer_bytes,
        gradients=gradients,
        optimizer=shape.moment_bytes
        + outer
        + _pending_bytes(name, schedule, shares, workers, dtype),
        activations=max(work.activation_bytes(shape), synchronizing),
        traffic={key: round(size / schedule.period) for key, size in traffic.items() if size},
    )


estimate_local_sgd = partial(estimate, "local_sgd")
estimate_diloco = partial(estimate, "diloco")


def mean_bytes(shares: Sequence[int], workers: int, dtype: str) -> int:
    """Return the bytes that a rank sends to the other workers for one synchronization of fragments.

    Args:
        shares: number of elements that the rank has of each fragment.
    """
    return sum(sum(mean_traffic(size, workers, dtype).values()) for size in shares)


def _sync_bytes(name: str, size: int, ranks: int, workers: int, config: Config) -> int:
    """Return the bytes that exist only while a fragment is synchronized, after the update of the
    weights: the message, the result that the ranks of a worker gather, and a copy of the local
    parameters with which a late result is combined. `diloco` computes the message and the update
    of the outer parameters from one more vector.

    Args:
        size: number of elements of the fragment that the rank exchanges.
        ranks: number of ranks of a worker.
    """
    settings, is_diloco = config.local_sgd, name == "diloco"
    dtype = settings.outer_dtype if is_diloco else "float32"
    message = max(mean_memory(size, workers, dtype, second=second) for second in (False, True))
    gathered = 4 * size * (1 + ranks) if ranks > 1 else 0
    local = 4 * size * ranks if settings.fragment_sync_delay else 0
    if settings.fragment_sync_delay:  # it is among the pending ones
        message = 0
    if is_diloco:
        return message + max(4 * size, gathered + 2 * local)
    moments = 4 * size if settings.average_optimizer_state else 0
    return message + gathered + local + moments


def _pending_bytes(
    name: str, schedule: SyncSchedule, shares: list[int], workers: int, dtype: str
) -> int:
    """Return the maximum over the steps of the bytes of pending synchronizations. `local_sgd` also
    keeps a copy of what a rank sent."""
    copy_bytes = 4 if name == "local_sgd" else 0
    start = schedule.warmup + schedule.period
    return max(
        sum(
            mean_memory(shares[number], workers, dtype, second=age >= schedule.half_delay)
            + copy_bytes * shares[number]
            for number, age in schedule.pending_at(step)
        )
        for step in range(start, start + schedule.period)
    )

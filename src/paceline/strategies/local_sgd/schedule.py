"""When each fragment of the parameters is synchronized: a function of the step, the same on every
rank. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.config.schema.parallel import LocalSgd
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.distributed.collective_bytes import all_reduce_bytes, scatter_bytes
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims

#: Number of elements that share a scale in int8.
BLOCK = 256


@dataclass(frozen=True)
class SyncSchedule:
    """Steps are counted from 1. Synchronizations start and complete after the update of a step.

    Args:
        period: H, the number of steps between two synchronizations of a fragment.
        fragments: number of fragments. The synchronizations of a period are spread evenly over it;
            the last fragment's is at its end.
        delay: number of steps from the start of a synchronization to its completion; 0: it
            completes in the step in which it started.
        warmup: number of steps of plain data parallelism at the start.
    """

    period: int
    fragments: int = 1
    delay: int = 0
    warmup: int = 0

    @classmethod
    def of(cls, settings: LocalSgd) -> SyncSchedule:
        return cls(
            settings.sync_every,
            settings.num_fragments,
            settings.fragment_sync_delay,
            settings.warmup_steps,
        )

    def starting_at(self, step: int) -> list[int]:
        """Return the fragments whose synchronization starts after ``step``."""
        local_step = step - self.warmup
        if local_step < 1:
            return []
        return [
            number
            for number in range(self.fragments)
            if (local_step - self.period * (number + 1) // self.fragments) % self.period == 0
        ]

    def completing_at(self, step: int) -> list[int]:
        """Return the fragments whose synchronization completes after ``step``."""
        return self.starting_at(step - self.delay)

    def halfway_at(self, step: int) -> list[int]:
        """Return the fragments whose second message, if they need two, is sent after ``step``."""
        half = self.half_delay
        return self.starting_at(step - half) if half < self.delay else []

    @property
    def half_delay(self) -> int:
        """Number of steps from the first message to the second."""
        return (self.delay + 1) // 2

    def pending_at(self, step: int) -> list[tuple[int, int]]:
        """Return (fragment, steps since its start) of the synchronizations that are started but not
        completed after ``step``, oldest first."""
        ages = range(self.delay - 1, -1, -1)
        return [(number, age) for age in ages for number in self.starting_at(step - age)]

    def is_synchronized(self, step: int) -> bool:
        """Return whether all workers have the same parameters after ``step``."""
        local_step = step - self.warmup
        return local_step <= 0 or (
            self.fragments == 1 and self.delay == 0 and local_step % self.period == 0
        )


def num_workers(settings: LocalSgd, env: RankEnv) -> int:
    """Return the number of workers, the groups of ranks that train independently:
    ``local_sgd.workers``, else one per machine, or one per rank on a single machine.

    Raises:
        ConfigError: the number does not divide the number of ranks.
    """
    if settings.workers is None:
        machines, rest = divmod(env.world_size, env.local_world_size)
        return machines if machines > 1 and not rest else env.world_size
    if env.world_size % settings.workers:
        divisors = [size for size in range(1, env.world_size + 1) if env.world_size % size == 0]
        raise ConfigError(
            "`local_sgd.workers: {workers}` does not divide {world_size:rank}",
            code="workers-do-not-divide-ranks",
            allowed=", ".join(map(str, divisors)),
            fix="leave `local_sgd.workers` out: one worker per machine, or one per rank on a"
            " single machine",
            workers=settings.workers,
            world_size=env.world_size,
        )
    return settings.workers


def check_steps(config: Config, steps: int | None) -> None:
    """Raise ConfigError if no synchronization is possible with the section ``local_sgd``.

    Args:
        steps: number of steps of the run, if known.
    """
    settings = config.local_sgd
    period, warmup = settings.sync_every, settings.warmup_steps
    if steps is not None and warmup + period > steps:
        after = f" after {counted(warmup, 'step')} of warm-up" if warmup else ""
        raise ConfigError(
            "`local_sgd.sync_every: {period}`{after} is more than the run's {steps:step}: the"
            " workers would never be synchronized",
            code="too-few-steps",
            allowed="with this warm-up, 1 to {most}" if steps > warmup else None,
            fix="lower `local_sgd.sync_every` (and `local_sgd.warmup_steps`), or train longer",
            period=period,
            after=after,
            steps=steps,
            most=steps - warmup,
        )
    if settings.num_fragments > period:
        raise ConfigError(
            "`local_sgd.num_fragments: {num_fragments}` is more than `local_sgd.sync_every:"
            " {period}`: at most one fragment is synchronized per step",
            code="too-many-fragments",
            allowed="1 to {period}",
            fix="set `local_sgd.num_fragments: {period}`, or raise `local_sgd.sync_every`",
            num_fragments=settings.num_fragments,
            period=period,
        )
    if settings.fragment_sync_delay >= period:
        raise ConfigError(
            "`local_sgd.fragment_sync_delay: {fragment_sync_delay}`: a synchronization would not"
            " complete before the next one starts, after `local_sgd.sync_every: {period}`",
            code="sync-delay-too-long",
            allowed="0 to {last_period}",
            fragment_sync_delay=settings.fragment_sync_delay,
            period=period,
            last_period=period - 1,
        )


def check_sizes(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError for workers that do not divide the ranks, or if no synchronization is
    possible."""
    if config.local_sgd.workers is not None:
        num_workers(config.local_sgd, RankEnv(world_size=dims.data, local_world_size=dims.data))
    check_steps(config, config.train_args.max_steps)


def fragment_range(size: int, fragments: int, number: int) -> tuple[int, int]:
    """Return the range of a fragment in a vector of ``size`` elements."""
    return size * number // fragments, size * (number + 1) // fragments


def share(start: int, stop: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return a rank's share of a range. The shares are equal, except for the last ones."""
    elements = math.ceil((stop - start) / num_ranks)
    return min(stop, start + elements * rank), min(stop, start + elements * (rank + 1))


def row_elements(size: int, num_rows: int) -> int:
    """Return the number of elements per row, a multiple of :data:`BLOCK`, if ``size`` elements are
    divided into ``num_rows`` rows."""
    return math.ceil(math.ceil(size / num_rows) / BLOCK) * BLOCK


def row_bytes(elements: int, dtype: str) -> int:
    """Return the bytes of a row; in int8 with its scales."""
    return elements + 4 * elements // BLOCK if dtype == "int8" else 2 * elements


def mean_traffic(size: int, workers: int, dtype: str) -> dict[str, int]:
    """Return the bytes that one rank sends for a mean of ``size`` float32 elements over the
    workers, by collective."""
    if dtype == "float32" or workers == 1:
        return {"all_reduce": all_reduce_bytes(4 * size, workers)}
    sent = scatter_bytes(workers * row_bytes(row_elements(size, workers), dtype), workers)
    return {"all_to_all": sent, "all_gather": sent}


def mean_memory(size: int, workers: int, dtype: str, second: bool) -> int:
    """Return the bytes of the buffers of a pending mean over the workers.

    Args:
        second: the second message is sent.
    """
    if dtype == "float32" or workers == 1:
        return 4 * size
    row = row_bytes(row_elements(size, workers), dtype)
    return (workers + 1) * row if second else 2 * workers * row

"""When which part of the parameters is synchronised: a function of the step alone, the same on
every rank. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.config.schema.parallel import LocalSgd
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.distributed.collectives.schedules import all_reduce_bytes, scatter_bytes
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims

#: Elements that share a scale in int8.
BLOCK = 256


@dataclass(frozen=True)
class SyncSchedule:
    """Steps are counted from 1; what is said of a step holds after its update.

    Args:
        period: H, the steps between two synchronisations of a fragment.
        fragments: how many; the synchronisations of a period are spread evenly over it, the last
            fragment's at its end.
        overlap: steps from the begin of a synchronisation to its end; 0: it ends in the step in
            which it began.
        warmup: steps of plain data parallelism before.
    """

    period: int
    fragments: int = 1
    overlap: int = 0
    warmup: int = 0

    @classmethod
    def of(cls, settings: LocalSgd) -> SyncSchedule:
        return cls(
            settings.sync_every,
            settings.num_fragments,
            settings.fragment_sync_delay,
            settings.warmup_steps,
        )

    def begins(self, step: int) -> list[int]:
        """Fragments whose synchronisation begins after ``step``."""
        local = step - self.warmup
        if local < 1:
            return []
        return [
            one
            for one in range(self.fragments)
            if (local - self.period * (one + 1) // self.fragments) % self.period == 0
        ]

    def ends(self, step: int) -> list[int]:
        """Fragments whose synchronisation ends after ``step``."""
        return self.begins(step - self.overlap)

    def halfway(self, step: int) -> list[int]:
        """Fragments of whose synchronisation the second of two messages, where there are two,
        leaves after ``step``."""
        half = self.half
        return self.begins(step - half) if half < self.overlap else []

    @property
    def half(self) -> int:
        return (self.overlap + 1) // 2

    def in_flight(self, step: int) -> list[tuple[int, int]]:
        """(fragment, steps since it began) of the synchronisations that have begun by ``step`` and
        not ended, oldest first."""
        ages = range(self.overlap - 1, -1, -1)
        return [(one, age) for age in ages for one in self.begins(step - age)]

    def together(self, step: int) -> bool:
        """True where all workers hold the same parameters after ``step``."""
        local = step - self.warmup
        return local <= 0 or (
            self.fragments == 1 and self.overlap == 0 and local % self.period == 0
        )


def num_workers(settings: LocalSgd, env: RankEnv) -> int:
    """Groups of ranks that train on their own: as the config says, else one a machine, or one a
    rank where there is one machine.

    Raises:
        ConfigError: they do not divide the ranks.
    """
    if settings.workers is None:
        machines, rest = divmod(env.world_size, env.local_world_size)
        return machines if machines > 1 and not rest else env.world_size
    if env.world_size % settings.workers:
        divisors = [one for one in range(1, env.world_size + 1) if env.world_size % one == 0]
        raise ConfigError(
            f"`local_sgd.workers: {settings.workers}` does not divide"
            f" {counted(env.world_size, 'rank')}",
            allowed=", ".join(map(str, divisors)),
            fix="leave it out: one worker for each machine, or for each rank of one machine",
        )
    return settings.workers


def check_rhythm(settings: LocalSgd, steps: int | None) -> None:
    """Raise ConfigError where no synchronisation could be made as the section says. ``steps``: of
    the run, where known."""
    period = settings.sync_every
    if steps is not None and settings.warmup_steps + period > steps:
        warmup = (
            f" after {counted(settings.warmup_steps, 'step')} of warm-up"
            if settings.warmup_steps
            else ""
        )
        raise ConfigError(
            f"`local_sgd.sync_every: {period}`{warmup} is more than the run's"
            f" {counted(steps, 'step')}:"
            " the workers would never be brought together",
            allowed=(
                f"with this warm-up, 1 to {steps - settings.warmup_steps}"
                if steps > settings.warmup_steps
                else None
            ),
            fix="lower `local_sgd.sync_every` (and `local_sgd.warmup_steps`), or train longer",
        )
    if settings.num_fragments > period:
        raise ConfigError(
            f"`local_sgd.num_fragments: {settings.num_fragments}` do not go one at a time into"
            f" `local_sgd.sync_every: {period}`",
            allowed=f"1 to {period}",
            fix=f"set `local_sgd.num_fragments: {period}`, or more steps",
        )
    if settings.fragment_sync_delay >= period:
        raise ConfigError(
            f"`local_sgd.fragment_sync_delay: {settings.fragment_sync_delay}`: a"
            " synchronisation would not end"
            f" before the next begins, after `local_sgd.sync_every: {period}`",
            allowed=f"0 to {period - 1}",
        )


def fragment(size: int, fragments: int, number: int) -> tuple[int, int]:
    """Range of a fragment of a vector of ``size`` elements."""
    return size * number // fragments, size * (number + 1) // fragments


def share(start: int, stop: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """A rank's share of a range: equal, but for the last ones."""
    each = math.ceil((stop - start) / num_ranks)
    return min(stop, start + each * rank), min(stop, start + each * (rank + 1))


def row_elements(size: int, num_rows: int) -> int:
    """Elements of each of ``num_rows`` rows that hold ``size``: whole blocks."""
    return math.ceil(math.ceil(size / num_rows) / BLOCK) * BLOCK


def row_bytes(elements: int, dtype: str) -> int:
    """Bytes of a row of whole blocks, with their scales in int8."""
    return elements + 4 * elements // BLOCK if dtype == "int8" else 2 * elements


def mean_traffic(size: int, workers: int, dtype: str) -> dict[str, int]:
    """Bytes that one rank sends for a mean of ``size`` float32 elements over the workers, by
    collective."""
    if dtype == "float32" or workers == 1:
        return {"all_reduce": all_reduce_bytes(4 * size, workers)}
    each = scatter_bytes(workers * row_bytes(row_elements(size, workers), dtype), workers)
    return {"all_to_all": each, "all_gather": each}


def mean_held(size: int, workers: int, dtype: str, second: bool) -> int:
    """Bytes of a mean over the workers that is under way: in its first message, or its second."""
    if dtype == "float32" or workers == 1:
        return 4 * size
    row = row_bytes(row_elements(size, workers), dtype)
    return (workers + 1) * row if second else 2 * workers * row


def check_sizes(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError for workers that do not divide the ranks, or a synchronization that would
    not be made."""
    settings = config.local_sgd
    if settings.workers is not None:
        num_workers(settings, RankEnv(world_size=dims.data, local_world_size=dims.data))
    check_rhythm(settings, config.train_args.max_steps)


def check_steps(config: Config, steps: int) -> None:
    """Raise ConfigError where the workers would not be brought together within ``steps``."""
    check_rhythm(config.local_sgd, steps)

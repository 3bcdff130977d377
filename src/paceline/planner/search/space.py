"""What a search may change: the settings that the config leaves open and that do not change the
result. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.chosen import (
    ACCUMULATION,
    OFFLOAD,
    RECOMPUTATION,
    SIZE,
    open_settings,
)
from paceline.config.derive import accumulation_of
from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.planner.search.trials import Settings, Trials

_RECOMPUTATIONS = ("none", "selective", "full")
_OFFLOADS = ("none", "activations", "optimizer")


@dataclass(frozen=True)
class Saving:
    """Settings that save memory and cost time: a recomputation and an offload."""

    recomputation: int
    offload: int
    settings: Settings

    def includes(self, other: "Saving") -> bool:
        """Return whether all that ``other`` saves, this saves too."""
        offloads = (0, self.offload, 2 if self.offload == 3 else self.offload)
        return self.recomputation >= other.recomputation and other.offload in offloads


@dataclass(frozen=True)
class SettingSpace:
    """The open settings of a config.

    Args:
        recomputations, offloads: values to try; empty if the config sets one.
        has_open_sizes: whether the micro-batch and the accumulation may be changed.
    """

    config: Config
    recomputations: tuple[str, ...]
    offloads: tuple[str, ...]
    has_open_sizes: bool = True

    def savings(self) -> list[Saving]:
        """Return what saves memory, in an order in which each comes after all that it includes."""
        result = []
        for first, recomputation in enumerate(self.recomputations or ("",)):
            for second, offload in enumerate(self.offloads or ("",)):
                settings = {RECOMPUTATION: recomputation} if first else {}
                settings |= {OFFLOAD: offload} if second else {}
                result.append(Saving(first, second, settings))
        return sorted(result, key=lambda each: each.recomputation + each.offload)

    def batches(self, replicas: int) -> list[Settings]:
        """Return the settings of the possible micro-batches, the largest first. The global batch is
        the same with all of them."""
        args = self.config.train_args
        default = args.per_device_train_batch_size, args.gradient_accumulation_steps
        result: list[Settings] = []
        for size, count in self._sizes(replicas):
            changed: dict[str, int] = {}
            if size != default[0]:
                changed[SIZE] = size
            if count != default[1]:
                changed[ACCUMULATION] = count
            result.append(changed)
        return result

    def _sizes(self, replicas: int) -> Iterator[tuple[int, int]]:
        args, batch = self.config.train_args, self.config.train_args.global_batch_size
        is_set = args.model_fields_set
        size, count = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if batch is None:
            if self.has_open_sizes:
                yield from ((each, size * count // each) for each in _divisors(size * count))
            else:
                yield size, count
            return
        share = math.ceil(batch / replicas)
        has_size = "per_device_train_batch_size" in is_set and not args.auto_find_batch_size
        has_count = "gradient_accumulation_steps" in is_set and not args.auto_find_batch_size
        if has_size or not (has_count or self.has_open_sizes):
            yield size, accumulation_of(batch, size, replicas)
        elif has_count:
            size = math.ceil(share / count)
            yield size, accumulation_of(batch, size, replicas)
        else:
            sizes = _divisors(share) if batch % replicas == 0 else _halves(share)
            yield from ((each, accumulation_of(batch, each, replicas)) for each in sizes)


def open_space(trials: Trials, *, offloads_all: bool = False) -> SettingSpace:
    """Return what a search may change.

    Args:
        offloads_all: whether the weights may be in host memory. Their update then runs on the CPU,
            and its time is not estimated, so this is for runs that do not fit otherwise.
    """
    config = trials.config
    has_blocks = config.task in CAUSAL_TASKS
    open_keys = open_settings(config, is_cpu=trials.machine.is_cpu)
    recomputations: tuple[str, ...] = _RECOMPUTATIONS if RECOMPUTATION in open_keys else ()
    if config.train_args.torch_compile:  # the compiler selects what a graph stores
        recomputations = tuple(name for name in recomputations if name != "selective")
    is_open = OFFLOAD in open_keys
    names = (*_OFFLOADS, "all") if offloads_all else _OFFLOADS
    offloads = tuple(name for name in names if is_open and (has_blocks or name != "activations"))
    # BatchNorm computes its statistics over a micro-batch.
    has_open_sizes = SIZE in open_keys and not trials.model(config).has_batch_norm
    return SettingSpace(config, recomputations, offloads, has_open_sizes)


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first; of many, every second one and so on."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    divisors = sorted({*small, *(number // each for each in small)}, reverse=True)
    step = math.ceil(len(divisors) / 12)
    return divisors if step == 1 else [*divisors[:-1:step], 1]


def _halves(number: int) -> list[int]:
    sizes = [number]
    while sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] / 2))
    return sizes

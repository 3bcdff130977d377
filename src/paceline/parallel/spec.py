"""What is known of a strategy without importing it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Capabilities

if TYPE_CHECKING:
    from paceline.config.schema import Config


def no_extra_ranks(config: Config) -> int:
    """Return 0: every rank trains."""
    return 0


def no_role(config: Config, dims: ParallelDims, rank: int) -> str | None:
    """Return None: all ranks have the same role."""
    return None


def no_variant(config: Config) -> int | None:
    """Return None: the strategy has one form."""
    return None


def no_ranks(config: Config, dims: ParallelDims) -> frozenset[int]:
    """Return an empty set: the run ends when any rank exits."""
    return frozenset()


@dataclass(frozen=True)
class StrategySpec:
    """Describes a strategy without importing it. Classes and functions in other modules are given
    as ``module:attribute``.

    Args:
        name: value of ``parallel.mode``.
        implementation: class of the strategy, called with the config and the communicator.
        cost_model: function of (shape, dims, workload, config) that returns a
            :class:`~paceline.parallel.cost.Cost`; None: the cost of `ddp`.
        main_dim: dimension of the mesh that gets all ranks not assigned to another dimension.
        extra_dims: other dimensions that the mode supports.
        capabilities: settings and features that the strategy supports.
        options: keyword arguments of the implementation.
        single_process: whether one process drives all devices.
        single_device: whether it trains on one device only.
        spans_hosts: whether its ranks may be on several hosts.
        preload: modules that are imported once, before the ranks are forked.
        has_low_weights: whether several ranks store or gather trained weights in the low precision
            of the config; else autocast casts float32 weights in each forward pass.
        reduces_low_weights: whether gradients are always reduced in the low precision of the
            config.
        check_sizes: function of (config, dims) that raises ConfigError for sizes that do not fit,
            such as a number of layers that is not divisible by the number of stages.
        check_steps: function of (config, steps), called once the number of steps is known.
        check_installation: function of the config that raises ConfigError if a package is missing.
        check_model: function of (model, config, dims), called with a model on the meta device that
            has the adapters of the config; it raises ConfigError if ranks would fail with the
            model, and may change it.
        count_distinct: function of (config, dataset, micro-batches) that returns
            :attr:`~paceline.parallel.cost.Workload.distinct`, if the cost depends on it.
        check_stored: function of (config, stored config, path), called when a run of another mode
            resumes from a checkpoint of this one; it raises ConfigError if the run cannot use the
            state.
        variants: numbers of the forms of the strategy, if there are several.
        variant: function that returns the number of the form of the strategy that a config asks
            for, such as the stage of DeepSpeed's ZeRO; None if there is one form.
        select: function that returns the implementation for a config, if the mode has several.
        extra_ranks: function that returns the number of ranks without a share of the batch. They
            are the last ranks of the world.
        rank_role: function that returns the role of a rank, or None if all have the same.
        expendable_ranks: function that returns the ranks whose processes may exit without ending
            the run.
    """

    name: str
    implementation: str
    cost_model: str | None = None
    main_dim: str = "data"
    extra_dims: tuple[str, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    options: Mapping[str, bool | float | str] = field(default_factory=dict)
    single_process: bool = False
    single_device: bool = False
    spans_hosts: bool = True
    preload: tuple[str, ...] = ()
    has_low_weights: bool = False
    reduces_low_weights: bool = False
    check_sizes: str | None = None
    check_steps: str | None = None
    check_installation: str | None = None
    check_model: str | None = None
    count_distinct: str | None = None
    check_stored: str | None = None
    variants: tuple[int, ...] = ()
    variant: Callable[[Config], int | None] = no_variant
    select: Callable[[Config], str] | None = None
    extra_ranks: Callable[[Config], int] = no_extra_ranks
    rank_role: Callable[[Config, ParallelDims, int], str | None] = no_role
    expendable_ranks: Callable[[Config, ParallelDims], frozenset[int]] = no_ranks

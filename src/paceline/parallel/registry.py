"""The registry of strategies: describes each one without importing it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.config.diff import OTHER_TRAINING as OTHER_TRAINING
from paceline.config.modes import read_mode
from paceline.core.errors import ConfigError, nearest
from paceline.core.formatting import counted
from paceline.core.user_code import import_user_module
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import ModelShape
from paceline.parallel.capabilities import Capabilities, check_features, check_limits
from paceline.parallel.cost import Cost, Workload
from paceline.parallel.limits import precision, training
from paceline.parallel.limits import strategies as limits
from paceline.parallel.offload import ACTIVATION_OFFLOAD
from paceline.parallel.parameter_server import roles

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.config.schema.parallel import Parallel


def no_extra_ranks(config: Config) -> int:
    """Return 0: every rank trains."""
    return 0


def no_role(config: Config, dims: ParallelDims, rank: int) -> str | None:
    """Return None: all ranks have the same role."""
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
            :class:`~paceline.parallel.cost.Cost`.
        main_dim: dimension of the mesh that gets all ranks not assigned to another dimension.
        extra_dims: other dimensions that the mode supports.
        capabilities: settings and features that the strategy supports.
        options: keyword arguments of the implementation.
        single_process: whether one process drives all devices.
        has_low_weights: whether several ranks store or gather trained weights in the low precision
            of the config; else autocast casts float32 weights in each forward pass.
        check_sizes: function of (config, dims) that raises ConfigError for sizes that do not fit,
            such as a number of layers that is not divisible by the number of stages.
        check_steps: function of (config, steps), called once the number of steps is known.
        check_installation: function of the config that raises ConfigError if a package is missing.
        select: function that returns the implementation for a config, if the mode has several.
        extra_ranks: function that returns the number of ranks without a share of the batch. They
            are the last ranks of the world.
        rank_role: function that returns the role of a rank, or None if all have the same.
        expendable_ranks: function that returns the ranks whose processes may exit without ending
            the run.
    """

    name: str
    implementation: str
    cost_model: str = "paceline.parallel.ddp.cost:estimate"
    main_dim: str = "data"
    extra_dims: tuple[str, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    options: Mapping[str, bool | float | str] = field(default_factory=dict)
    single_process: bool = False
    has_low_weights: bool = False
    check_sizes: str | None = None
    check_steps: str | None = None
    check_installation: str | None = None
    select: Callable[[Config], str] | None = None
    extra_ranks: Callable[[Config], int] = no_extra_ranks
    rank_role: Callable[[Config, ParallelDims, int], str | None] = no_role
    expendable_ranks: Callable[[Config, ParallelDims], frozenset[int]] = no_ranks


#: What no strategy supports.
_FOR_ALL = (
    *precision.PURE_BFLOAT16,
    *precision.FLOAT8,
    *ACTIVATION_OFFLOAD,
    *training.AVERAGE,
    limits.NO_DIVIDED_PREFERENCES,
    limits.NO_DIVIDED_REWARDS,
)
_HYBRID = Capabilities(limits.HYBRID, reduces_in_buckets=True)
_WORKERS_COUNT_EQUALLY = (
    "every worker counts equally in the average, so unequal shares would change the training"
)
_SPECS = (
    StrategySpec(
        name="single",
        implementation="paceline.parallel.ddp.strategy:SingleDeviceStrategy",
        capabilities=Capabilities(limits.DDP, unequal_shares=True, mixed_devices=True),
    ),
    StrategySpec(
        name="dp",
        implementation="paceline.parallel.ddp.threads:ThreadedDPStrategy",
        cost_model="paceline.parallel.ddp.cost:estimate_threaded",
        capabilities=Capabilities(
            limits.THREADED_DP,
            equal_shares_reason="its devices run their micro-batches in lockstep",
            chosen_by_auto=False,
        ),
        single_process=True,
    ),
    StrategySpec(
        name="ddp",
        implementation="paceline.parallel.ddp.strategy:DDPStrategy",
        capabilities=Capabilities(
            limits.DDP, reduces_in_buckets=True, unequal_shares=True, mixed_devices=True
        ),
    ),
    StrategySpec(
        name="zero1",
        implementation="paceline.parallel.zero1.strategy:Zero1Strategy",
        cost_model="paceline.parallel.zero1.cost:estimate",
        has_low_weights=True,
        capabilities=Capabilities(limits.ZERO1, unequal_shares=True),
    ),
    StrategySpec(
        name="zero2",
        implementation="paceline.parallel.fsdp.strategy:FSDPStrategy",
        options={"reshard_after_forward": False},
        cost_model="paceline.parallel.fsdp.cost:estimate_zero2",
        main_dim="shard",
        extra_dims=("data",),
        has_low_weights=True,
        capabilities=Capabilities(
            limits.FSDP,
            equal_shares_reason=(
                "it reduces gradients in every micro-batch, so all ranks must run the same number"
                " of micro-batches"
            ),
        ),
        check_sizes="paceline.parallel.fsdp.check:check_offload",
    ),
    StrategySpec(
        name="zero3",
        implementation="paceline.parallel.fsdp.strategy:FSDPStrategy",
        cost_model="paceline.parallel.fsdp.cost:estimate_zero3",
        main_dim="shard",
        extra_dims=("data",),
        has_low_weights=True,
        capabilities=Capabilities(
            limits.FSDP,
            equal_shares_reason=(
                "it gathers weights in every micro-batch, so all ranks must run the same number of"
                " micro-batches"
            ),
        ),
        check_sizes="paceline.parallel.fsdp.check:check_offload",
    ),
    StrategySpec(
        name="deepspeed",
        implementation="paceline.parallel.deepspeed.strategy:DeepSpeedStrategy",
        cost_model="paceline.parallel.deepspeed.cost:estimate",
        has_low_weights=True,
        capabilities=Capabilities(
            limits.DEEPSPEED,
            equal_shares_reason=(
                "DeepSpeed requires the same number of micro-batches on all ranks"
            ),
            chosen_by_auto=False,
        ),
        check_sizes="paceline.parallel.deepspeed.check:check_settings",
        check_installation="paceline.parallel.deepspeed.check:check_package",
    ),
    StrategySpec(
        name="tensor",
        implementation="paceline.parallel.hybrid.strategy:HybridStrategy",
        cost_model="paceline.parallel.hybrid.cost:estimate",
        main_dim="tensor",
        extra_dims=("data",),
        capabilities=_HYBRID,
        check_sizes="paceline.parallel.hybrid.check:check_sizes",
    ),
    StrategySpec(
        name="pipeline",
        implementation="paceline.parallel.hybrid.strategy:HybridStrategy",
        cost_model="paceline.parallel.hybrid.cost:estimate",
        main_dim="pipeline",
        extra_dims=("data",),
        capabilities=_HYBRID,
        check_sizes="paceline.parallel.hybrid.check:check_sizes",
    ),
    StrategySpec(
        name="hybrid",
        implementation="paceline.parallel.hybrid.strategy:HybridStrategy",
        cost_model="paceline.parallel.hybrid.cost:estimate",
        extra_dims=("shard", "tensor", "pipeline"),
        capabilities=_HYBRID,
        check_sizes="paceline.parallel.hybrid.check:check_sizes",
    ),
    StrategySpec(
        name="local_sgd",
        implementation="paceline.parallel.local_sgd.algorithms:LocalSGDStrategy",
        cost_model="paceline.parallel.local_sgd.cost:estimate_local_sgd",
        capabilities=Capabilities(
            limits.LOCAL_SGD,
            equal_shares_reason=_WORKERS_COUNT_EQUALLY,
            mixed_devices=True,
            chosen_by_auto=False,
        ),
        check_sizes="paceline.parallel.local_sgd.schedule:check_sizes",
        check_steps="paceline.parallel.local_sgd.schedule:check_steps",
    ),
    StrategySpec(
        name="diloco",
        implementation="paceline.parallel.local_sgd.algorithms:DiLoCoStrategy",
        cost_model="paceline.parallel.local_sgd.cost:estimate_diloco",
        capabilities=Capabilities(
            limits.DILOCO,
            equal_shares_reason=_WORKERS_COUNT_EQUALLY,
            chosen_by_auto=False,
        ),
        check_sizes="paceline.parallel.local_sgd.schedule:check_sizes",
        check_steps="paceline.parallel.local_sgd.schedule:check_steps",
    ),
    StrategySpec(
        name="parameter_server",
        implementation="paceline.parallel.parameter_server.strategy:ParameterServerStrategy",
        cost_model="paceline.parallel.parameter_server.cost:estimate",
        capabilities=Capabilities(limits.PARAMETER_SERVER, chosen_by_auto=False),
        select=roles.implementation,
        extra_ranks=roles.extra_ranks,
        rank_role=roles.rank_role,
        expendable_ranks=roles.expendable_ranks,
    ),
)
#: Mode → its spec.
STRATEGIES = {spec.name: spec for spec in _SPECS}
ALIASES = {"fsdp": "zero3"}
_AXIS_KEYS = ("data", "shard", "tensor", "pipeline")


@dataclass(frozen=True)
class ParallelLayout:
    """The strategy of a run, its mesh and its number of processes.

    Args:
        strategy: name of the strategy (see :data:`STRATEGIES`), or the location of a spec, such as
            ``./file.py:SPEC``.
        axes: sizes of the mesh.
        num_processes: 1 for ``dp``, whose devices share a process. Otherwise one per device, plus
            the servers of a parameter server.
    """

    strategy: str
    axes: ParallelDims
    num_processes: int

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.axes.size

    @property
    def has_low_weights(self) -> bool:
        """Whether ranks store or gather trained weights in low precision."""
        low = self.axes.size > 1 and get_spec(self.strategy).has_low_weights
        return low or self.axes.shard > 1

    def text(self) -> str:
        """Return the layout as text, such as ``ddp (data 4)``."""
        return f"{self.strategy} ({self.axes.text()})"


def mode_of(parallel: Parallel) -> str:
    """Return the strategy that ``parallel.mode`` names, or ``auto`` if Paceline chooses it.

    Raises:
        ConfigError: if the mode is unknown.
    """
    mode = str(read_mode(parallel.mode)["mode"])
    sized = [key for key in ("shard", "tensor", "pipeline") if getattr(parallel, key) is not None]
    if mode == "auto":
        return "hybrid" if sized or parallel.data is not None else "auto"
    mode = ALIASES.get(mode, mode)
    if mode not in STRATEGIES and ":" not in mode:
        near = nearest(mode, [*STRATEGIES, *ALIASES])
        raise ConfigError(
            f"`parallel.mode: {parallel.mode}`: unknown mode",
            allowed=", ".join(["auto", *STRATEGIES, *ALIASES])
            + ", or a custom strategy such as ./file.py:SPEC",
            fix=f"set `parallel.mode: {near or 'auto'}`",
        )
    return mode


def layout(parallel: Parallel, num_devices: int, mode: str | None = None) -> ParallelLayout:
    """Return the layout for ``num_devices`` devices. ``mode`` overrides the mode of the config.

    Raises:
        ConfigError: if the product of the configured sizes is not ``num_devices``.
    """
    name = mode or mode_of(parallel)
    if name == "auto":
        name = "ddp" if num_devices > 1 else "single"
    spec = get_spec(name)
    main, others = spec.main_dim, spec.extra_dims
    sizes: dict[str, int] = {
        key: getattr(parallel, key) for key in _AXIS_KEYS if getattr(parallel, key) is not None
    }
    unsupported = [
        f"`parallel.{key}: {size}`"
        for key, size in sizes.items()
        if size > 1 and key not in (main, *others)
    ]
    if unsupported:
        raise ConfigError(
            f"{' and '.join(unsupported)} is not supported with `parallel.mode: {name}`: it has no"
            " such dimension",
            allowed=f"with {name}: " + ", ".join(f"`parallel.{key}`" for key in (main, *others)),
            fix="leave `parallel.mode` out (or set `hybrid`) to combine dimensions",
        )
    replicas, rest = divmod(num_devices, math.prod(sizes.values()))
    if main in sizes and "data" in others and "data" not in sizes and rest == 0:
        sizes["data"] = replicas  # replicas use the remaining ranks
    others_size = math.prod(size for key, size in sizes.items() if key != main)
    size = sizes.get(main, num_devices // others_size if num_devices % others_size == 0 else 0)
    if name == "single":
        size = 1
    if size * others_size != num_devices and not (name == "single" and num_devices == 1):
        product = " × ".join(f"`parallel.{key}: {value}`" for key, value in sizes.items())
        divisors = [str(each) for each in range(1, num_devices + 1) if num_devices % each == 0]
        raise ConfigError(
            f"{product or name} does not make {counted(num_devices, 'rank')}",
            allowed=(
                f"sizes of {', '.join((main, *others))} whose product is {num_devices} (its"
                f" divisors: {', '.join(divisors)})"
            ),
            fix=(
                f"set `parallel.num_gpus: {max(1, size) * others_size}`, or leave"
                f" `parallel.{main}` out: it gets the remaining ranks"
            ),
        )
    axes = ParallelDims(**{**sizes, main: size})
    return ParallelLayout(name, axes, 1 if spec.single_process else num_devices)


def get_spec(mode: str) -> StrategySpec:
    """Return the spec of a strategy from :data:`STRATEGIES`, or from a user's file or module
    (``./file.py:SPEC``, ``package.module:SPEC``).

    Raises:
        ConfigError: if the file does not exist or has no spec of that name.
    """
    if mode in STRATEGIES:
        return STRATEGIES[mode]
    where, _, attribute = mode.rpartition(":")
    form = "./file.py:SPEC or package.module:SPEC"
    module = import_user_module(where, f"parallel.mode: {mode}", form, keeps_name=True)
    spec = getattr(module, attribute, None)
    if not isinstance(spec, StrategySpec):
        raise ConfigError(
            f"`parallel.mode: {mode}` is not a strategy: {where} has no StrategySpec `{attribute}`",
            allowed="the name of a paceline.parallel.registry.StrategySpec",
            fix="docs/strategies.md shows one",
        )
    return spec


def load_object(path: str) -> Any:
    """Import and return the object ``module:attribute``."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def estimate_cost(
    mode: str, shape: ModelShape, dims: ParallelDims, work: Workload, config: Config
) -> Cost:
    """Estimate the cost of a step with the strategy's cost model."""
    cost: Cost = load_object(get_spec(mode).cost_model)(shape, dims, work, config)
    return cost


def check_strategy(mode: str, config: Config, dims: ParallelDims, installed: bool = True) -> None:
    """Raise :class:`~paceline.core.errors.ConfigError` for a config that the strategy does not
    support on this mesh.

    Args:
        installed: whether to check that required packages are installed. False for a plan that is
            made for another machine.
    """
    spec = get_spec(mode)
    for_all = Capabilities(limits=_FOR_ALL)
    check_limits(spec.name, for_all, config, dims)
    check_limits(spec.name, spec.capabilities, config, dims)
    if spec.check_sizes is not None:
        load_object(spec.check_sizes)(config, dims)
    check_features(spec.name, spec.capabilities, config, dims)
    if installed and spec.check_installation is not None:
        load_object(spec.check_installation)(config)
    if mode not in STRATEGIES:  # the import of a user's class takes seconds, because of torch
        load_object("paceline.parallel.strategy:check_class")(mode)


def check_steps(mode: str, config: Config, steps: int) -> None:
    """Raise ConfigError if the strategy cannot train for ``steps`` steps."""
    spec = get_spec(mode)
    if spec.check_steps is not None:
        load_object(spec.check_steps)(config, steps)

"""The strategies and what is known of each without importing it. Imports no torch."""

from __future__ import annotations

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
from paceline.parallel import limits
from paceline.parallel.capabilities import Capabilities, check_features, check_limits
from paceline.parallel.cost import Cost, Workload
from paceline.parallel.parameter_server import roles

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.config.schema.parallel import Parallel

ExtraRanks = Callable[["Config"], int]
RankRole = Callable[["Config", ParallelDims, int], str | None]
ExpendableRanks = Callable[["Config", ParallelDims], frozenset[int]]


def no_extra_ranks(config: Config) -> int:
    """Every rank trains."""
    return 0


def no_role(config: Config, dims: ParallelDims, rank: int) -> str | None:
    """All ranks are alike."""
    return None


def no_ranks(config: Config, dims: ParallelDims) -> frozenset[int]:
    """The run ends with any of its ranks."""
    return frozenset()


@dataclass(frozen=True)
class StrategySpec:
    """What is known of a strategy without importing it. Objects are named as ``module:attribute``.

    Args:
        name: the mode.
        implementation: the class, called with the config and the communicator.
        cost_model: a function of (shape, dims, workload, config) that returns a
            :class:`~paceline.parallel.cost.Cost`.
        main_dim: the dimension of the mesh that takes the ranks which no size accounts for.
        extra_dims: dimensions that the mode may have beside it.
        capabilities: what it supports.
        options: more keyword arguments of the implementation.
        single_process: one process drives all devices.
        check_sizes: a function of (config, dims) that raises ConfigError for numbers that do not
            fit, such as layers that the stages do not divide.
        check_steps: a function of (config, steps), called when the number of steps is known.
        check_installation: a function of the config that raises ConfigError where a package is
            missing.
        select: the implementation for a config, where a mode has several.
        extra_ranks: processes without a share of the batch, the last ranks of the world.
        rank_role: what a rank is, where ranks differ.
        expendable_ranks: ranks whose processes may end without ending the run.
    """

    name: str
    implementation: str
    cost_model: str = "paceline.parallel.ddp.cost:estimate"
    main_dim: str = "data"
    extra_dims: tuple[str, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    options: Mapping[str, bool | float | str] = field(default_factory=dict)
    single_process: bool = False
    check_sizes: str | None = None
    check_steps: str | None = None
    check_installation: str | None = None
    select: Callable[[Config], str] | None = None
    extra_ranks: ExtraRanks = no_extra_ranks
    rank_role: RankRole = no_role
    expendable_ranks: ExpendableRanks = no_ranks


_HYBRID = Capabilities(limits.HYBRID, reduces_in_buckets=True)
_WORKERS_COUNT_EQUALLY = (
    "every worker counts equally in the average, so unequal shares would change the training"
)
_SPECS = (
    StrategySpec(
        name="single",
        implementation="paceline.parallel.ddp.strategy:SingleDeviceStrategy",
        capabilities=Capabilities(ignores_offload=True, unequal_shares=True, mixed_devices=True),
    ),
    StrategySpec(
        name="dp",
        implementation="paceline.parallel.ddp.threads:ThreadedDPStrategy",
        cost_model="paceline.parallel.ddp.cost:estimate_threaded",
        capabilities=Capabilities(
            ignores_offload=True,
            equal_shares_reason="its devices run their micro-batches in lockstep",
            chosen_by_auto=False,
        ),
        single_process=True,
    ),
    StrategySpec(
        name="ddp",
        implementation="paceline.parallel.ddp.strategy:DDPStrategy",
        capabilities=Capabilities(
            ignores_offload=True, reduces_in_buckets=True, unequal_shares=True, mixed_devices=True
        ),
    ),
    StrategySpec(
        name="zero1",
        implementation="paceline.parallel.zero1.strategy:Zero1Strategy",
        cost_model="paceline.parallel.zero1.cost:estimate",
        capabilities=Capabilities(limits.ZERO1, unequal_shares=True),
    ),
    StrategySpec(
        name="zero2",
        implementation="paceline.parallel.fsdp.strategy:FSDPStrategy",
        options={"reshard_after_forward": False},
        cost_model="paceline.parallel.fsdp.cost:estimate_zero2",
        main_dim="shard",
        extra_dims=("data",),
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
        capabilities=Capabilities(
            limits.PARAMETER_SERVER, ignores_offload=True, chosen_by_auto=False
        ),
        select=roles.implementation,
        extra_ranks=roles.extra_ranks,
        rank_role=roles.rank_role,
        expendable_ranks=roles.expendable_ranks,
    ),
)
#: mode → what is known of it.
STRATEGIES = {spec.name: spec for spec in _SPECS}
ALIASES = {"fsdp": "zero3"}
_AXIS_KEYS = ("data", "shard", "tensor", "pipeline")


@dataclass(frozen=True)
class ParallelLayout:
    """How a run is spread: the strategy's name (see :data:`STRATEGIES`; or where a
    spec is, as ``./file.py:SPEC``), the
    mesh, and how many processes run it (one for ``dp``, whose devices share a process; else one a
    device, and the servers of a parameter server beside them)."""

    strategy: str
    axes: ParallelDims
    num_processes: int

    @property
    def world_size(self) -> int:
        """Devices."""
        return self.axes.size

    def text(self) -> str:
        """For a person: ``ddp (data 4)``."""
        return f"{self.strategy} ({self.axes.text()})"


def mode_of(parallel: Parallel) -> str:
    """The strategy that ``parallel.mode`` names; ``auto`` where the choice is left to Paceline.

    Raises:
        ConfigError: no such mode.
    """
    mode = str(read_mode(parallel.mode)["mode"])
    sized = [key for key in ("shard", "tensor", "pipeline") if getattr(parallel, key) is not None]
    if mode == "auto":
        return "hybrid" if sized or parallel.data is not None else "auto"
    mode = ALIASES.get(mode, mode)
    if mode not in STRATEGIES and ":" not in mode:
        near = nearest(mode, [*STRATEGIES, *ALIASES])
        raise ConfigError(
            f"`parallel.mode: {parallel.mode}` is not a mode",
            allowed=", ".join(["auto", *STRATEGIES, *ALIASES])
            + ", or a strategy of your own as ./file.py:SPEC",
            fix=f"set `parallel.mode: {near or 'auto'}`",
        )
    return mode


def layout(parallel: Parallel, num_devices: int, mode: str | None = None) -> ParallelLayout:
    """The mesh for ``num_devices`` devices. ``mode``: a strategy's name, where the config leaves
    the choice.

    Raises:
        ConfigError: the sizes of the axes do not make that number; says which would.
    """
    name = mode or mode_of(parallel)
    if name == "auto":
        name = "ddp" if num_devices > 1 else "single"
    spec = get_spec(name)
    main, others = spec.main_dim, spec.extra_dims
    given = {
        key: getattr(parallel, key) for key in _AXIS_KEYS if getattr(parallel, key) is not None
    }
    wrong = [key for key in given if key not in (main, *others) and given[key] > 1]
    if wrong:
        keys = ", ".join(f"`parallel.{key}: {given[key]}`" for key in wrong)
        raise ConfigError(
            f"`parallel.mode: {name}` has no axis for {keys}",
            allowed=f"with {name}: " + ", ".join(f"`parallel.{key}`" for key in (main, *others)),
            fix="leave `parallel.mode` out (or set `hybrid`) to combine axes",
        )
    if (
        main in given
        and "data" in others
        and "data" not in given
        and num_devices % _multiplied(given) == 0
    ):
        # replicas of what was asked for fill the rest
        given["data"] = num_devices // _multiplied(given)
    rest = _multiplied({key: size for key, size in given.items() if key != main})
    size = given.get(main, num_devices // rest if num_devices % rest == 0 else 0)
    if name == "single":
        size = 1
    if size * rest != num_devices and not (name == "single" and num_devices == 1):
        raise ConfigError(
            f"{_product(given) or name} does not make {counted(num_devices, 'rank')}",
            allowed=_fitting(num_devices, main, others),
            fix=(
                f"set `parallel.num_gpus: {max(1, size) * rest}`, or leave `parallel.{main}` out:"
                " it takes the ranks that are left"
            ),
        )
    axes = ParallelDims(**{**given, main: size})
    return ParallelLayout(name, axes, 1 if spec.single_process else num_devices)


def _multiplied(sizes: dict[str, int]) -> int:
    total = 1
    for size in sizes.values():
        total *= size
    return total


def _product(given: dict[str, int]) -> str:
    return " × ".join(f"`parallel.{key}: {size}`" for key, size in given.items())


def _fitting(num_devices: int, main: str, others: tuple[str, ...]) -> str:
    divisors = [one for one in range(1, num_devices + 1) if num_devices % one == 0]
    sizes = ", ".join(map(str, divisors))
    return (
        f"sizes of {', '.join((main, *others))} whose product is {num_devices} (its divisors:"
        f" {sizes})"
    )


def get_spec(mode: str) -> StrategySpec:
    """The spec of a strategy: one of :data:`STRATEGIES`, or of a user's file or module, as
    ``./file.py:SPEC`` or ``package.module:SPEC``.

    Raises:
        ConfigError: there is no such file, or no spec of that name in it.
    """
    if mode in STRATEGIES:
        return STRATEGIES[mode]
    where, _, attribute = mode.rpartition(":")
    form = "./file.py:SPEC or package.module:SPEC"
    module = import_user_module(where, f"parallel.mode: {mode}", form, keeps_name=True)
    found = getattr(module, attribute, None)
    if not isinstance(found, StrategySpec):
        raise ConfigError(
            f"`parallel.mode: {mode}` is not a strategy: {where} has no StrategySpec `{attribute}`",
            allowed="the name of a paceline.parallel.registry.StrategySpec",
            fix="docs/strategies.md shows one",
        )
    return found


def load_object(path: str) -> Any:
    """The object ``module:attribute``."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def estimate_cost(
    mode: str, shape: ModelShape, dims: ParallelDims, work: Workload, config: Config
) -> Cost:
    """What a step of the strategy takes, from its cost model."""
    cost: Cost = load_object(get_spec(mode).cost_model)(shape, dims, work, config)
    return cost


def check_strategy(mode: str, config: Config, dims: ParallelDims, installed: bool = True) -> None:
    """Raise :class:`~paceline.core.errors.ConfigError` for a config that the strategy does not
    support on this mesh.

    Args:
        installed: check the packages that it needs, too; a plan may be for another machine.
    """
    spec = get_spec(mode)
    check_limits(spec.name, spec.capabilities, config, dims)
    if spec.check_sizes is not None:
        load_object(spec.check_sizes)(config, dims)
    check_features(spec.name, spec.capabilities, config, dims)
    if installed and spec.check_installation is not None:
        load_object(spec.check_installation)(config)


def check_steps(mode: str, config: Config, steps: int) -> None:
    """Raise ConfigError where the strategy cannot train for ``steps`` steps."""
    spec = get_spec(mode)
    if spec.check_steps is not None:
        load_object(spec.check_steps)(config, steps)

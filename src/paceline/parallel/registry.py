"""The registry of strategies: describes each one without importing it. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.diff import OTHER_TRAINING as OTHER_TRAINING
from paceline.config.modes import read_mode
from paceline.core.errors import ConfigError, nearest
from paceline.core.user_code import import_user_module
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import ModelShape
from paceline.parallel import capabilities
from paceline.parallel.capabilities import Capabilities, Placement, check_features, check_limits
from paceline.parallel.cost import Cost, Workload
from paceline.parallel.limits.experts import with_experts
from paceline.parallel.limits.shared import FOR_ALL, ONE_PROCESS
from paceline.parallel.spec import StrategySpec

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.config.schema.parallel import Parallel


#: Locations of the specs, in the order of the documentation.
_SPECS = (
    "ddp.spec:SINGLE",
    "data_parallel.spec:DP",
    "ddp.spec:DDP",
    "zero1.spec:ZERO1",
    "fsdp.spec:ZERO2",
    "fsdp.spec:ZERO3",
    "deepspeed.spec:DEEPSPEED",
    "hybrid.spec:TENSOR",
    "hybrid.spec:PIPELINE",
    "context.spec:CONTEXT",
    "hybrid.spec:HYBRID",
    "local_sgd.spec:LOCAL_SGD",
    "local_sgd.spec:DILOCO",
    "parameter_server.spec:PARAMETER_SERVER",
)


def modules_to_preload(parallel: Parallel) -> tuple[str, ...]:
    """Return the modules that ranks import for a mode, if it is one of Paceline's."""
    mode = "zero3" if parallel.shard else parallel.mode
    spec = STRATEGIES.get(ALIASES.get(mode, mode))
    return () if spec is None else spec.preload


def uses_one_device(parallel: Parallel) -> bool:
    """Return whether the mode of a config, if it is one of Paceline's, trains on one device."""
    spec = STRATEGIES.get(parallel.mode)
    return spec is not None and spec.single_device


def load_object(path: str) -> Any:
    """Import and return the object ``module:attribute``."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


#: Cost of a strategy that does not name a cost model: a full replica on each rank.
_PLAIN_COST = "paceline.strategies.ddp.cost:estimate"
_COMPRESSION_NOTICE = "paceline.strategies.reducers.compression.cost:compression_notice"
_LOADED: list[StrategySpec] = [load_object(f"paceline.strategies.{spec}") for spec in _SPECS]
#: Mode → its spec.
STRATEGIES = {spec.name: spec for spec in _LOADED}
ALIASES = {"fsdp": "zero3"}
AXIS_KEYS = ("data", "shard", "context", "tensor", "pipeline")
#: Keys of ``parallel`` with a number of ranks.
SIZE_KEYS = (*AXIS_KEYS, "expert")


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
    if mode == "auto":
        is_sized = any(getattr(parallel, key) is not None for key in SIZE_KEYS)
        return "hybrid" if is_sized else "auto"
    mode = ALIASES.get(mode, mode)
    if mode not in STRATEGIES and ":" not in mode:
        near = nearest(mode, [*STRATEGIES, *ALIASES])
        raise ConfigError(
            "`parallel.mode: {mode}`: unknown mode",
            code="unknown-mode",
            allowed=(
                ", ".join(["auto", *STRATEGIES, *ALIASES])
                + ", or a custom strategy such as ./file.py:SPEC"
            ),
            fix="set `parallel.mode: {near}`",
            mode=parallel.mode,
            near=near or "auto",
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
        key: getattr(parallel, key) for key in AXIS_KEYS if getattr(parallel, key) is not None
    }
    unsupported = [
        f"`parallel.{key}: {size}`"
        for key, size in sizes.items()
        if size > 1 and key not in (main, *others)
    ]
    if unsupported:
        raise ConfigError(
            "{unsupported} is not supported with `parallel.mode: {name}`: it has no such dimension",
            code="axes-with-mode",
            allowed=("with {name}: " + ", ".join(f"`parallel.{key}`" for key in (main, *others))),
            fix="leave `parallel.mode` out (or set `hybrid`) to combine dimensions",
            unsupported=" and ".join(unsupported),
            name=name,
        )
    size, sizes = _sizes_of_mesh(parallel, spec, num_devices)
    product = size * math.prod(sizes.values())
    if product != num_devices:
        raise _sizes_do_not_fit(parallel, spec, num_devices, product or math.prod(sizes.values()))
    axes = ParallelDims(**{**sizes, main: size})
    if parallel.expert is not None and parallel.expert > 1:
        axes = with_experts(axes, parallel.expert, name)
    return ParallelLayout(name, axes, 1 if spec.single_process else num_devices)


def _sizes_of_mesh(
    parallel: Parallel, spec: StrategySpec, num_devices: int
) -> tuple[int, dict[str, int]]:
    """Return the size of the main dimension, 0 if no size fits, and the sizes of the others."""
    sizes: dict[str, int] = {
        key: getattr(parallel, key) for key in AXIS_KEYS if getattr(parallel, key) is not None
    }
    replicas, rest = divmod(num_devices, math.prod(sizes.values()))
    if spec.main_dim in sizes and "data" in spec.extra_dims and "data" not in sizes and rest == 0:
        sizes["data"] = replicas  # replicas use the remaining ranks
    size = sizes.pop(spec.main_dim, None)
    if spec.single_device:
        return 1, sizes
    if size is None:
        size, rest = divmod(num_devices, math.prod(sizes.values()))
        return (0 if rest else size), sizes
    return size, sizes


def _fits(parallel: Parallel, spec: StrategySpec, num_devices: int) -> bool:
    """Return whether a mesh of these devices has the configured sizes."""
    size, others = _sizes_of_mesh(parallel, spec, num_devices)
    return size * math.prod(others.values()) == num_devices


def _sizes_do_not_fit(
    parallel: Parallel, spec: StrategySpec, num_devices: int, product: int
) -> ConfigError:
    """Return the error that no mesh of these devices has the configured sizes. Its advice names
    only axes that are set, and numbers of devices that fit.

    Args:
        product: product of the sizes.
    """
    sizes = {key: getattr(parallel, key) for key in AXIS_KEYS if getattr(parallel, key)}
    hosts = parallel.hosts[1]
    fitting = math.lcm(product, hosts)
    advice = []
    if _fits(parallel, spec, fitting):
        advice.append(f"set `parallel.num_gpus: {fitting // hosts}`")
    excess = [
        f"`parallel.{key}`"
        for key in sizes
        if _fits(parallel.model_copy(update={key: None}), spec, num_devices)
    ]
    if excess:
        advice.append(f"leave out {' or '.join(excess)}")
    divisors = [str(each) for each in range(1, num_devices + 1) if num_devices % each == 0]
    return ConfigError(
        "{product} does not make {num_devices:rank}",
        code="axes-do-not-fit-ranks",
        allowed="sizes of {main} whose product is {num_devices} (its divisors: {divisors})",
        fix="{advice}",
        product=" × ".join(f"`parallel.{key}: {size}`" for key, size in sizes.items())
        or f"`parallel.mode: {spec.name}`",
        num_devices=num_devices,
        main=", ".join((spec.main_dim, *spec.extra_dims)),
        divisors=", ".join(divisors),
        advice=", or ".join(advice) or "change the sizes, or `parallel.nnodes`",
    )


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
            "`parallel.mode: {mode}` is not a strategy: {where} has no StrategySpec `{attribute}`",
            code="not-a-strategy",
            allowed="the name of a paceline.parallel.spec.StrategySpec",
            fix="set `{attribute} = StrategySpec(...)` in it",
            mode=mode,
            where=where,
            attribute=attribute,
        )
    return spec


def estimate_cost(
    mode: str, shape: ModelShape, dims: ParallelDims, work: Workload, config: Config
) -> Cost:
    """Estimate the cost of a step with the strategy's cost model.

    The ranks of a context group sum their gradients, and shard their state, as the ranks of the
    axis that the strategy is about, so a cost model sees one larger axis.
    """
    spec = get_spec(mode)
    axis = "shard" if dims.shard > 1 or spec.main_dim == "shard" else "data"
    summed = replace(dims, context=1, **{axis: getattr(dims, axis) * dims.context})
    cost: Cost = load_object(spec.cost_model or _PLAIN_COST)(shape, summed, work, config)
    if dims.context == 1 or work.context is None:
        return cost
    traffic = dict(cost.traffic)
    recomputed = config.train_args.recomputed_share(len(work.context.facts.windows))
    forwards = 1 + config.extra_forwards + recomputed
    exchanged = work.context.traffic(dims, work.micro_batches, forwards)
    for collective, size_bytes in exchanged.items():
        traffic[collective] = traffic.get(collective, 0) + size_bytes
    return replace(cost, traffic=traffic)


def check_strategy(mode: str, config: Config, dims: ParallelDims, installed: bool = True) -> None:
    """Raise :class:`~paceline.core.errors.ConfigError` for a config that the strategy does not
    support on this mesh.

    Args:
        installed: whether to check that required packages are installed. False for a plan that is
            made for another machine.
    """
    spec = get_spec(mode)
    for_all = Capabilities(limits=FOR_ALL)
    check_limits(spec.name, for_all, config, dims)
    check_limits(spec.name, spec.capabilities, config, dims)
    if spec.check_sizes is not None:
        load_object(spec.check_sizes)(config, dims)
    check_features(spec.name, spec.capabilities, config, dims)
    if installed and spec.check_installation is not None:
        load_object(spec.check_installation)(config)
    if mode not in STRATEGIES:  # the import of a user's class takes seconds, because of torch
        load_object("paceline.parallel.strategy:check_class")(mode)


def check_placement(mode: str, config: Config, place: Placement) -> None:
    """Raise ConfigError if the strategy does not support the config on these hosts, with this outer
    launcher or on these devices."""
    spec = get_spec(mode)
    limits = (*(ONE_PROCESS if spec.single_process else ()), *spec.capabilities.limits)
    capabilities.check_placement(spec.name, limits, config, place)


def check_model_on_mesh(mode: str, model: Any, config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError if ranks would fail with a model on the meta device, which is changed."""
    spec = get_spec(mode)
    if spec.check_model is not None:
        load_object(spec.check_model)(model, config, dims)


def notice_of_compression(mode: str, config: Config, dims: ParallelDims) -> tuple[str, str] | None:
    """Return a warning, as (level, text), if the compression of the config saves nothing."""
    if not config.compression.chain or not get_spec(mode).capabilities.reduces_in_buckets:
        return None
    notice: tuple[str, str] | None = load_object(_COMPRESSION_NOTICE)(config, dims.data)
    return notice


def check_stored(mode: str, config: Config, stored: Config, path: Path) -> None:
    """Raise ConfigError if a run with ``mode`` cannot use the state in a checkpoint of another
    mode."""
    stored_mode = stored.parallel.mode
    spec = STRATEGIES.get(stored_mode)
    if spec is not None and spec.check_stored is not None and stored_mode != mode:
        load_object(spec.check_stored)(config, stored, path)


def check_steps(mode: str, config: Config, steps: int) -> None:
    """Raise ConfigError if the strategy cannot train for ``steps`` steps."""
    spec = get_spec(mode)
    if spec.check_steps is not None:
        load_object(spec.check_steps)(config, steps)

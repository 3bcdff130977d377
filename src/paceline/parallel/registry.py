"""The strategies: how training is spread over ranks. One file each; this is the whole registry.
Importing it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config.diff import OTHER_TRAINING as OTHER_TRAINING
from paceline.config.modes import read_mode
from paceline.core.errors import ConfigError, nearest
from paceline.core.formatting import counted
from paceline.distributed.mesh import ParallelDims

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.config.schema.parallel import Parallel
    from paceline.distributed.communicator import Communicator
    from paceline.parallel.base import Strategy

# name → "module:class". Imported when used.
STRATEGIES = {
    "single": "paceline.parallel.ddp.strategy:SingleDeviceStrategy",
    "dp": "paceline.parallel.ddp.threads:ThreadedDPStrategy",
    "ddp": "paceline.parallel.ddp.strategy:DDPStrategy",
    "zero1": "paceline.parallel.zero1.strategy:Zero1Strategy",
    "zero2": "paceline.parallel.fsdp.strategy:ZeRO2Strategy",
    "zero3": "paceline.parallel.fsdp.strategy:FSDPStrategy",
    "deepspeed": "paceline.parallel.deepspeed.strategy:DeepSpeedStrategy",
    "tensor": "paceline.parallel.hybrid.strategy:TensorStrategy",
    "pipeline": "paceline.parallel.hybrid.strategy:PipelineStrategy",
    "hybrid": "paceline.parallel.hybrid.strategy:HybridStrategy",
    "local_sgd": "paceline.parallel.local_sgd.local_sgd:LocalSGDStrategy",
    "diloco": "paceline.parallel.local_sgd.diloco:DiLoCoStrategy",
    "parameter_server": "paceline.parallel.parameter_server.strategy:ParameterServerStrategy",
}
ALIASES = {"fsdp": "zero3"}

#: The axis that takes the ranks which no size in the config accounts for, and the axes that a mode
#: may have beside it.
_MAIN_AXIS = {
    "single": ("data", ()),
    "dp": ("data", ()),
    "ddp": ("data", ()),
    "zero1": ("data", ()),
    "zero2": ("shard", ("data",)),
    "zero3": ("shard", ("data",)),
    "deepspeed": ("data", ()),
    "tensor": ("tensor", ("data",)),
    "pipeline": ("pipeline", ("data",)),
    "hybrid": ("data", ("shard", "tensor", "pipeline")),
    "local_sgd": ("data", ()),
    "diloco": ("data", ()),
    "parameter_server": ("data", ()),
}
_AXIS_KEYS = ("data", "shard", "tensor", "pipeline")


@dataclass(frozen=True)
class ParallelLayout:
    """How a run is spread: the strategy's name (see :data:`STRATEGIES`; or ``module:Class``), the
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
            + ", or a strategy of your own as package.module:Class",
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
    main, others = _MAIN_AXIS.get(name, ("data", ("shard", "tensor", "pipeline")))
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
    return ParallelLayout(name, axes, 1 if name == "dp" else num_devices)


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


def strategy_class(name: str) -> type[Strategy]:
    """The class of a strategy of :data:`STRATEGIES`, or of ``package.module:Class`` (a subclass of
    :class:`~paceline.parallel.base.Strategy`).

    Raises:
        ConfigError: no such module or class, or it is no strategy.
    """
    from importlib import import_module

    module_name, _, attribute = STRATEGIES.get(name, name).partition(":")
    if name in STRATEGIES:
        return getattr(import_module(module_name), attribute)  # type: ignore[no-any-return]
    from paceline.parallel.base import Strategy

    try:
        found = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"`parallel.mode: {name}` cannot be imported: {error}",
            allowed="package.module:Class, found on Python's path (PYTHONPATH)",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigError(
            f"`parallel.mode: {name}` is no strategy",
            allowed="a subclass of paceline.parallel.base.Strategy",
            fix="docs/strategies.md shows one",
        )
    return found


def check_strategy(name: str, config: Config, axes: ParallelDims) -> None:
    """Raise :class:`~paceline.core.errors.ConfigError` for a config that the strategy cannot run on
    this mesh."""
    from paceline.parallel.balance import check_balance
    from paceline.parallel.compression.cost import check_communication

    kind = strategy_class(name)
    kind.check(config, axes)
    check_communication(config, name, kind.reduces_in_buckets, axes)
    check_balance(config, name, kind.allows_unequal_shares, axes)


def make_strategy(name: str, config: Config, world: Communicator) -> Strategy:
    """An instance of the strategy ``name`` for this rank."""
    return strategy_class(name).variant(config)(config, world)

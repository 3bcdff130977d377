"""Which mode ``auto`` takes: the fastest by estimate that fits, and quickly so where the plainest
is known to fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.core.processes import available_memory
from paceline.parallel.registry import STRATEGIES, ParallelLayout, layout
from paceline.planner import machine_profile
from paceline.planner.advice import advise
from paceline.planner.devices import recognize
from paceline.planner.estimate import Mode, estimate
from paceline.planner.hardware import Machine, cpu_machine, named_machine, unknown_machine
from paceline.planner.layouts import PLAIN, candidates
from paceline.planner.model_profile import Described, describe
from paceline.planner.upper_bound import at_most
from paceline.planner.workload import Batch, micro_batch

#: Never taken by ``auto``: `dp` is there for comparison, and DeepSpeed does what the zero modes do.
NOT_CHOSEN = tuple(
    name for name, spec in STRATEGIES.items() if not spec.capabilities.chosen_by_auto
)
#: Of modes within this of the fastest the plainest is taken: an estimate tells no finer.
_EQUAL = 0.98
#: Share of the memory below which a rough upper bound is enough.
_ROOMY = 0.6


@dataclass(frozen=True)
class Choice:
    """All modes, and the one that ``auto`` takes; None where none fits."""

    modes: list[Mode]
    taken: Mode | None
    why: str


def all_modes(config: Config, described: Described, batch: Batch, machine: Machine) -> list[Mode]:
    """Every layout for the machine, estimated; DeepSpeed by stage."""
    found = []
    for one in candidates(config, machine.count):
        stages: Sequence[int | None] = (1, 2, 3) if one.strategy == "deepspeed" else (None,)
        found += [estimate(one, config, described, batch, machine, stage=stage) for stage in stages]
    return found


def choose(config: Config, described: Described, batch: Batch, machine: Machine) -> Choice:
    """Estimate every mode and take one."""
    modes = all_modes(config, described, batch, machine)
    open_to = [one for one in modes if one.cost is not None and eligible(one, machine.count)]
    fitting = [one for one in open_to if one.fits]
    if not fitting:
        return Choice(modes, None, nothing_fits(config, described, batch, machine, open_to))
    best = max(one.per_second for one in fitting)
    taken = min((one for one in fitting if one.per_second >= _EQUAL * best), key=_plainness)
    memory = f"{human_bytes(taken.total)} of {human_bytes(machine.memory_bytes)} a rank"
    if len(fitting) == 1:
        why = f"{taken.name} is the only mode that fits: {memory}"
    else:
        why = f"{taken.name} is the fastest of {len(fitting)} modes that fit, by estimate: {memory}"
    plain = next((one for one in open_to if one.layout.strategy == "ddp"), None)
    if plain is not None and not plain.fits:
        why += f"; ddp {plain.reason}"
    return Choice(modes, taken, why)


def eligible(mode: Mode, num_devices: int) -> bool:
    """True where ``auto`` may take the mode: it uses every device."""
    name = mode.layout.strategy
    return name not in NOT_CHOSEN and ":" not in name and (name != "single" or num_devices == 1)


def _plainness(mode: Mode) -> tuple[int, int]:
    order = ("single", *PLAIN)
    name = mode.layout.strategy
    axes = mode.layout.axes
    return (order.index(name) if name in order else len(order), axes.tensor * axes.pipeline)


def nothing_fits(
    config: Config, described: Described, batch: Batch, machine: Machine, open_to: list[Mode]
) -> str:
    """Which mode is nearest, and what would make it fit: each cure is tried by estimate."""
    if not open_to:
        return "no mode can run this config on these devices; the reasons stand beside each"
    nearest = min(open_to, key=lambda one: one.total)
    text = (
        f"nothing fits {counted(machine.count, 'device')}: the nearest is {nearest.name}, which"
        f" {nearest.reason}"
    )
    smallest = advise(config, described, batch, machine, nearest).smallest
    cures = [f"set {smallest.text}"] if smallest is not None else []
    if not config.lora.enable and config.task in ("sft", "pretrain"):
        cures.append("train adapters (`lora.enable=true`)")
    more = _more_devices(config, described, batch, machine)
    cures += [f"use {more} such devices"] if more else []
    return text + (f". What would do: {'; or '.join(cures)}" if cures else "")


def _more_devices(
    config: Config, described: Described, batch: Batch, machine: Machine
) -> int | None:
    """The smallest number of devices, doubling, on which a mode fits as the config stands."""
    for factor in (2, 4, 8, 16):
        bigger = replace(machine, count=machine.count * factor)
        one = layout(
            config.parallel.model_copy(update={"data": None, "shard": None}), bigger.count, "zero3"
        )
        if estimate(one, config, described, batch, bigger).fits:
            return bigger.count
    return None


# -- before a run
def pick(
    config: Config,
    num_devices: int,
    device_memory_bytes: int | None = None,
    *,
    device_type: str | None = None,
) -> tuple[ParallelLayout, str]:
    """The layout that ``parallel.mode: auto`` takes, and why, for a person. Called before any rank
    exists.

    Most runs are far from the edge: where a bound from config.json or from the sizes in the
    weights' headers shows that ``ddp`` fits with room to spare, nothing is built or imported.

    Args:
        device_memory_bytes: of one device; None: asked of this machine.
        device_type: ``cpu``, ``cuda``…; None: as the config and the machine have it.

    Raises:
        ConfigError: nothing fits; says what is nearest and what to change.
    """
    plain = layout(config.parallel, num_devices, "ddp" if num_devices > 1 else "single")
    is_cpu = (device_type or _device_type(config)) == "cpu"
    memory = device_memory_bytes or (
        available_memory() // num_devices if is_cpu else _device_memory()
    )
    rough = at_most(config)
    if rough is not None and memory and rough <= _ROOMY * memory:
        return (
            plain,
            (
                f"{plain.strategy}: at most {human_bytes(rough)} a rank, and there are"
                f" {human_bytes(memory)}"
            ),
        )
    if not memory:
        return plain, f"{plain.strategy}: the memory of these devices is not known"
    try:
        described = describe(config)
    except ConfigError:
        if config.task in ("sft", "pretrain", "classify"):
            raise
        return plain, f"{plain.strategy}: what the model takes is not known before it is built"
    batch = micro_batch(config)
    machine = here(num_devices, is_cpu, config.train_args.mixed_dtype, memory)
    found = choose(config, described, batch, machine)
    if found.taken is not None:
        return found.taken.layout, found.why
    return _tight(config, found, batch, machine)


def _tight(
    config: Config, found: Choice, batch: Batch, machine: Machine
) -> tuple[ParallelLayout, str]:
    """Nothing fits by estimate: refuse what cannot run, and try what might."""
    open_to = [one for one in found.modes if one.cost is not None and eligible(one, machine.count)]
    nearest = min(open_to, key=lambda one: one.total, default=None)
    surely = (
        nearest is None
        or nearest.cost is None
        or (nearest.total if batch.known else nearest.cost.state) > machine.memory_bytes
    )
    if surely or nearest is None:
        raise ConfigError(
            f"`parallel.mode: auto`: {found.why}",
            fix=(
                "change one of these, or name a mode (`parallel.mode=zero3`) to try it all the"
                " same; see `paceline plan`"
            ),
        )
    return (
        nearest.layout,
        f"{nearest.name}, which takes the least, and it may not be enough: it {nearest.reason}",
    )


def here(
    num_devices: int, is_cpu: bool, dtype: str | None, memory_bytes: int | None = None
) -> Machine:
    """``num_devices`` of this machine's devices. ``dtype``: see :func:`named_machine`.

    Raises:
        ConfigError: an accelerator does not report its memory.
    """
    if is_cpu:
        return _with_profile(cpu_machine(num_devices, dtype, memory_bytes=memory_bytes), "cpu")
    from paceline.distributed.devices import accelerators

    kind, names = accelerators()
    memory = memory_bytes or _device_memory()
    name = names[0] if names else (kind or "accelerator")
    if not memory:
        raise ConfigError(
            f"the memory of {name} is not known: the device does not report it",
            fix=(
                "give it: `--device-memory 24GB`, and its kind if it is in the table: `--device"
                " NAME`"
            ),
        )
    known = recognize(name, memory)
    if known is None:
        machine = unknown_machine(name, memory, num_devices)
    else:
        machine = replace(named_machine(known, memory, num_devices, dtype), name=name)
    return _with_profile(machine, kind or "cpu")


def _with_profile(machine: Machine, device_type: str) -> Machine:
    """With the links as `paceline doctor` measured them here, where it did."""
    found = machine_profile.read(device_type)
    if found is None or found.bandwidth_bytes_s is None or machine.count == 1:
        return machine
    rate = human_bytes(found.bandwidth_bytes_s)
    note = (
        f"links: {rate}/s a rank, as `paceline doctor` measured on {found.day} with"
        f" {counted(found.num_ranks, 'rank')}"
    )
    return replace(machine, link_bytes_s=found.bandwidth_bytes_s, notes=(*machine.notes, note))


def _device_type(config: Config) -> str:
    if config.parallel.device != "auto":
        return config.parallel.device
    from paceline.distributed.devices import accelerators

    return accelerators()[0] or "cpu"


def _device_memory() -> int:
    """Bytes of the smallest accelerator of this host; 0 where it does not say."""
    import torch

    from paceline.distributed.devices import accelerators

    kind, names = accelerators()
    module: Any = getattr(torch, kind or "", None)
    try:
        return min(
            int(module.get_device_properties(index).total_memory) for index in range(len(names))
        )
    except (AttributeError, RuntimeError, ValueError):
        return 0

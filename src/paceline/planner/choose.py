"""Which mode ``auto`` takes: the fastest by estimate that fits, and quickly so where the plainest
is known to fit."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.core.processes import available_memory
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.registry import (
    OTHER_TRAINING,
    STRATEGIES,
    ParallelLayout,
    layout,
    mode_of,
)
from paceline.planner import machine_profile
from paceline.planner.advice import advise
from paceline.planner.devices import recognize
from paceline.planner.estimate import (
    MicroBatchProfile,
    ModeEstimate,
    estimate,
    free_layout,
    micro_batch,
)
from paceline.planner.hardware import Machine, cpu_machine, named_machine, unknown_machine
from paceline.planner.model_profile import ModelProfile, describe
from paceline.planner.upper_bound import upper_bound

#: Modes of one axis, in the order of preference where two are equally fast: the plainest first.
PLAIN = sorted(
    (name for name in STRATEGIES if name not in ("single", "hybrid", *OTHER_TRAINING)),
    key=lambda name: STRATEGIES[name].single_process,
)
#: Tensor parallelism talks in every layer; beyond a host's devices it does not pay.
_MOST_TENSOR = 8


#: Never taken by ``auto``: `dp` is there for comparison, and DeepSpeed does what the zero modes do.
NOT_CHOSEN = tuple(
    name for name, spec in STRATEGIES.items() if not spec.capabilities.chosen_by_auto
)
#: Of modes within this of the fastest the plainest is taken: an estimate tells no finer.
_EQUAL = 0.98
#: Share of the memory below which a rough upper bound is enough.
_ROOMY = 0.6


def candidates(config: Config, num_devices: int) -> list[ParallelLayout]:
    """Every layout for ``num_devices``: ``single`` first, the modes of one axis, then the hybrids
    by sizes of their axes.

    Sizes and mode that the config gives do not narrow the list; what they name is in it. Whether a
    model can be cut this way is the strategies' to say.
    """
    layouts = [ParallelLayout("single", ParallelDims(), 1)]
    if num_devices > 1:
        layouts += [free_layout(config, num_devices, name) for name in PLAIN]
        layouts += [ParallelLayout("hybrid", axes, num_devices) for axes in _hybrids(num_devices)]
    elif config.parallel.cpu_offload != "none":
        layouts += [free_layout(config, 1, name) for name in ("zero2", "zero3")]
    if mode_of(config.parallel) != "auto":
        with contextlib.suppress(ConfigError):
            named = layout(config.parallel, num_devices)
            layouts += [named] if named not in layouts else []
    return layouts


def configured(config: Config, num_devices: int) -> ParallelLayout | None:
    """Return the layout that the config itself names; None under ``auto``.

    Raises:
        ConfigError: its mode and sizes do not go together, or not with that many devices.
    """
    if mode_of(config.parallel) == "auto":
        return None
    return layout(config.parallel, num_devices)


def _hybrids(num_devices: int) -> Iterator[ParallelDims]:
    """Products of at least two axes. FSDP within hosts and replicas across (HSDP) is one of
    them."""
    for data in _divisors(num_devices):
        for shard in _divisors(num_devices // data):
            for tensor in _divisors(num_devices // data // shard):
                axes = ParallelDims(data, shard, tensor, num_devices // data // shard // tensor)
                if (
                    tensor <= _MOST_TENSOR
                    and sum(size > 1 for size in (data, shard, tensor, axes.pipeline)) > 1
                ):
                    yield axes


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@dataclass(frozen=True)
class ModeChoice:
    """All modes, and the one that ``auto`` takes; None where none fits."""

    modes: list[ModeEstimate]
    taken: ModeEstimate | None
    why: str


def all_modes(
    config: Config, described: ModelProfile, batch: MicroBatchProfile, machine: Machine
) -> list[ModeEstimate]:
    """Every layout for the machine, estimated; DeepSpeed by stage."""
    modes = []
    for candidate in candidates(config, machine.count):
        stages: Sequence[int | None] = (None,)
        if candidate.strategy == "deepspeed":
            stages = (1, 2, 3)
        modes += [
            estimate(candidate, config, described, batch, machine, stage=stage) for stage in stages
        ]
    return modes


def choose(
    config: Config, described: ModelProfile, batch: MicroBatchProfile, machine: Machine
) -> ModeChoice:
    """Estimate every mode and take one."""
    modes = all_modes(config, described, batch, machine)
    open_to = [mode for mode in modes if eligible(mode, machine.count)]
    fitting = [mode for mode in open_to if mode.fits]
    if not fitting:
        return ModeChoice(modes, None, nothing_fits(config, described, batch, machine, open_to))
    best = max(mode.per_second for mode in fitting)
    taken = min((mode for mode in fitting if mode.per_second >= _EQUAL * best), key=_plainness)
    memory = f"{human_bytes(taken.total)} of {human_bytes(machine.memory_bytes)} a rank"
    if len(fitting) == 1:
        why = f"{taken.name} is the only mode that fits: {memory}"
    else:
        why = f"{taken.name} is the fastest of {len(fitting)} modes that fit, by estimate: {memory}"
    for mode in open_to:
        if mode.layout.strategy == "ddp" and not mode.fits:
            why += f"; ddp {mode.reason}"
    return ModeChoice(modes, taken, why)


def eligible(mode: ModeEstimate, num_devices: int) -> bool:
    """Return whether ``auto`` may take the mode: it is possible and uses every device."""
    name = mode.layout.strategy
    if mode.cost is None or name in NOT_CHOSEN or ":" in name:
        return False
    return name != "single" or num_devices == 1


def _plainness(mode: ModeEstimate) -> tuple[int, int]:
    order = ("single", *PLAIN)
    name = mode.layout.strategy
    axes = mode.layout.axes
    return (order.index(name) if name in order else len(order), axes.tensor * axes.pipeline)


def nothing_fits(
    config: Config,
    described: ModelProfile,
    batch: MicroBatchProfile,
    machine: Machine,
    open_to: list[ModeEstimate],
) -> str:
    """Which mode is nearest, and what would make it fit: each cure is tried by estimate."""
    if not open_to:
        return "no mode can run this config on these devices; the reasons stand beside each"
    nearest = min(open_to, key=lambda mode: mode.total)
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
    config: Config, described: ModelProfile, batch: MicroBatchProfile, machine: Machine
) -> int | None:
    """The smallest number of devices, doubling, on which a mode fits as the config stands."""
    for factor in (2, 4, 8, 16):
        bigger = replace(machine, count=machine.count * factor)
        zero3 = free_layout(config, bigger.count, "zero3")
        if estimate(zero3, config, described, batch, bigger).fits:
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
    rough = upper_bound(config)
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
    machine = local_machine(num_devices, is_cpu, config.train_args.mixed_dtype, memory)
    choice = choose(config, described, batch, machine)
    if choice.taken is not None:
        return choice.taken.layout, choice.why
    nearest = _nearest(choice, batch, machine)
    return (
        nearest.layout,
        f"{nearest.name}, which takes the least, and it may not be enough: it {nearest.reason}",
    )


def _nearest(choice: ModeChoice, batch: MicroBatchProfile, machine: Machine) -> ModeEstimate:
    """Return the mode that takes the least, which may fit although the estimate says no.

    Raises:
        ConfigError: it surely does not fit.
    """
    open_to = [mode for mode in choice.modes if eligible(mode, machine.count)]
    nearest = min(open_to, key=lambda mode: mode.total, default=None)
    if nearest is not None and nearest.cost is not None:
        needed = nearest.total if batch.known else nearest.cost.state
        if needed <= machine.memory_bytes:
            return nearest
    raise ConfigError(
        f"`parallel.mode: auto`: {choice.why}",
        fix=(
            "change one of these, or name a mode (`parallel.mode=zero3`) to try it all the"
            " same; see `paceline plan`"
        ),
    )


def local_machine(
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
    profile = machine_profile.read(device_type)
    if profile is None or profile.bandwidth_bytes_s is None or machine.count == 1:
        return machine
    rate = human_bytes(profile.bandwidth_bytes_s)
    note = (
        f"links: {rate}/s a rank, as `paceline doctor` measured on {profile.day} with"
        f" {counted(profile.num_ranks, 'rank')}"
    )
    return replace(machine, link_bytes_s=profile.bandwidth_bytes_s, notes=(*machine.notes, note))


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

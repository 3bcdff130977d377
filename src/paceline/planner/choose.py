"""Choose the mode of ``parallel.mode: auto``: by estimate, the fastest that fits. If the simplest
mode certainly fits, nothing is estimated."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
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
from paceline.planner.estimate import ModeEstimate, estimate, free_layout
from paceline.planner.hardware import Machine, cpu_machine, named_machine, unknown_machine
from paceline.planner.micro_batch import MicroBatchProfile, micro_batch
from paceline.planner.model_profile import ModelProfile, describe
from paceline.planner.upper_bound import upper_bound

#: Modes with one axis, the simplest first: the order of preference if two are equally fast.
PLAIN = sorted(
    (name for name in STRATEGIES if name not in ("single", "hybrid", *OTHER_TRAINING)),
    key=lambda name: STRATEGIES[name].single_process,
)
#: Tensor parallelism communicates in every layer; across hosts it is too slow.
_MAX_TENSOR = 8
#: Never chosen by ``auto``: `dp` exists for comparison, and DeepSpeed does the same as zero1 to
#: zero3.
NOT_CHOSEN = tuple(
    name for name, spec in STRATEGIES.items() if not spec.capabilities.chosen_by_auto
)
#: Modes with at least this share of the fastest one's speed count as equally fast, because
#: estimates are not more accurate.
_EQUAL = 0.98
#: Below this share of the memory the rough upper bound is enough.
_ROOMY = 0.6


def candidates(config: Config, num_devices: int) -> list[ParallelLayout]:
    """Return every layout for ``num_devices``: ``single``, the modes of one axis, then the hybrids
    by the sizes of their axes.

    The config's own mode and sizes do not narrow the list, but are part of it. Whether a model can
    be divided in such a way is checked later, by the strategies.
    """
    layouts = [ParallelLayout("single", ParallelDims(), 1)]
    if num_devices > 1:
        layouts += [free_layout(config, num_devices, name) for name in PLAIN]
        layouts += [ParallelLayout("hybrid", axes, num_devices) for axes in _hybrids(num_devices)]
    elif config.parallel.state_offload != "none":
        layouts += [free_layout(config, 1, name) for name in ("zero2", "zero3")]
    if mode_of(config.parallel) != "auto":
        with contextlib.suppress(ConfigError):
            named = layout(config.parallel, num_devices)
            layouts += [named] if named not in layouts else []
    return layouts


def _hybrids(num_devices: int) -> Iterator[ParallelDims]:
    """Yield the products of at least two axes, including FSDP within hosts and replicas across
    hosts (HSDP)."""
    for data in _divisors(num_devices):
        for shard in _divisors(num_devices // data):
            for tensor in _divisors(num_devices // data // shard):
                axes = ParallelDims(data, shard, tensor, num_devices // data // shard // tensor)
                if (
                    tensor <= _MAX_TENSOR
                    and sum(size > 1 for size in (data, shard, tensor, axes.pipeline)) > 1
                ):
                    yield axes


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@dataclass(frozen=True)
class ModeChoice:
    """All modes, the one that ``auto`` chooses (None: nothing fits), and the reason."""

    modes: list[ModeEstimate]
    chosen: ModeEstimate | None
    why: str


def all_modes(
    config: Config, profile: ModelProfile, batch: MicroBatchProfile, machine: Machine
) -> list[ModeEstimate]:
    """Estimate every layout for the machine, and every stage of DeepSpeed."""
    modes = []
    for candidate in candidates(config, machine.count):
        stages: Sequence[int | None] = (None,)
        if candidate.strategy == "deepspeed":
            stages = (1, 2, 3)
        modes += [
            estimate(candidate, config, profile, batch, machine, stage=stage) for stage in stages
        ]
    return modes


def choose(
    config: Config, profile: ModelProfile, batch: MicroBatchProfile, machine: Machine
) -> ModeChoice:
    """Estimate every mode and choose one."""
    modes = all_modes(config, profile, batch, machine)
    possible = [mode for mode in modes if eligible(mode, machine.count)]
    fitting = [mode for mode in possible if mode.fits]
    if not fitting:
        return ModeChoice(modes, None, nothing_fits(config, profile, batch, machine, possible))
    best = max(mode.per_second for mode in fitting)
    chosen = min((mode for mode in fitting if mode.per_second >= _EQUAL * best), key=_complexity)
    memory = f"{human_bytes(chosen.total)} of {human_bytes(machine.memory_bytes)} per rank"
    if len(fitting) == 1:
        why = f"{chosen.name} is the only mode that fits: {memory}"
    else:
        why = (
            f"{chosen.name} is the fastest of {len(fitting)} modes that fit, by estimate: {memory}"
        )
    for mode in possible:
        if mode.layout.strategy == "ddp" and not mode.fits:
            why += f"; ddp {mode.reason}"
    return ModeChoice(modes, chosen, why)


def eligible(mode: ModeEstimate, num_devices: int) -> bool:
    """Return whether ``auto`` may choose the mode: it is possible and uses every device."""
    name = mode.layout.strategy
    if mode.cost is None or name in NOT_CHOSEN or ":" in name:
        return False
    return name != "single" or num_devices == 1


def _complexity(mode: ModeEstimate) -> tuple[int, int]:
    order = ("single", *PLAIN)
    name = mode.layout.strategy
    axes = mode.layout.axes
    return (order.index(name) if name in order else len(order), axes.tensor * axes.pipeline)


def nothing_fits(
    config: Config,
    profile: ModelProfile,
    batch: MicroBatchProfile,
    machine: Machine,
    possible: list[ModeEstimate],
) -> str:
    """Explain which mode needs the least memory and which changes would make it fit. Each change is
    estimated."""
    if not possible:
        return "no mode can run this config on these devices; the plan gives the reason for each"
    smallest = min(possible, key=lambda mode: mode.total)
    text = (
        f"no mode fits {counted(machine.count, 'device')}: {smallest.name} needs the least memory,"
        f" and {smallest.reason}"
    )
    change = advise(config, profile, batch, machine, smallest).smallest
    changes = [f"set {change.text}"] if change is not None else []
    if not config.lora.enable and config.task in CAUSAL_TASKS:
        changes.append("train adapters (`lora.enable=true`)")
    num_devices = _sufficient_devices(config, profile, batch, machine)
    changes += [f"use {num_devices} such devices"] if num_devices else []
    return text + (f". To make it fit: {'; or '.join(changes)}" if changes else "")


def _sufficient_devices(
    config: Config, profile: ModelProfile, batch: MicroBatchProfile, machine: Machine
) -> int | None:
    """Return on how many devices zero3 fits without a change of the config: 2, 4, 8 or 16 times as
    many; None if it does not."""
    for factor in (2, 4, 8, 16):
        bigger = replace(machine, count=machine.count * factor)
        zero3 = free_layout(config, bigger.count, "zero3")
        if estimate(zero3, config, profile, batch, bigger).fits:
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
    """Return the layout that ``parallel.mode: auto`` chooses, and the reason. Called before any
    rank exists.

    Most runs need far less memory than there is: if an upper bound from config.json or from the
    headers of the weights shows that ``ddp`` fits, no model is built and torch is not imported.

    Args:
        device_memory_bytes: of one device; None: of this machine's.
        device_type: ``cpu``, ``cuda``…; None: by the config and this machine.

    Raises:
        ConfigError: no mode fits; names the one that needs the least memory and what to change.
    """
    plain = layout(config.parallel, num_devices, "ddp" if num_devices > 1 else "single")
    is_cpu = (device_type or _device_type(config)) == "cpu"
    memory = device_memory_bytes or (
        available_memory() // num_devices if is_cpu else device_memory()
    )
    rough = upper_bound(config)
    if rough is not None and memory and rough <= _ROOMY * memory:
        return (
            plain,
            (
                f"{plain.strategy}: needs at most {human_bytes(rough)} of {human_bytes(memory)} per"
                " rank"
            ),
        )
    if not memory:
        return plain, f"{plain.strategy}: the memory of these devices is not known"
    try:
        profile = describe(config)
    except ConfigError:
        if config.task in (*CAUSAL_TASKS, "reward", "classify"):
            raise
        return plain, f"{plain.strategy}: the model's memory is not known before it is built"
    batch = micro_batch(config)
    machine = local_machine(num_devices, is_cpu, config.train_args.compute_format, memory)
    choice = choose(config, profile, batch, machine)
    if choice.chosen is not None:
        return choice.chosen.layout, choice.why
    possible = [mode for mode in choice.modes if eligible(mode, machine.count)]
    smallest = min(possible, key=lambda mode: mode.total, default=None)
    if smallest is not None and smallest.cost is not None:
        # Without token counts the activations are an upper bound, so only the state is certain.
        needed = smallest.total if batch.known else smallest.cost.state
        if needed <= machine.memory_bytes:
            return smallest.layout, (
                f"{smallest.name}, which needs the least memory but may not fit: it"
                f" {smallest.reason}"
            )
    raise ConfigError(
        f"`parallel.mode: auto`: {choice.why}",
        fix=(
            "make one of these changes, or set a mode (`parallel.mode=zero3`) to try it anyway;"
            " `paceline plan` shows all modes"
        ),
    )


def local_machine(
    num_devices: int, is_cpu: bool, dtype: str | None, memory_bytes: int | None = None
) -> Machine:
    """Return ``num_devices`` of this machine's devices. ``dtype``: see :func:`named_machine`.

    Raises:
        ConfigError: an accelerator does not report its memory.
    """
    if is_cpu:
        return _with_profile(cpu_machine(num_devices, dtype, memory_bytes=memory_bytes), "cpu")
    from paceline.distributed.devices import accelerators

    kind, names = accelerators()
    memory = memory_bytes or device_memory()
    name = names[0] if names else (kind or "accelerator")
    if not memory:
        raise ConfigError(
            f"{name} does not report its memory",
            fix=(
                "set it with `--device-memory 24GB`, or name the device if it is in the table:"
                " `--device NAME`"
            ),
        )
    known = recognize(name, memory)
    if known is None:
        machine = unknown_machine(name, memory, num_devices)
    else:
        machine = replace(named_machine(known, memory, num_devices, dtype), name=name)
    return _with_profile(machine, kind or "cpu")


def _with_profile(machine: Machine, device_type: str) -> Machine:
    """Return the machine with the link speed that `paceline doctor` measured here, if it did."""
    profile = machine_profile.read(device_type)
    if profile is None or profile.bandwidth_bytes_s is None or machine.count == 1:
        return machine
    rate = human_bytes(profile.bandwidth_bytes_s)
    note = (
        f"links: {rate}/s per rank, as `paceline doctor` measured on {profile.day} with"
        f" {counted(profile.num_ranks, 'rank')}"
    )
    measured = replace(machine, link_bytes_s=profile.bandwidth_bytes_s, link_is_measured=True)
    return measured.with_notes(note)


def _device_type(config: Config) -> str:
    if config.parallel.device != "auto":
        return config.parallel.device
    from paceline.distributed.devices import accelerators

    return accelerators()[0] or "cpu"


def device_memory() -> int:
    """Return the bytes of this host's smallest accelerator; 0 if it does not report them."""
    import torch

    from paceline.distributed.devices import accelerators

    kind, names = accelerators()
    if kind == "mps":  # shares the memory of the host
        return int(torch.mps.recommended_max_memory())
    module: Any = getattr(torch, kind or "", None)
    try:
        return min(
            int(module.get_device_properties(index).total_memory) for index in range(len(names))
        )
    except (AttributeError, RuntimeError, ValueError):
        return 0

"""Choose the mode of ``parallel.mode: auto``: by estimate, the fastest that fits. If the simplest
mode certainly fits, nothing is estimated."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from paceline.planner.advice import advise
from paceline.planner.devices import recognize
from paceline.planner.estimate import ModeEstimate, estimate, free_layout
from paceline.planner.hardware import Machine, cpu_machine, named_machine, unknown_machine
from paceline.planner.machine import profile as machine_profile
from paceline.planner.machine.calibration import read as read_calibration
from paceline.planner.machine.history import read_runs
from paceline.planner.micro_batch import MicroBatchProfile, micro_batch
from paceline.planner.model_profile import ModelProfile, describe
from paceline.planner.search.details import bucket_size, loader_processes
from paceline.planner.search.lossy import Proposal, proposals
from paceline.planner.search.reasons import comparison, reason_for
from paceline.planner.search.search import (
    Candidate,
    Objective,
    SearchResult,
    runners_up,
    search,
)
from paceline.planner.search.trials import (
    Setting,
    Settings,
    Trials,
    settings_text,
    with_settings,
)
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
#: Below this share of the memory the rough upper bound is enough.
_ROOMY = 0.6
#: About that of two Gigabit Ethernet ports. Links within a host are faster.
_SLOW_LINK_BYTES_S = 2.5e8


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
    """All modes, the one that ``auto`` chooses (None: nothing fits), and the reason.

    Args:
        modes: with the settings of the config.
        candidate: the chosen mode, with the settings that it needs.
        settings: all that ``auto`` sets, including the mode, by dotted key.
        smallest: what needs the least memory, if nothing fits.
        runners_up: the two best others.
        proposals: what would be better with another result.
        remarks: sentences about the runners-up, the settings and the proposals.
    """

    modes: list[ModeEstimate]
    candidate: Candidate | None
    why: str
    settings: Settings = field(default_factory=dict)
    smallest: Candidate | None = None
    runners_up: tuple[Candidate, ...] = ()
    proposals: tuple[Proposal, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def chosen(self) -> ModeEstimate | None:
        return None if self.candidate is None else self.candidate.mode


def all_modes(
    config: Config, profile: ModelProfile, batch: MicroBatchProfile, machine: Machine
) -> list[ModeEstimate]:
    """Estimate every layout for the machine, and every stage of DeepSpeed."""
    return _all_modes(Trials(config, profile, batch, machine))


def _all_modes(trials: Trials) -> list[ModeEstimate]:
    modes = []
    for candidate in candidates(trials.config, trials.machine.count):
        stages: Sequence[int | None] = (None,)
        if candidate.strategy == "deepspeed":
            stages = (1, 2, 3)
        modes += [trials.estimate(candidate, {}, stage) for stage in stages]
    return modes


def choose(
    config: Config,
    profile: ModelProfile,
    batch: MicroBatchProfile,
    machine: Machine,
    *,
    installed: bool = False,
) -> ModeChoice:
    """Estimate every mode, and choose one with the settings that the config leaves open.

    Args:
        installed: whether what is chosen must be installed: False for a plan.
    """
    trials = Trials(config, profile, batch, machine)
    modes = _all_modes(trials)
    layouts = eligible_layouts(config, machine.count)
    objective = config.parallel.optimize_for
    searched = _search(trials, layouts, objective)
    chosen = searched.chosen(objective)
    others = proposals(trials, layouts, chosen, objective, installed=installed)
    if config.parallel.allow_lossy and others:
        searched = replace(searched, fitting=[others[0].candidate, *searched.fitting])
        chosen = others[0].candidate
    if chosen is None:
        why = nothing_fits(trials, searched.smallest)
        return ModeChoice(
            modes,
            None,
            why,
            smallest=searched.smallest,
            proposals=tuple(others),
            remarks=_proposed(others, None, objective),
        )
    runners = tuple(runners_up(searched, chosen, objective))
    why = reason_for(chosen, searched.count, machine.memory_bytes, objective)
    for mode in modes:
        if mode.layout.strategy == "ddp" and mode.cost is not None and not mode.fits:
            why += f"; ddp {mode.reason}"
    details: dict[str, Setting] = {}
    if chosen.mode.layout.world_size < machine.count:
        details["parallel.num_gpus"] = chosen.mode.layout.world_size
    remarks = [f"next: {comparison(each, chosen, objective)}" for each in runners]
    tuned = with_settings(config, chosen.settings)
    for setting, reason in (
        bucket_size(tuned, chosen.mode, machine),
        loader_processes(tuned, chosen.mode.layout.num_processes, machine),
    ):
        details |= setting
        remarks += [f"{settings_text(setting)}: {reason}"] if setting else []
    if config.parallel.allow_lossy:
        remarks += [f"with another result: {each.effect}" for each in others[:1]]
        others = []
    return ModeChoice(
        modes,
        chosen,
        why,
        settings={**chosen.all_settings, **details},
        runners_up=runners,
        proposals=tuple(others),
        remarks=(*remarks, *_proposed(others, chosen, objective)),
    )


def _search(trials: Trials, layouts: list[ParallelLayout], objective: Objective) -> SearchResult:
    """Search with all devices; for the least cost also with fewer, if neither their number nor the
    batch size of a replica is fixed."""
    searched = search(trials, layouts, objective)
    config, machine = trials.config, trials.machine
    is_fixed = config.parallel.num_gpus != "auto" or config.parallel.hosts != (1, 1)
    if objective != "cost" or is_fixed or config.train_args.global_batch_size is None:
        return searched
    for count in _divisors(machine.count)[:-1]:
        fewer = trials.on(machine.with_count(count))
        part = search(fewer, eligible_layouts(config, count), objective)
        fitting = sorted([*searched.fitting, *part.fitting], key=lambda each: each.value(objective))
        searched = replace(searched, fitting=fitting, count=searched.count + part.count)
    return searched


def _proposed(
    others: Sequence[Proposal], chosen: Candidate | None, objective: Objective
) -> tuple[str, ...]:
    hint = "`parallel.allow_lossy=true` allows it"
    return tuple(
        f"proposed: {settings_text(each.settings)} ({each.effect}; {hint}): "
        + (
            f"{each.candidate.name} fits"
            if chosen is None
            else comparison(each.candidate, chosen, objective, is_simpler=False)
        )
        for each in others
    )


def eligible_layouts(config: Config, num_devices: int) -> list[ParallelLayout]:
    """Return the layouts that ``auto`` may choose: they use every device."""
    layouts = candidates(config, num_devices)
    if num_devices == 1 and "cpu_offload" not in config.parallel.model_fields_set:
        layouts.append(free_layout(config, 1, "zero3"))  # can offload the weights
    return [
        each
        for each in layouts
        if each.strategy not in NOT_CHOSEN
        and ":" not in each.strategy
        and (each.strategy != "single" or num_devices == 1)
    ]


def nothing_fits(trials: Trials, smallest: Candidate | None) -> str:
    """Explain which set-up needs the least memory and which changes would make it fit. Each change
    is estimated."""
    if smallest is None:
        return "no mode can run this config on these devices; the plan gives the reason for each"
    machine = trials.machine
    text = (
        f"no mode fits {counted(machine.count, 'device')}: {smallest.name} needs the least memory,"
        f" and {smallest.mode.reason}"
    )
    config = with_settings(trials.config, smallest.settings)
    profile, batch = trials.model(config), trials.batch(config)
    change = advise(config, profile, batch, machine, smallest.mode).smallest
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
@dataclass(frozen=True)
class AutoChoice:
    """What ``parallel.mode: auto`` chooses before a run: the layout, the settings of the config
    that differ (including the mode), the reason, and remarks about other set-ups."""

    layout: ParallelLayout
    settings: Settings
    why: str
    remarks: tuple[str, ...] = ()


def pick(
    config: Config,
    num_devices: int,
    device_memory_bytes: int | None = None,
    *,
    device_type: str | None = None,
) -> AutoChoice:
    """Return what ``parallel.mode: auto`` chooses. Called before any rank exists.

    Most runs need far less memory than there is: if an upper bound from config.json or from the
    headers of the weights shows that ``ddp`` fits, the config leaves nothing else open that could
    be faster, and `paceline doctor` found no slow link, no model is built and torch is not
    imported.

    Args:
        device_memory_bytes: of one device; None: of this machine's.
        device_type: ``cpu``, ``cuda``…; None: by the config and this machine.

    Raises:
        ConfigError: no mode fits; names the one that needs the least memory and what to change.
    """
    device_type = device_type or _device_type(config)
    is_cpu = device_type == "cpu"
    memory = device_memory_bytes or (
        available_memory() // num_devices if is_cpu else device_memory()
    )
    is_simple = _is_closed(config) and not (num_devices > 1 and _has_slow_link(device_type))
    rough = upper_bound(config) if is_simple else None
    if rough is not None and memory and rough <= _ROOMY * memory:
        return _plain(
            config,
            num_devices,
            f"needs at most {human_bytes(rough)} of {human_bytes(memory)} per rank",
        )
    if not memory:
        return _plain(config, num_devices, "the memory of these devices is not known")
    try:
        profile = describe(config)
    except ConfigError:
        if config.task in (*CAUSAL_TASKS, "reward", "classify"):
            raise
        text = "the model's memory is not known before it is built"
        return _plain(config, num_devices, text)
    batch = micro_batch(config)
    machine = local_machine(num_devices, is_cpu, config.train_args.compute_format, memory)
    choice = choose(config, profile, batch, machine, installed=True)
    if choice.chosen is not None:
        return AutoChoice(choice.chosen.layout, choice.settings, choice.why, choice.remarks)
    smallest = choice.smallest
    if smallest is not None and smallest.mode.cost is not None:
        # Without token counts the activations are an upper bound, so only the state is certain.
        needed = smallest.mode.total if batch.known else smallest.mode.cost.state
        if needed <= machine.memory_bytes:
            why = (
                f"{smallest.name}, which needs the least memory but may not fit: it"
                f" {smallest.mode.reason}"
            )
            return AutoChoice(smallest.mode.layout, smallest.all_settings, why, choice.remarks)
    raise ConfigError(
        f"`parallel.mode: auto`: {choice.why}",
        fix=(
            "make one of these changes, or set a mode (`parallel.mode=zero3`) to try it anyway;"
            " `paceline plan` shows all modes"
        ),
    )


def _is_closed(config: Config) -> bool:
    """Return whether no other set-up than ``ddp`` as configured needs to be compared: it is the
    simplest, and if all of the global batch of a replica fits into a micro-batch, the fastest."""
    args, parallel = config.train_args, config.parallel
    is_size_open = (
        args.global_batch_size is not None
        and "per_device_train_batch_size" not in args.model_fields_set
    )
    return parallel.optimize_for == "time" and not parallel.allow_lossy and not is_size_open


def _has_slow_link(device_type: str) -> bool:
    """Return whether `paceline doctor` measured a link here over which all gradients may take
    longer than the activations of a pipeline."""
    profile = machine_profile.read(device_type)
    bandwidth = None if profile is None or profile.link is None else profile.link.bandwidth_bytes_s
    return bandwidth is not None and bandwidth < _SLOW_LINK_BYTES_S


def _plain(config: Config, num_devices: int, reason: str) -> AutoChoice:
    """Return the simplest mode. `single` is not recorded as a setting, so that the run can resume
    from its own config on more devices."""
    name = "ddp" if num_devices > 1 else "single"
    chosen = layout(config.parallel, num_devices, name)
    settings: Settings = {"parallel.mode": name} if num_devices > 1 else {}
    return AutoChoice(chosen, settings, f"{name}: {reason}")


def local_machine(
    num_devices: int, is_cpu: bool, dtype: str | None, memory_bytes: int | None = None
) -> Machine:
    """Return ``num_devices`` of this machine's devices. ``dtype``: see :func:`named_machine`.

    Raises:
        ConfigError: an accelerator does not report its memory.
    """
    if is_cpu:
        profile = machine_profile.read("cpu")
        measure = profile is None or not profile.rates
        machine = cpu_machine(num_devices, dtype, measure=measure, memory_bytes=memory_bytes)
        return _with_profile(machine, "cpu")
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
    """Return the machine with the rates and links that `paceline doctor` measured here, if it
    did, with the calibration, and with the earlier runs on it."""
    machine = _with_runs(machine, device_type)
    profile = machine_profile.read(device_type)
    if profile is None:
        return machine
    if profile.rates:
        note = f"rates: as `paceline doctor` measured on {profile.day}"
        machine = replace(machine, rates=profile.rates).with_notes(note)
    link = profile.link
    if link is None or link.bandwidth_bytes_s is None or machine.count == 1:
        return machine
    note = (
        f"links: {human_bytes(link.bandwidth_bytes_s)}/s per rank, as `paceline doctor` measured on"
        f" {profile.day} with {counted(link.num_ranks, 'rank')}"
    )
    return machine.with_link(link).with_notes(note)


def _with_runs(machine: Machine, device_type: str) -> Machine:
    calibration = read_calibration(device_type)
    runs = read_runs(device_type)
    if calibration is not None:
        note = (
            f"calibration: fitted to {counted(len(calibration.runs), 'run')} on {calibration.day}"
            " by `--calibrate`"
        )
        machine = replace(machine, calibration=calibration).with_notes(note)
    if runs:
        latest = runs[-1]
        note = (
            f"history: {counted(len(runs), 'run')} on this machine, of which those of the same"
            " model correct the times; the latest,"
            f" {latest.strategy} of {latest.model} in {latest.output_dir}, took"
            f" {latest.factor:.2f} × the predicted time (`--no-history` ignores them)"
        )
        machine = replace(machine, history=runs).with_notes(note)
    return machine


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

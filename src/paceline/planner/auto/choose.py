"""Choose the mode of ``parallel.mode: auto``: by estimate, the fastest that fits."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.texts import UserText
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.limits.context import CONTEXT_TASKS
from paceline.parallel.registry import (
    OTHER_TRAINING,
    STRATEGIES,
    ParallelLayout,
    get_spec,
    layout,
    mode_of,
)
from paceline.planner.estimate import ModeEstimate, estimate, free_layout
from paceline.planner.machine.hardware import Machine
from paceline.planner.micro_batch import MicroBatchProfile
from paceline.planner.model_profile import ModelProfile
from paceline.planner.search.advice import advise
from paceline.planner.search.details import loader_processes
from paceline.planner.search.lossy import Proposal, proposals
from paceline.planner.search.reasons import bucket_reason, comparison, next_text, reason_for
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
        if config.task in CONTEXT_TASKS:
            layouts += [
                ParallelLayout("hybrid", axes, num_devices) for axes in _divided(num_devices)
            ]
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


def _divided(num_devices: int) -> Iterator[ParallelDims]:
    """Yield the products in which ranks divide rows, with replicas or with shards of the state."""
    for context in _divisors(num_devices)[1:-1]:
        yield ParallelDims(data=num_devices // context, context=context)
    for context in _divisors(num_devices)[1:-1]:
        yield ParallelDims(shard=num_devices // context, context=context)


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
        stages: Sequence[int | None] = get_spec(candidate.strategy).variants or (None,)
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
    why = reason_for(chosen, searched, machine.memory_bytes, objective)
    for mode in modes:
        if mode.layout.strategy == "ddp" and mode.cost is not None and not mode.fits:
            of_ddp = f"; ddp {mode.reason}"
            why = UserText.of(f"{why}{of_ddp}", why.code, why.values)
    details: dict[str, Setting] = {}
    if chosen.mode.layout.world_size < machine.count:
        details["parallel.num_gpus"] = chosen.mode.layout.world_size
    remarks = [next_text(each, chosen, objective) for each in runners]
    tuned = with_settings(config, chosen.settings)
    if chosen.buckets:
        default = trials.estimate(chosen.mode.layout, chosen.settings)
        remarks.append(bucket_reason(chosen, default))
    setting, reason = loader_processes(tuned, chosen.mode.layout.num_processes, machine)
    if setting:
        details |= setting
        remarks.append(
            UserText(
                "{settings}: {reason}",
                code="loader-processes-chosen",
                settings=settings_text(setting),
                reason=reason,
            )
        )
    if config.parallel.allow_lossy:
        remarks += [
            UserText(
                "with another result: {effect}", code="with-another-result", effect=each.effect
            )
            for each in others[:1]
        ]
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
    return tuple(
        UserText(
            "proposed: {settings} ({effect}; `parallel.allow_lossy=true` allows it): {gain}",
            code="lossy-settings-proposed",
            settings=settings_text(each.settings),
            effect=each.effect,
            gain=UserText("{name} fits", code="candidate-fits", name=each.candidate.name)
            if chosen is None
            else comparison(each.candidate, chosen, objective, is_simpler=False),
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


def nothing_fits(trials: Trials, smallest: Candidate | None) -> UserText:
    """Explain which set-up needs the least memory and which changes would make it fit. Each change
    is estimated."""
    if smallest is None:
        return UserText(
            "no mode can run this config on these devices; the plan gives the reason for each",
            code="no-possible-mode",
        )
    machine = trials.machine
    config = with_settings(trials.config, smallest.settings)
    profile, batch = trials.model(config), trials.batch(config)
    change = advise(config, profile, batch, machine, smallest.mode).smallest
    changes = [f"set {change.text}"] if change is not None else []
    if not config.lora.enable and config.task in CAUSAL_TASKS:
        changes.append("train adapters (`lora.enable=true`)")
    num_devices = _sufficient_devices(config, profile, batch, machine)
    changes += [f"use {num_devices} such devices"] if num_devices else []
    return UserText(
        "no mode fits {count:device}: {name} needs the least memory, and {reason}{advice}",
        code="nothing-fits",
        count=machine.count,
        name=smallest.name,
        reason=smallest.mode.reason,
        needed=human_bytes(smallest.mode.total),
        memory=human_bytes(machine.memory_bytes),
        advice=f". To make it fit: {'; or '.join(changes)}" if changes else "",
        change="" if change is None else change.text,
    )


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

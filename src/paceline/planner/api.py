"""``paceline plan`` and ``paceline.plan()``: the estimates of every mode for a config."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypedDict, cast

from paceline.config.chosen import open_settings, read_chosen
from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError, ErrorRecord
from paceline.core.processes import available_memory
from paceline.core.run_dir import RunDir
from paceline.core.texts import UserText, with_translations
from paceline.data.context.rows import divide_row
from paceline.distributed.devices import (
    accelerators,
    choose_devices,
    resolve,
    without_idle_offload,
)
from paceline.models.context.choice import method_of_run
from paceline.models.context.methods import ULYSSES
from paceline.models.files import fit_to_model
from paceline.models.transforms.float8_check import check_float8
from paceline.parallel.registry import ParallelLayout, get_spec, layout, mode_of, uses_one_device
from paceline.planner.auto.choose import ModeChoice, choose, eligible_layouts
from paceline.planner.devices import find_device
from paceline.planner.estimate import ModeEstimate, ModeReport
from paceline.planner.machine.hardware import Machine, default_precision, named_machine, parse_size
from paceline.planner.machine.local import local_machine, smallest_device_memory
from paceline.planner.micro_batch import MicroBatchProfile, micro_batch
from paceline.planner.model_profile import ModelProfile, describe
from paceline.planner.run_estimate import RunEstimate, rollout_notes, run_estimate
from paceline.planner.scale.goodput import FailureModel, Goodput
from paceline.planner.search.advice import Advice, ChangeReport, advise
from paceline.planner.search.fit import FROM_HISTORY, KeptSettings, MemoryFit, fit_memory
from paceline.planner.search.machines import Offer, cheapest_machines
from paceline.planner.search.memory_history import memory_key, recall
from paceline.planner.search.options import SearchOptions, parse_options
from paceline.planner.search.reports import (
    OfferReport,
    ProposalReport,
    SetupReport,
    offer_report,
    proposal_report,
    setup_report,
)
from paceline.planner.search.save_interval import goodput_on
from paceline.planner.search.search import Candidate, pareto_front
from paceline.planner.search.trials import Settings, Trials, settings_text, with_settings
from paceline.tasks import load_task

_MAX_DEVICES = 65536


class PlanReport(TypedDict):
    """The JSON of a plan. ``layout_error``: the record of the error in the layout that the config
    names."""

    run: RunEstimate
    world_size: int
    device_memory_bytes: int
    parameters: int
    trainable_parameters: int
    chosen: str | None
    why: str
    configured: str | None
    changes: list[ChangeReport] | None
    smallest_change: ChangeReport | None
    precision: str
    layout_error: ErrorRecord | None
    device: str
    tokens_per_micro_batch: float | None
    notes: list[str]
    modes: list[ModeReport]
    choice: SetupReport | None
    runners_up: list[SetupReport]
    proposals: list[ProposalReport]
    remarks: list[str]
    pareto: list[SetupReport] | None
    machines: list[OfferReport] | None
    goodput: dict[str, float] | None


@dataclass(frozen=True)
class Plan:
    """The result of :func:`make_plan`.

    Args:
        occupied_bytes: memory of a device of this machine that other processes hold.
        host_memory_bytes: free host memory of a rank on this machine; None for another machine.
        uses_history: whether earlier runs on this machine count.
    """

    config: Config
    machine: Machine
    profile: ModelProfile
    batch: MicroBatchProfile
    choice: ModeChoice
    options: SearchOptions = field(default_factory=SearchOptions)
    occupied_bytes: int = 0
    host_memory_bytes: int | None = None
    uses_history: bool = True

    @cached_property
    def front(self) -> list[Candidate] | None:
        """The set-ups that no other beats in both time and memory; None without ``--search``."""
        if not self.options.lists_front:
            return None
        trials = Trials(self.config, self.profile, self.batch, self.machine)
        return pareto_front(trials, eligible_layouts(self.config, self.machine.count))

    @cached_property
    def samples(self) -> int:
        """Samples of the whole run, with the global batch of this plan.

        Raises:
            ConfigError: the number of steps is not known.
        """
        args = self.config.train_args
        if args.max_steps is not None:
            return args.max_steps * self.global_batch_size
        if self.batch.num_rows is None:
            raise ConfigError(
                "the length of the run is not known: the data is not tokenized yet",
                code="unknown-run-length",
                fix="set `train_args.max_steps`, or run `paceline sft … --dry-run` once",
            )
        return round(args.num_train_epochs * self.batch.num_rows)

    @property
    def global_batch_size(self) -> int:
        """The global batch size of the config, else of the chosen mode."""
        mode = self.configured or self.choice.chosen
        args = self.config.train_args
        default = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return args.global_batch_size or (mode.global_batch_size if mode else 0) or default

    @cached_property
    def machines(self) -> list[Offer] | None:
        """The cheapest machines that finish the run in time; None without a deadline or a price.

        Raises:
            ConfigError: the number of steps is not known.
        """
        if not self.options.compares_machines:
            return None
        batch = {"train_args.global_batch_size": self.global_batch_size}
        trials = Trials(self.config, self.profile, self.batch, self.machine)
        trials = trials.with_config(with_settings(self.config, batch))
        layouts = partial(eligible_layouts, self.config)
        return cheapest_machines(trials, layouts, self.samples, self.options)

    @cached_property
    def goodput(self) -> Goodput | None:
        """The progress despite failures; None without ``recovery.mtbf_hours``."""
        hours, options = self.config.recovery.mtbf_hours, self.options
        if hours is None:
            return None
        failures = FailureModel(hours, options.storage_bytes_s, options.restart_s)
        return goodput_on(failures, self.config, self.profile.shape, self.machine)

    @property
    def parameters(self) -> int:
        return self.profile.shape.num_parameters

    @property
    def trained(self) -> int:
        return sum(tensor.numel for tensor in self.profile.shape.trained)

    @property
    def configured(self) -> ModeEstimate | None:
        """The mode that the config sets; None under ``auto``, or if its layout is invalid."""
        parallel = self.config.parallel
        if mode_of(parallel) == "auto" or self.layout_error is not None:
            return None
        configured = layout(parallel, self.machine.count)
        stage = get_spec(configured.strategy).variant(self.config)
        for mode in self.choice.modes:
            if mode.layout == configured and mode.settings.get("deepspeed_stage") == stage:
                return mode
        return None

    @cached_property
    def memory_fit(self) -> MemoryFit | None:
        """The memory settings with which the configured mode runs; None if no mode is configured,
        or if its memory is not predicted."""
        mode = self.configured
        if mode is None or mode.cost is None:
            return None
        stage = mode.settings.get("deepspeed_stage")
        trials = Trials(self.config, self.profile, self.batch, self.free_machine)
        return fit_memory(
            trials,
            mode.layout,
            stage if isinstance(stage, int) else None,
            kept=self._known_settings(mode.layout),
            host_memory_bytes=self.host_memory_bytes,
        )

    def _known_settings(self, layout_: ParallelLayout) -> KeptSettings:
        """Return the open settings of the run in the output folder, or else those with which an
        earlier run of this kind was completed."""
        is_open = open_settings(self.config, is_cpu=self.machine.is_cpu)
        file = RunDir(Path(self.config.output_dir)).config
        stored = read_chosen(file) if self.config.resume == "auto" and file.is_file() else {}
        if known := {key: value for key, value in stored.items() if key in is_open}:
            return KeptSettings(known)
        if not self.uses_history:
            return KeptSettings()
        settings = recall(memory_key(self.config, layout_, self.machine.name))
        return KeptSettings(
            {key: value for key, value in settings.items() if key in is_open}, FROM_HISTORY
        )

    @property
    def free_machine(self) -> Machine:
        """The machine with the memory that other processes leave."""
        if not self.occupied_bytes:
            return self.machine
        return self.machine.with_budget(self.machine.memory_bytes - self.occupied_bytes)

    @property
    def run_mode(self) -> ModeEstimate | None:
        """What runs on this file: the mode with the settings that are chosen for it; None if
        nothing can run."""
        if self.layout_error is not None:
            return None
        if self.memory_fit is not None:
            return self.memory_fit.mode
        return self.configured or self.choice.chosen

    @property
    def run_settings(self) -> Settings:
        """The settings that are chosen for the run, by dotted key."""
        if self.memory_fit is not None:
            return self.memory_fit.settings
        return {} if self.configured is not None else self.choice.settings

    @cached_property
    def advice(self) -> Advice | None:
        """Changes that make the configured mode fit; None if it fits, is not possible, or none is
        configured."""
        mode = self.configured
        if mode is None or mode.fits or mode.cost is None:
            return None
        return advise(self.config, self.profile, self.batch, self.machine, mode)

    @cached_property
    def layout_error(self) -> ConfigError | None:
        """Why the configured mode and sizes contradict each other or the number of devices."""
        try:
            if mode_of(self.config.parallel) != "auto":
                layout(self.config.parallel, self.machine.count)
        except ConfigError as error:
            return error
        return None

    def notes(self) -> list[str]:
        """Return the assumptions behind the estimates, one sentence each."""
        notes = [self.batch.text(), *self.machine.notes, *self.profile.notes]
        notes += self.profile.kernel_texts(self.config, "cpu" if self.machine.is_cpu else "cuda")
        notes += self._context_notes()
        notes += rollout_notes(self.run_mode)
        fit = self.memory_fit
        if fit is not None and fit.kept is not None and fit.settings:
            text = f"memory: {settings_text(fit.settings)}, {fit.kept}"
            is_history = fit.kept == FROM_HISTORY
            notes.append(text + (" (`--no-history` ignores it)" if is_history else ""))
        return notes

    def _context_notes(self) -> list[str]:
        """Return how the ranks that divide rows exchange keys and values, if the run has such."""
        mode = self.run_mode
        if mode is None or mode.cost is None or mode.layout.axes.context == 1:
            return []
        device_type = "cpu" if self.machine.is_cpu else "cuda"
        method = method_of_run(self.config, mode.layout.axes, device_type)
        text = UserText(
            "context: keys and values are exchanged by `{method}` ({why})",
            code="context-planned",
            method=method.name,
            why=method.why,
        )
        if method.name == ULYSSES or not self.batch.lengths:
            return [text]
        division = divide_row(self.batch.lengths, mode.layout.axes.context)
        pairs = [division.num_pairs(rank) for rank in range(division.size)]
        balance = UserText(
            "context: of the fullest row, the rank with the most (query, key) pairs has {share}"
            " times the mean",
            code="context-balance",
            share=f"{max(pairs) * len(pairs) / sum(pairs):.2f}",
        )
        return [text, balance]

    def as_dict(self) -> PlanReport:
        """Return the value that ``--json`` prints."""
        chosen, configured, advice = self.choice.chosen, self.configured, self.advice
        smallest = None if advice is None else advice.smallest
        count, error, candidate = self.machine.count, self.layout_error, self.choice.candidate
        report = PlanReport(
            run=run_estimate(self.run_mode, self.run_settings),
            world_size=count,
            device_memory_bytes=self.machine.memory_bytes,
            parameters=self.parameters,
            trainable_parameters=self.trained,
            chosen=None if chosen is None else chosen.name,
            why=self.choice.why,
            configured=None if configured is None else configured.name,
            changes=(
                None if advice is None else [change.as_dict(count) for change in advice.single]
            ),
            smallest_change=None if smallest is None else smallest.as_dict(count),
            precision=self.config.train_args.precision,
            layout_error=(None if error is None else error.record()),
            device=self.machine.name,
            tokens_per_micro_batch=self.batch.positions if self.batch.has_tokens else None,
            notes=self.notes(),
            modes=[mode.as_dict() for mode in self.choice.modes],
            choice=None if candidate is None else self._chosen_report(candidate),
            runners_up=[setup_report(each) for each in self.choice.runners_up],
            proposals=[proposal_report(each) for each in self.choice.proposals],
            remarks=list(self.choice.remarks),
            pareto=None if self.front is None else [setup_report(each) for each in self.front],
            machines=(
                None
                if self.machines is None
                else [offer_report(each, self.options.has_prices) for each in self.machines]
            ),
            goodput=None if self.goodput is None else asdict(self.goodput),
        )
        return cast(PlanReport, with_translations(report))

    def _chosen_report(self, candidate: Candidate) -> SetupReport:
        return {**setup_report(candidate), "settings": dict(self.choice.settings)}


def plan(
    config: str | Path | Mapping[str, YamlValue],
    *,
    world_size: int | None = None,
    device_memory: str | int | None = None,
    device: str | None = None,
    uses_history: bool = True,
    search: bool = False,
    budget: str | None = None,
    deadline: str | None = None,
    price: Sequence[str | float] = (),
    network: str | None = None,
    storage: str = "2GB",
    restart_time: str = "2min",
    **overrides: YamlValue,
) -> PlanReport:
    """Estimate memory, traffic and time of a run under every mode, as ``paceline plan CONFIG
    --json`` prints them.

    Args:
        config: path of a config file, or its content as a mapping.
        world_size: number of devices, one rank each; default: the number of this machine's devices.
        device_memory: memory of one device, in bytes or as text with a unit (``"24GB"``).
        device: name of a device (``"A100-80GB"``) instead of this machine's.
        uses_history: whether earlier runs on this machine correct the times; False:
            ``--no-history``.
        search, budget, deadline, price, network, storage, restart_time: as the options of the
            command with these names.
        overrides: further keys of the config; dotted ones as ``**{"train_args.precision":
            "bf16-mixed"}``.

    Raises:
        ConfigError: the config, the model or an argument is wrong.
    """
    loaded = (
        load_config(None, {**config, **overrides})
        if isinstance(config, Mapping)
        else load_config(config, overrides)
    )
    fitted = fit_to_model(loaded).config
    prices = map(str, price)
    options = parse_options(search, budget, deadline, prices, network, storage, restart_time)
    planned = make_plan(
        fitted, world_size, device_memory, device, options, uses_history=uses_history
    )
    return planned.as_dict()


def make_plan(
    config: Config,
    world_size: int | None = None,
    device_memory: str | int | None = None,
    device: str | None = None,
    options: SearchOptions | None = None,
    *,
    uses_history: bool = True,
) -> Plan:
    """Do the same as :func:`plan`, but return an object."""
    options = options or SearchOptions()
    if world_size is not None and not 1 <= world_size <= _MAX_DEVICES:
        raise ConfigError(
            "`--world-size {world_size}` is out of range",
            code="world-size-out-of-range",
            allowed="an integer between 1 and {max_devices}",
            world_size=world_size,
            max_devices=f"{_MAX_DEVICES:,}",
        )
    memory = parse_size(device_memory) if isinstance(device_memory, str) else device_memory
    if config.task not in (*CAUSAL_TASKS, "reward", "classify"):
        load_task(config)  # report a missing task before measuring anything
    machine = _machine(config, world_size, memory, device)
    if config.train_args.precision == "auto":
        kind, names = accelerators()
        if device is not None or memory is not None:
            precision, reason = default_precision(machine)
        elif machine.is_cpu or kind is None:
            precision, reason = resolve("cpu")
        else:
            precision, reason = resolve(kind, names[: machine.count])
        config = config.model_copy(
            update={"train_args": config.train_args.with_derived({"precision": precision})}
        )
        if precision != "32":
            machine = _machine(config, world_size, memory, device)
        machine = machine.with_notes(
            f"precision: {precision}, chosen by `precision: auto`: {reason}"
        )
    machine = machine if uses_history else machine.without_history()
    parallel, notices = without_idle_offload(config.parallel, "cpu" if machine.is_cpu else "")
    config = config.model_copy(update={"parallel": parallel})
    machine = machine.with_notes(*(text for _, text in notices))
    if machine.is_cpu or machine.device is not None:
        capability = None if machine.device is None else machine.device.compute_capability
        check_float8(config, "cpu" if machine.is_cpu else "cuda", capability, installed=False)
    machine = machine.with_budget(options.budget_bytes)
    if options.network is not None:
        machine = replace(machine, network=options.network).with_notes(options.network.text())
    profile = describe(config)
    batch = micro_batch(config)
    choice = choose(config, profile, batch, machine)
    is_local = device is None and memory is None and not machine.is_cpu
    num_devices = min(machine.count, len(accelerators()[1])) if is_local else 0
    free = smallest_device_memory(num_devices) if num_devices else None
    occupied_bytes = 0 if free is None else free.occupied_bytes
    return Plan(
        config,
        machine,
        profile,
        batch,
        choice,
        options,
        occupied_bytes,
        available_memory() // num_devices if num_devices else None,
        uses_history,
    )


def _machine(
    config: Config, world_size: int | None, memory: int | None, device: str | None
) -> Machine:
    dtype = config.train_args.compute_format
    num_gpus = config.parallel.num_gpus
    if device is not None or memory is not None:
        count = world_size or (num_gpus if num_gpus != "auto" else 1)
        if device is None and config.parallel.device == "cpu":
            return local_machine(count, True, dtype, memory)
        named, notice = (None, "") if device is None else find_device(device, memory)
        return named_machine(named, memory, count, dtype, (notice,) if notice else ())
    update = {} if world_size is None else {"num_gpus": "auto"}
    try:
        devices = choose_devices(
            config.parallel.model_copy(update=update),
            single_device=uses_one_device(config.parallel),
        )
    except ConfigError as error:
        raise ConfigError(
            "{reason}",
            code="no-device-to-plan-for",
            reason=error.what,
            allowed=error.allowed,
            fix="to plan for another machine, name its devices: `--world-size 8 --device"
            " A100-80GB`",
        ) from error
    count = world_size or devices.count
    machine = local_machine(count, devices.type == "cpu", dtype)
    if devices.type != "cpu" and count > devices.count:
        machine = machine.with_notes(
            f"this machine has {devices.count} of the {count} devices of this plan"
        )
    return machine

"""``paceline plan`` and ``paceline.planner``: from a config to every mode's estimate."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import ConfigError
from paceline.distributed.devices import (
    accelerators,
    choose_devices,
    resolve,
    without_idle_offload,
)
from paceline.models.positions import fit_length
from paceline.parallel.deepspeed.config import stage_of
from paceline.planner.advice import Advice, ChangeReport, advise
from paceline.planner.choose import ModeChoice, choose, configured, local_machine
from paceline.planner.devices import find_device
from paceline.planner.estimate import MicroBatchProfile, ModeEstimate, ModeReport, micro_batch
from paceline.planner.hardware import Machine, named_machine, parse_size
from paceline.planner.model_profile import ModelProfile, describe
from paceline.tasks import load_task

MOST_DEVICES = 65536


class PlanReport(TypedDict):
    """The JSON of a plan. ``layout_error``: ``what``, ``allowed`` and ``fix`` of the error in the
    layout that the config names."""

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
    layout_error: dict[str, str | None] | None
    device: str
    tokens_per_micro_batch: float | None
    notes: list[str]
    modes: list[ModeReport]


@dataclass(frozen=True)
class Plan:
    """What :func:`make_plan` found."""

    config: Config
    machine: Machine
    described: ModelProfile
    batch: MicroBatchProfile
    choice: ModeChoice

    @property
    def parameters(self) -> int:
        return sum(tensor.numel for tensor in self.described.shape.parameters)

    @property
    def trained(self) -> int:
        return sum(tensor.numel for tensor in self.described.shape.trained)

    @property
    def configured(self) -> ModeEstimate | None:
        """The mode that the config names; None under ``auto``."""
        if self.layout_error is not None:
            return None
        named = configured(self.config, self.machine.count)
        is_staged = named is not None and named.strategy == "deepspeed"
        stage = stage_of(self.config.parallel) if is_staged else None
        for mode in self.choice.modes:
            if mode.layout == named and mode.settings.get("deepspeed_stage") == stage:
                return mode
        return None

    @cached_property
    def advice(self) -> Advice | None:
        """What makes the mode that the config names fit; None if it fits, cannot be laid out, or
        none is named."""
        mode = self.configured
        if mode is None or mode.fits or mode.cost is None:
            return None
        return advise(self.config, self.described, self.batch, self.machine, mode)

    @cached_property
    def layout_error(self) -> ConfigError | None:
        """Why the config's own mode and sizes do not go together, or not with that many devices."""
        try:
            configured(self.config, self.machine.count)
        except ConfigError as error:
            return error
        return None

    def notes(self) -> list[str]:
        """What the figures rest on, one sentence each."""
        return [self.batch.text(), *self.machine.notes, *self.described.notes]

    def as_dict(self) -> PlanReport:
        """The value that ``--json`` prints."""
        taken, named, advice = self.choice.taken, self.configured, self.advice
        smallest = None if advice is None else advice.smallest
        count, error = self.machine.count, self.layout_error
        return PlanReport(
            world_size=count,
            device_memory_bytes=self.machine.memory_bytes,
            parameters=self.parameters,
            trainable_parameters=self.trained,
            chosen=None if taken is None else taken.name,
            why=self.choice.why,
            configured=None if named is None else named.name,
            changes=(
                None if advice is None else [change.as_dict(count) for change in advice.single]
            ),
            smallest_change=None if smallest is None else smallest.as_dict(count),
            precision=self.config.train_args.precision,
            layout_error=(
                None
                if error is None
                else {"what": error.what, "allowed": error.allowed, "fix": error.fix}
            ),
            device=self.machine.name,
            tokens_per_micro_batch=self.batch.positions if self.batch.has_tokens else None,
            notes=self.notes(),
            modes=[mode.as_dict() for mode in self.choice.modes],
        )


def plan(
    config: str | Path | Mapping[str, YamlValue],
    *,
    world_size: int | None = None,
    device_memory: str | int | None = None,
    device: str | None = None,
    **overrides: YamlValue,
) -> PlanReport:
    """Memory, traffic and time of a run under every mode, as ``paceline plan CONFIG --json`` prints
    them.

    Args:
        config: path of a config file, or its content as a mapping.
        world_size: devices, one rank each; by default those of this machine.
        device_memory: of one device, in bytes or as text with a unit (``"24GB"``).
        device: a kind of device by name (``"A100-80GB"``) instead of this machine's.
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
    return make_plan(fit_length(loaded).config, world_size, device_memory, device).as_dict()


def make_plan(
    config: Config,
    world_size: int | None = None,
    device_memory: str | int | None = None,
    device: str | None = None,
) -> Plan:
    """As :func:`plan`, as an object."""
    if world_size is not None and not 1 <= world_size <= MOST_DEVICES:
        raise ConfigError(
            f"`--world-size {world_size}` is no number of devices", allowed=f"1 to {MOST_DEVICES:,}"
        )
    memory = parse_size(device_memory) if isinstance(device_memory, str) else device_memory
    if config.task not in ("sft", "pretrain", "classify"):
        load_task(config)  # a task that cannot be had is an error before anything is measured
    machine = _machine(config, world_size, memory, device)
    if config.train_args.precision == "auto":
        kind, names = accelerators()
        if device is not None or memory is not None:
            precision, reason = _precision_on(machine)
        elif machine.is_cpu or kind is None:
            precision, reason = resolve("cpu")
        else:
            precision, reason = resolve(kind, names[: machine.count])
        config = config.model_copy(
            update={"train_args": config.train_args.model_copy(update={"precision": precision})}
        )
        if precision != "32":
            machine = _machine(config, world_size, memory, device)
        machine = replace(
            machine,
            notes=(
                *machine.notes,
                f"precision: {precision}, chosen by `precision: auto`: {reason}",
            ),
        )
    parallel, notices = without_idle_offload(config.parallel, "cpu" if machine.is_cpu else "")
    config = config.model_copy(update={"parallel": parallel})
    machine = replace(machine, notes=(*machine.notes, *(text for _, text in notices)))
    described = describe(config)
    batch = micro_batch(config)
    return Plan(config, machine, described, batch, choose(config, described, batch, machine))


def _precision_on(machine: Machine) -> tuple[str, str]:
    """What ``precision: auto`` is on devices of the table, and why."""
    if machine.is_cpu:
        return "32", "float32 on a CPU"
    if machine.device is None:
        return "32", f"whether {machine.name} supports bfloat16 is not known"
    if machine.name_is_assumed:
        return "bf16-mixed", "no device is named, and most accelerators support bfloat16"
    if machine.device.supports_bfloat16:
        return "bf16-mixed", f"bfloat16 is supported by {machine.device.name}"
    return "fp16-mixed", f"bfloat16 is not supported by {machine.device.name}"


def _machine(
    config: Config, world_size: int | None, memory: int | None, device: str | None
) -> Machine:
    dtype = config.train_args.mixed_dtype
    wanted = config.parallel.num_gpus
    if device is not None or memory is not None:
        count = world_size or (wanted if wanted != "auto" else 1)
        if device is None and config.parallel.device == "cpu":
            return local_machine(count, True, dtype, memory)
        named, notice = (None, "") if device is None else find_device(device, memory)
        return named_machine(named, memory, count, dtype, (notice,) if notice else ())
    settings = (
        config.parallel
        if world_size is None
        else config.parallel.model_copy(update={"num_gpus": "auto"})
    )
    try:
        devices = choose_devices(settings)
    except ConfigError as error:
        raise ConfigError(
            error.what,
            allowed=error.allowed,
            fix=(
                "to plan for a machine that is not this one, name its devices: `--world-size 8"
                " --device A100-80GB`"
            ),
        ) from error
    count = world_size or devices.count
    machine = local_machine(count, devices.type == "cpu", dtype)
    if devices.type != "cpu" and count > devices.count:
        machine = replace(
            machine,
            notes=(
                *machine.notes,
                f"this machine has {devices.count} of the {count} devices planned for",
            ),
        )
    return machine

"""Changes of the config that make a mode fit, each with its predicted memory, and the smallest set
that fits."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TypedDict

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.planner.estimate import ModeEstimate, free_layout
from paceline.planner.machine.hardware import Machine
from paceline.planner.micro_batch import MicroBatchProfile
from paceline.planner.model_profile import ModelProfile
from paceline.planner.search.trials import Setting, Trials, settings_text

#: Modes with a full copy of the weights on each rank.
_REPLICATED = ("single", "ddp", "zero1", "zero2", "dp")


class ChangeReport(TypedDict):
    """A change in the JSON of a plan."""

    settings: dict[str, Setting]
    mode: str
    fits: bool
    memory_bytes: int
    memory_bytes_of_all_ranks: int
    traffic_bytes_per_step: int | None
    step_time_s: float | None
    costs: list[str]


@dataclass(frozen=True)
class SettingsChange:
    """Changed settings, and the mode with them.

    Args:
        settings: dotted key → value.
        costs: the disadvantages of each change, as text.
    """

    settings: dict[str, Setting]
    costs: tuple[str, ...]
    mode: ModeEstimate

    @property
    def text(self) -> str:
        """The settings as overrides on the command line."""
        return settings_text(self.settings)

    @property
    def traffic_bytes_per_step(self) -> int | None:
        return None if self.mode.cost is None else self.mode.cost.traffic_per_step

    def as_dict(self, num_devices: int) -> ChangeReport:
        return ChangeReport(
            settings=self.settings,
            mode=self.mode.name,
            fits=self.mode.fits,
            memory_bytes=self.mode.total,
            memory_bytes_of_all_ranks=self.mode.total * num_devices,
            traffic_bytes_per_step=self.traffic_bytes_per_step,
            step_time_s=self.mode.step_time_s,
            costs=list(self.costs),
        )


@dataclass(frozen=True)
class Advice:
    """Changes for a mode that does not fit.

    Args:
        single: each change alone.
        smallest: the fastest of the smallest sets of changes that fit; None if none fits.
    """

    single: list[SettingsChange]
    smallest: SettingsChange | None


@dataclass(frozen=True)
class _Step:
    settings: dict[str, Setting]
    cost: str


def advise(
    config: Config,
    profile: ModelProfile,
    batch: MicroBatchProfile,
    machine: Machine,
    mode: ModeEstimate,
) -> Advice:
    """Find what makes ``mode`` fit on ``machine``. Every change is estimated; none is applied."""
    trials = Trials(config, profile, batch, machine)
    steps = list(_steps(config, machine, mode))
    single = [change for step in steps if (change := _change(trials, mode, (step,))) is not None]
    for count in range(1, len(steps) + 1):
        changes = [
            _change(trials, mode, chosen)
            for chosen in combinations(steps, count)
            if _compatible(chosen)
        ]
        fitting = [change for change in changes if change is not None and change.mode.fits]
        if fitting:
            return Advice(single, max(fitting, key=lambda change: change.mode.per_second))
    return Advice(single, None)


def _steps(config: Config, machine: Machine, mode: ModeEstimate) -> Iterator[_Step]:
    args = config.train_args
    if args.mixed_dtype is None:
        has_bfloat16 = machine.device is None or machine.device.supports_bfloat16
        precision, dtype = ("bf16-mixed", "bfloat16") if has_bfloat16 else ("fp16-mixed", "float16")
        frozen = "; the frozen weights are stored in it" if config.lora.enable else ""
        yield _Step(
            {"train_args.precision": precision}, f"matrix products are rounded to {dtype}{frozen}"
        )
    size = args.per_device_train_batch_size
    for smaller in (number for number in range(size // 2, 0, -1) if size % number == 0):
        count = args.gradient_accumulation_steps * (size // smaller)
        settings: dict[str, Setting] = {
            "train_args.per_device_train_batch_size": smaller,
            "train_args.gradient_accumulation_steps": count,
        }
        yield _Step(settings, f"{count} micro-batches per step; the same global batch and loss")
    if args.recomputation == "none" and (config.task in CAUSAL_TASKS):
        yield _Step(
            {"train_args.gradient_checkpointing": "selective"},
            "activations except matrix products are recomputed in backward; the same loss",
        )
        yield _Step(
            {"train_args.gradient_checkpointing": "full"},
            "each block runs its forward again in backward; the same loss",
        )
    if config.parallel.cpu_offload == "none" and not machine.is_cpu:
        yield _Step(
            {"parallel.cpu_offload": "optimizer"},
            "the optimizer's state is copied to the device and back in each step; the same loss",
        )
        yield _Step(
            {"parallel.cpu_offload": "activations"},
            "activations are copied to the host and back in each micro-batch; the same loss",
        )
    if machine.count > 1 and mode.layout.strategy in _REPLICATED:
        yield _Step(
            {"parallel.mode": "zero3"},
            "weights are gathered from the other ranks in forward and backward; the same loss",
        )


def _compatible(steps: tuple[_Step, ...]) -> bool:
    keys = [key for step in steps for key in step.settings]
    return len(keys) == len(set(keys))


def _change(trials: Trials, mode: ModeEstimate, steps: tuple[_Step, ...]) -> SettingsChange | None:
    """Return the mode with these changes; None if it is not possible with them."""
    settings = {key: value for step in steps for key, value in step.settings.items()}
    others = {key: value for key, value in settings.items() if key != "parallel.mode"}
    layout, stage = mode.layout, mode.settings.get("deepspeed_stage")
    try:
        if "parallel.mode" in settings:
            layout, stage = free_layout(trials.config, trials.machine.count, "zero3"), None
        changed = trials.estimate(layout, others, stage if isinstance(stage, int) else None)
    except ConfigError:
        return None
    if changed.cost is None:
        return None
    return SettingsChange(settings, tuple(step.cost for step in steps), changed)

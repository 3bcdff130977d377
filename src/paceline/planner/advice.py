"""Changes of the config that make a mode fit, each with its predicted memory, and the smallest set
that fits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypedDict

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.planner.estimate import ModeEstimate, estimate, free_layout
from paceline.planner.hardware import Machine
from paceline.planner.micro_batch import MicroBatchProfile, micro_batch
from paceline.planner.model_profile import ModelProfile, describe

#: Modes with a full copy of the weights on each rank.
_REPLICATED = ("single", "ddp", "zero1", "zero2", "dp")

Setting = str | int | bool


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
class Change:
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
        return " ".join(
            f"{key.removeprefix('train_args.')}="
            + (str(value).lower() if isinstance(value, bool) else str(value))
            for key, value in self.settings.items()
        )

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

    single: list[Change]
    smallest: Change | None


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
    args = config.train_args
    trial = _Trial(
        config,
        machine,
        mode,
        {args.precision: profile},
        {args.per_device_train_batch_size: batch},
    )
    steps = list(_steps(config, machine, mode))
    single = [change for step in steps if (change := trial.change((step,))) is not None]
    for count in range(1, len(steps) + 1):
        changes = [
            trial.change(chosen) for chosen in combinations(steps, count) if _compatible(chosen)
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
    if args.gradient_checkpointing == "none" and (config.task in CAUSAL_TASKS):
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


@dataclass(frozen=True)
class _Trial:
    """Estimate ``mode`` with changed settings. ``models`` (by precision) and ``batches`` (by size)
    are caches, which start with those of the config."""

    config: Config
    machine: Machine
    mode: ModeEstimate
    models: dict[str, ModelProfile]
    batches: dict[int, MicroBatchProfile]

    def change(self, steps: tuple[_Step, ...]) -> Change | None:
        """Return the mode with these changes; None if it is not possible with them."""
        settings = {key: value for step in steps for key, value in step.settings.items()}
        config = self.config
        for key, value in settings.items():
            section, _, name = key.partition(".")
            if key != "parallel.mode":
                changed = getattr(config, section).model_copy(update={name: value})
                config = config.model_copy(update={section: changed})
        layout, stage = self.mode.layout, self.mode.settings.get("deepspeed_stage")
        try:
            if "parallel.mode" in settings:
                layout, stage = free_layout(config, self.machine.count, "zero3"), None
            mode = estimate(
                layout,
                config,
                self._model(config),
                self._batch(config),
                self.machine,
                stage=stage if isinstance(stage, int) else None,
            )
        except ConfigError:
            return None
        if mode.cost is None:
            return None
        return Change(settings, tuple(step.cost for step in steps), mode)

    def _model(self, config: Config) -> ModelProfile:
        """Return the model for the config's precision, which is the dtype of frozen weights, and
        its micro-batch size. No other change affects the model."""
        args, before = config.train_args, self.config.train_args
        if args.precision not in self.models:
            if config.lora.enable and config.task in CAUSAL_TASKS:
                self.models[args.precision] = describe(config)
            else:
                model = self.models[before.precision]
                shape = replace(model.shape, low_bytes=2 if args.mixed_dtype else 0)
                self.models[args.precision] = replace(model, shape=shape)
        share = args.per_device_train_batch_size / before.per_device_train_batch_size
        return self.models[args.precision].scaled(share)

    def _batch(self, config: Config) -> MicroBatchProfile:
        size = config.train_args.per_device_train_batch_size
        if size not in self.batches:
            self.batches[size] = micro_batch(config)
        return self.batches[size]

"""What makes a mode fit that does not: each change of the config with its predicted memory, and the
smallest set that fits."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.parallel.registry import ParallelLayout, layout
from paceline.planner.estimate import Mode, estimate
from paceline.planner.hardware import Machine
from paceline.planner.model_profile import Described, describe
from paceline.planner.workload import Batch, micro_batch

#: Modes that keep a whole copy of the weights on each rank.
_WHOLE = ("single", "ddp", "zero1", "zero2", "dp")


@dataclass(frozen=True)
class Change:
    """Settings that differ from the config, and the mode with them.

    Args:
        settings: dotted key → value.
        costs: what is paid for each of them, in words.
    """

    settings: dict[str, Any]
    costs: tuple[str, ...]
    mode: Mode

    @property
    def text(self) -> str:
        """As overrides on the command line."""
        return " ".join(
            f"{key.removeprefix('train_args.')}={_as_override(value)}"
            for key, value in self.settings.items()
        )

    def as_dict(self, num_devices: int) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "mode": self.mode.name,
            "fits": self.mode.fits,
            "memory_bytes": self.mode.total,
            "memory_bytes_of_all_ranks": self.mode.total * num_devices,
            "traffic_bytes_per_step": (
                None if self.mode.cost is None else self.mode.cost.traffic_per_step
            ),
            "step_time_s": self.mode.step_time_s,
            "costs": list(self.costs),
        }


@dataclass(frozen=True)
class Advice:
    """Changes for a mode that does not fit.

    Args:
        single: each change alone.
        smallest: the fewest changes that fit together, the fastest of those; None if all together
            do not fit.
    """

    single: list[Change]
    smallest: Change | None


@dataclass(frozen=True)
class _Step:
    settings: dict[str, Any]
    cost: str
    mode: str | None = None


def advise(
    config: Config, described: Described, batch: Batch, machine: Machine, mode: Mode
) -> Advice:
    """What makes ``mode`` fit on ``machine``. Every change is estimated; none is applied."""
    steps = list(_steps(config, machine, mode))
    trial = _Trial(config, described, batch, machine, mode)
    single = [change for step in steps if (change := trial.change((step,))) is not None]
    for count in range(1, len(steps) + 1):
        changes = [
            trial.change(chosen) for chosen in combinations(steps, count) if _compatible(chosen)
        ]
        fitting = [change for change in changes if change is not None and change.mode.fits]
        if fitting:
            return Advice(single, max(fitting, key=lambda change: change.mode.per_second))
    return Advice(single, None)


def _steps(config: Config, machine: Machine, mode: Mode) -> Iterator[_Step]:
    args = config.train_args
    if args.mixed_dtype is None:
        able = machine.device is None or machine.device.supports_bfloat16
        name, dtype = ("bf16-mixed", "bfloat16") if able else ("fp16-mixed", "float16")
        frozen = "; the frozen weights are held in it" if config.lora.enable else ""
        yield _Step(
            {"train_args.precision": name}, f"matrix products are rounded to {dtype}{frozen}"
        )
    size = args.per_device_train_batch_size
    for smaller in (number for number in range(size // 2, 0, -1) if size % number == 0):
        count = args.gradient_accumulation_steps * (size // smaller)
        settings = {
            "train_args.per_device_train_batch_size": smaller,
            "train_args.gradient_accumulation_steps": count,
        }
        yield _Step(settings, f"{count} micro-batches a step; the same global batch and loss")
    if not args.gradient_checkpointing and (config.task in ("sft", "pretrain")):
        yield _Step(
            {"train_args.gradient_checkpointing": True},
            "activations are computed again in backward; the same loss",
        )
    if machine.count > 1 and mode.layout.strategy in _WHOLE:
        yield _Step(
            {"parallel.mode": "zero3"},
            "weights are gathered from the other ranks in every pass; the same loss",
            "zero3",
        )


def _compatible(steps: tuple[_Step, ...]) -> bool:
    keys = [key for step in steps for key in step.settings]
    return len(keys) == len(set(keys))


@dataclass(frozen=True)
class _Trial:
    """Estimates ``mode`` with changed settings."""

    config: Config
    described: Described
    batch: Batch
    machine: Machine
    mode: Mode
    _by_precision: dict[str, Described] = field(default_factory=dict)

    def change(self, steps: tuple[_Step, ...]) -> Change | None:
        """The mode with these steps taken; None if the mode cannot be laid out so."""
        settings = {key: value for step in steps for key, value in step.settings.items()}
        train_args = {
            key.removeprefix("train_args."): value
            for key, value in settings.items()
            if key != "parallel.mode"
        }
        config = self.config.model_copy(
            update={"train_args": self.config.train_args.model_copy(update=train_args)}
        )
        chosen = next((step.mode for step in steps if step.mode is not None), None)
        stage = self.mode.settings.get("deepspeed_stage") if chosen is None else None
        try:
            described = self._described(config)
            where = self.mode.layout if chosen is None else self._free_layout(chosen)
            mode = estimate(
                where, config, described, self._batch(config), self._machine(config), stage=stage
            )
        except ConfigError:
            return None
        return (
            None
            if mode.cost is None
            else Change(settings, tuple(step.cost for step in steps), mode)
        )

    def _free_layout(self, name: str) -> ParallelLayout:
        free = self.config.parallel.model_copy(
            update=dict.fromkeys(("data", "shard", "tensor", "pipeline"))
        )
        return layout(free, self.machine.count, name)

    def _described(self, config: Config) -> Described:
        """The precision decides the type in which frozen weights are held; nothing else here
        changes the model."""
        args = config.train_args
        if args.precision == self.config.train_args.precision:
            described = self.described
        else:
            if args.precision not in self._by_precision:
                low_bytes = 2 if args.mixed_dtype else 0
                same = replace(
                    self.described, shape=replace(self.described.shape, low_bytes=low_bytes)
                )
                is_language = config.task in ("sft", "pretrain")
                self._by_precision[args.precision] = (
                    describe(config) if config.lora.enable and is_language else same
                )
            described = self._by_precision[args.precision]
        share = (
            args.per_device_train_batch_size / self.config.train_args.per_device_train_batch_size
        )
        scaled = round(described.activation_bytes * share)
        return (
            described
            if share == 1
            else replace(described, activation_bytes=scaled, flops=described.flops * share)
        )

    def _batch(self, config: Config) -> Batch:
        same_size = (
            config.train_args.per_device_train_batch_size
            == self.config.train_args.per_device_train_batch_size
        )
        return (
            self.batch
            if same_size
            else self._small_batches[config.train_args.per_device_train_batch_size]
        )

    @cached_property
    def _small_batches(self) -> dict[int, Batch]:
        args = self.config.train_args
        sizes = [
            size
            for size in range(1, args.per_device_train_batch_size)
            if args.per_device_train_batch_size % size == 0
        ]
        smaller = [args.model_copy(update={"per_device_train_batch_size": size}) for size in sizes]
        return {
            one.per_device_train_batch_size: micro_batch(
                self.config.model_copy(update={"train_args": one})
            )
            for one in smaller
        }

    def _machine(self, config: Config) -> Machine:
        """The machine at the speed of the changed precision."""
        before, after = self.config.train_args.mixed_dtype, config.train_args.mixed_dtype
        device = self.machine.device
        if device is None or before == after:
            return self.machine
        old, new = (device.flops_s(dtype) or device.float32_flops_s for dtype in (before, after))
        return replace(self.machine, flops_s=self.machine.flops_s * new / old)


def _as_override(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

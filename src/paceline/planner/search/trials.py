"""Estimate a mode with changed settings. Imports no torch."""

from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import replace

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.parallel.registry import ParallelLayout
from paceline.planner.estimate import ModeEstimate, estimate
from paceline.planner.machine.hardware import Machine
from paceline.planner.micro_batch import MicroBatchProfile, micro_batch
from paceline.planner.model_profile import ModelProfile, describe

Setting = str | int | float | bool
#: Dotted key → value.
Settings = Mapping[str, Setting]


def with_settings(config: Config, settings: Settings) -> Config:
    """Return the config with changed settings, which do not count as set by the user."""
    for key, value in settings.items():
        section, _, name = key.partition(".")
        changed = getattr(config, section).with_derived({name: value})
        config = config.model_copy(update={section: changed})
    return config


def with_fixed(config: Config, settings: Settings) -> Config:
    """Return the config with changed settings that count as set by the user."""
    for key, value in settings.items():
        section, _, name = key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config


def settings_text(settings: Settings) -> str:
    """Return the settings as overrides on the command line."""
    return " ".join(
        f"{key.removeprefix('train_args.')}="
        + (str(value).lower() if isinstance(value, bool) else str(value))
        for key, value in settings.items()
    )


class Trials:
    """Estimates of a run with changed settings. Models and micro-batches are described once for
    each precision and size."""

    def __init__(
        self, config: Config, profile: ModelProfile, batch: MicroBatchProfile, machine: Machine
    ) -> None:
        self.config = config
        self.machine = machine
        self._base = config
        self._estimates: dict[Hashable, ModeEstimate] = {}
        self._models = {config.train_args.precision: profile}
        self._batches = {config.train_args.per_device_train_batch_size: batch}

    def estimate(
        self, layout: ParallelLayout, settings: Settings, stage: int | None = None
    ) -> ModeEstimate:
        """Estimate a layout with these settings. ``stage``: of DeepSpeed.

        Raises:
            ConfigError: the model cannot be built with them.
        """
        key = layout, tuple(sorted(settings.items())), stage
        if key not in self._estimates:
            config = with_settings(self.config, settings)
            model, batch = self.model(config), self.batch(config)
            self._estimates[key] = estimate(layout, config, model, batch, self.machine, stage=stage)
        return self._estimates[key]

    def on(self, machine: Machine) -> "Trials":
        """Return trials of the same run on another machine."""
        result = copy(self)
        result.machine, result._estimates = machine, {}
        return result

    def with_config(self, config: Config) -> "Trials":
        """Return trials of the run with another config of the same model."""
        result = copy(self)
        result.config, result._estimates = config, {}
        return result

    def model(self, config: Config) -> ModelProfile:
        """Return the model for the config's precision, which is the dtype of frozen weights, and
        its micro-batch size. No other setting affects the model."""
        args, before = config.train_args, self._base.train_args
        key = args.precision
        if key not in self._models:
            is_low = config.lora.enable and config.task in CAUSAL_TASKS
            if is_low or args.weight_dtype != before.weight_dtype:
                self._models[key] = describe(config)
            else:
                model = self._models[before.precision]
                shape = replace(model.shape, low_bytes=2 if args.mixed_dtype else 0)
                self._models[key] = replace(model, shape=shape)
        size = args.per_device_train_batch_size
        if size == before.per_device_train_batch_size:
            return self._models[key]
        # The copy shares the memoized results of the shape.
        return self._models[key].scaled(size / before.per_device_train_batch_size)

    def batch(self, config: Config) -> MicroBatchProfile:
        size = config.train_args.per_device_train_batch_size
        if size not in self._batches:
            self._batches[size] = micro_batch(config)
        return self._batches[size]

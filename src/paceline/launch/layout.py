"""Choose the strategy and the mesh of a run, and how replicas share the global batch, before the
ranks are started."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.chosen import MEMORY_SETTINGS, changed_settings, read_chosen
from paceline.config.derive import ResolvedValues
from paceline.config.diff import OTHER_TRAINING
from paceline.config.load import Loaded, load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.core.log import CONSOLE_ONLY, Notice
from paceline.core.run_dir import RunDir
from paceline.distributed.mesh import ParallelDims
from paceline.models.kinds import reads_images
from paceline.parallel.registry import (
    ParallelLayout,
    check_strategy,
    get_spec,
    layout,
    mode_of,
)
from paceline.planner.estimate import with_accumulation
from paceline.planner.search.trials import Setting, Settings, with_fixed, with_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.distributed.environment import RankEnv


logger = logging.getLogger(__name__)


#: What ``mode: auto`` may set besides the mode and the memory settings. A run that resumes keeps
#: these settings.
_KEPT_SETTINGS = (
    "train_args.precision",
    "train_args.fp8",
    "parallel.bucket_cap_mb",
    "compression.method",
)
_EARLIER_SETTINGS = (*_KEPT_SETTINGS, *MEMORY_SETTINGS)


@dataclass(frozen=True)
class ChosenLayout:
    """The layout of a run, and the settings that were chosen for the config."""

    layout: ParallelLayout
    settings: Settings = field(default_factory=dict)

    def with_settings(self, settings: Settings) -> ChosenLayout:
        """Return the layout with further settings."""
        return replace(self, settings={**self.settings, **settings})

    def applied_to(self, loaded: Loaded) -> Loaded:
        """Return the config with the chosen settings."""
        return replace(loaded, config=with_settings(loaded.config, self.settings))


def choose_layout(
    config: Config,
    num_devices: int,
    device_type: str,
    outer: RankEnv | None,
    read_data: Callable[[], object] | None = None,
    free_bytes: int | None = None,
) -> ChosenLayout:
    """Return the layout for ``num_devices`` devices: the configured one, or, with ``mode: auto``,
    the best that fits in memory, with the settings that it needs.

    Args:
        outer: rank that an outer launcher assigned to this process, or None.
        read_data: function that stores the data in the token cache; called if ``mode: auto``
            needs the lengths of the samples.
        free_bytes: free memory of the smallest accelerator; None: all of this host's.

    Raises:
        ConfigError: if the product of the axes is not the number of ranks, or if the strategy does
            not support this config.
    """
    name = mode_of(config.parallel)
    settings: Settings = {}
    remarks: tuple[str, ...] = ()
    if name == "auto":
        from paceline.planner.auto.pick import pick

        kept = kept_settings(config)
        fixed = kept if outer is None else {**kept, "parallel.num_gpus": num_devices}
        choice = pick(
            with_fixed(config, fixed),
            num_devices,
            free_bytes,
            device_type=device_type,
            read_data=read_data,
        )
        chosen, settings, remarks = choice.layout, {**kept, **choice.settings}, choice.remarks
        config = with_settings(config, settings)
        text = f"strategy: {chosen.text()}, chosen by `mode: auto`: {choice.why}"
    else:
        if outer is not None:  # the ranks of an outer launcher include the servers
            num_devices -= get_spec(name).extra_ranks(config)
        if num_devices < 1:
            raise ConfigError(
                f"`parallel.mode: {name}` has no worker: all ranks are servers",
                fix="start more ranks, or lower `parameter_server.num_servers`",
            )
        chosen = layout(config.parallel, num_devices, name)
        text = f"strategy: {chosen.text()}"
    # The event log contains this in its `run_start` event.
    logger.info(text, extra=CONSOLE_ONLY)
    for remark in remarks:
        logger.info("auto: %s", remark)
    if chosen.num_processes == 1 and outer is not None and outer.world_size > 1:
        raise ConfigError(
            f"`parallel.mode: {name}` is not supported with {counted(outer.world_size, 'rank')} of"
            " an outer launcher: it runs in one process",
            fix="start it without torchrun (`paceline sft …`), or set `parallel.mode: ddp`",
        )
    if chosen.num_processes == 1 and outer is None and config.parallel.hosts != (1, 1):
        raise ConfigError(
            f"`parallel.mode: {name}` is not supported with `parallel.nnodes:"
            f" {config.parallel.nnodes}`: it runs in one process",
            fix="set `parallel.mode: ddp`, or `parallel.nnodes: 1`",
        )
    config = with_accumulation(config, chosen.axes.replicas)
    check_strategy(chosen.strategy, config, chosen.axes)
    check_images(config, chosen.axes)
    spec = get_spec(chosen.strategy)
    num_servers = spec.extra_ranks(config)
    if num_servers and device_type not in ("cpu", "cuda"):
        raise ConfigError(
            f"`parallel.mode: {chosen.strategy}` is not supported with {device_type} devices: Gloo,"
            " which connects workers and servers, cannot send their tensors",
            code="not-supported",
            allowed="`parallel.device: cpu` or `cuda`",
            fix="set `parallel.device: cpu`, or `parallel.mode: ddp`",
        )
    if num_servers and device_type != "cpu" and outer is not None:
        raise ConfigError(
            f"`parallel.mode: {chosen.strategy}` on {device_type} devices is not supported with an"
            " outer launcher or several hosts: each of their ranks has a device, and the servers"
            " have none",
            code="not-supported",
            fix=(
                "start it on one host without torchrun (`paceline sft …`), or set"
                " `parallel.device: cpu`"
            ),
        )
    can_lose_ranks = bool(spec.expendable_ranks(config, chosen.axes))
    if outer is not None and can_lose_ranks:
        raise ConfigError(
            "`parameter_server.on_worker_failure: continue` is not supported with an outer"
            " launcher: it ends all ranks when one ends",
            fix="start it without torchrun (`paceline sft …`), or set `on_worker_failure: restart`",
        )
    if config.parallel.hosts != (1, 1) and can_lose_ranks:
        raise ConfigError(
            "`parameter_server.on_worker_failure: continue` is not supported with"
            f" `parallel.nnodes: {config.parallel.nnodes}`: all ranks must be on one host",
            fix="set `on_worker_failure: restart`: all ranks restart from the latest checkpoint",
        )
    chosen = replace(chosen, num_processes=chosen.num_processes + num_servers)
    return ChosenLayout(chosen, settings)


def kept_settings(config: Config) -> Settings:
    """Return the settings that were chosen for the run in the output folder, if this run resumes it
    and the config does not set them: others would change the rounding, or be refused."""
    file = RunDir(Path(config.output_dir)).config
    if config.resume != "auto" or not file.is_file():
        return {}
    try:
        stored = load_config(file).config
    except ConfigError:
        return {}  # reported when the run is resumed
    kept: dict[str, Setting] = {}
    for key, chosen in changed_settings(config, read_chosen(file)).items():
        section, _, name = key.partition(".")
        if name not in getattr(config, section).model_fields_set:
            kept[key] = chosen
    # Runs of earlier versions have no chosen.json.
    keys = _KEPT_SETTINGS if file.with_name("chosen.json").is_file() else _EARLIER_SETTINGS
    for key in keys:
        section, _, name = key.partition(".")
        before, now = getattr(stored, section), getattr(config, section)
        value = getattr(before, name)
        # Another precision follows from the devices, which may differ now.
        is_chosen = name != "precision" or value == "bf16-true"
        if name not in now.model_fields_set and is_chosen and value != getattr(now, name):
            kept[key] = value
    return kept


def check_images(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError if a vision-language model would be divided in a way that vision towers do
    not support."""
    names = [name for name in ("tensor", "pipeline") if getattr(dims, name) > 1]
    if names and reads_images(config):
        setting = f"`parallel.{names[0]}: {getattr(dims, names[0])}`"
        raise ConfigError(
            f"{setting} is not supported with the vision-language model `{config.model}`",
            code="not-supported",
            fix="set `parallel.mode: ddp`, `zero1`, `zero2` or `zero3`",
        )


def sharing_text(config: Config, derived: ResolvedValues) -> str | None:
    """Describe how the replicas share the global batch if the run resumes with a different number
    of replicas or size of micro-batches. Return None if the config is unchanged."""
    configured = config.train_args.gradient_accumulation_steps
    accumulation = derived.gradient_accumulation_steps
    batch = counted(derived.global_batch_size, "sample")
    replicas = counted(derived.replicas, "replica")
    shares = derived.shares if derived.global_batch_size % derived.replicas else None
    if accumulation != configured:
        text = (
            f"gradient_accumulation_steps: {configured} → {accumulation}, which keeps the run's"
            f" global batch of {batch} on {replicas}"
        )
        return f"{text}, as {shares}" if shares else text
    return f"{replicas}: {batch} of the global batch as {shares}" if shares else None


def check_sizes(derived: ResolvedValues, samples: int | None, mode: str) -> list[Notice]:
    """Check that every replica gets part of the run's global batch, and that the warm-up ends.

    Args:
        mode: name of the strategy.
        samples: number of training samples; None if it is unknown. It may be smaller than the
            global batch or the number of replicas: missing rows are padded with zero weight, which
            changes neither the loss nor the gradient.

    Returns:
        The notices to log.

    Raises:
        ConfigError: if there are no training samples, or more replicas than samples in the global
            batch of a resumed run or, in a mode whose replicas train separately, in the dataset.
    """
    if samples is None:
        samples = derived.global_batch_size
    if samples == 0:
        raise ConfigError(
            "the dataset contains no training sample",
            code="no-rows",
            fix="check `dataset` and `max_length`",
        )
    if derived.replicas > samples and mode in OTHER_TRAINING:
        raise ConfigError(
            f"`parallel.mode: {mode}` trains each worker on separate samples, but there are"
            f" {derived.replicas} workers and only {counted(samples, 'training sample')}",
            fix=(
                f"set `parallel.num_gpus` to at most {samples}, use `parallel.mode: ddp`, or add"
                " data"
            ),
        )
    if derived.replicas > derived.global_batch_size:
        max_ranks = derived.global_batch_size * (derived.world_size // derived.replicas)
        raise ConfigError(
            f"the run's global batch of {counted(derived.global_batch_size, 'sample')} cannot be"
            f" shared among {derived.replicas} replicas: some would have nothing to train on",
            fix=(
                f"set `parallel.num_gpus` to at most {max_ranks}, or split the model over the ranks"
                " (`parallel.tensor`, `parallel.pipeline`), or set another `output_dir` for a"
                " new run"
            ),
        )
    warm_up = _warm_up_notices(derived)
    if derived.global_batch_size <= samples:
        return warm_up
    all_samples = (
        "the only training sample" if samples == 1 else f"all {samples:,} training samples"
    )
    text = (
        f"the global batch of {counted(derived.global_batch_size, 'sample')}"
        f" ({derived.micro_batch_size} per micro-batch × {derived.gradient_accumulation_steps}"
        f" accumulation × {counted(derived.replicas, 'replica')}) is larger than the dataset: each"
        f" step trains on {all_samples}, and the missing rows are padded with zero weight"
    )
    if derived.replicas > samples:
        idle = derived.replicas - samples
        text += (
            f". {counted(idle, 'replica')} of {derived.replicas} {'gets' if idle == 1 else 'get'}"
            f" padding only; {counted(samples, 'replica')} would train on the same samples"
        )
    return [*warm_up, Notice("warning", text)]


def _warm_up_notices(derived: ResolvedValues) -> list[Notice]:
    warmup, steps = derived.warmup_steps, derived.steps
    if warmup <= steps:
        return []
    last = derived.learning_rate * (steps - 1) / warmup  # the first step of a warm-up has rate 0
    text = (
        f"the warm-up of {warmup:,} steps is longer than the training of {counted(steps, 'step')},"
        f" so the learning rate only reaches about {last:.2g} of {derived.learning_rate:g}; lower"
        " `train_args.warmup_steps`, or train longer"
    )
    return [Notice("warning", text)]

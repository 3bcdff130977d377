"""The settings of a run that its config leaves open and that its memory decides: chosen before the
ranks start, and smaller ones after a rank ran out of memory. Also the interval between checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from paceline.config.chosen import (
    ACCUMULATION,
    EVAL_SIZE,
    OFFLOAD,
    RECOMPUTATION,
    SIZE,
    changed_settings,
    open_settings,
    values_of,
)
from paceline.config.derive import accumulation_of
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.launch.passes.draft import Draft, known
from paceline.launch.passes.layout import kept_settings
from paceline.launch.passes.rank_memory import RankMemory
from paceline.models.transforms.compile_check import check_compile
from paceline.parallel.registry import check_strategy, get_spec
from paceline.planner.estimate import with_accumulation
from paceline.planner.machine.local import local_machine
from paceline.planner.micro_batch import micro_batch
from paceline.planner.search.fit import FROM_HISTORY, KeptSettings, check_fits, fit_memory
from paceline.planner.search.memory_history import memory_key, recall
from paceline.planner.search.save_interval import with_save_interval
from paceline.planner.search.trials import Settings, Trials, settings_text, with_settings
from paceline.planner.upper_bound import ROOMY, fits_roughly, upper_bound

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.parallel.registry import ParallelLayout
    from paceline.train.run_spec import RunSpec

logger = logging.getLogger(__name__)


def fit_to_memory(draft: Draft) -> Draft:
    """Choose the memory settings that the config leaves open, once the lengths of the samples are
    known. Rank 0 chooses them for the ranks of all hosts."""
    memory, layout = known(draft.host).memory, known(draft.layout)
    if memory is None or not draft.reads_folder:
        return draft
    history_key = memory_key(draft.config, layout, memory.device_name)
    preferred = preferred_settings(draft.config, draft.kept, history_key)
    settings = choose_memory_settings(draft.config, layout, draft.device_type, memory, preferred)
    config = with_accumulation(with_settings(draft.config, settings), layout.axes.replicas)
    return replace(
        draft.with_config(config),
        settings={**draft.settings, **settings},
        history_key=None if memory.is_shared else history_key,
    )


def set_save_interval(draft: Draft) -> Draft:
    """Set the interval between checkpoints that follows from the mean time between failures."""
    config, layout = draft.config, known(draft.layout)
    if config.recovery.mtbf_hours is None:
        return draft
    is_cpu, dtype = draft.device_type == "cpu", config.train_args.compute_format
    machine = local_machine(layout.num_processes, is_cpu, dtype)
    return draft.with_config(with_save_interval(config, layout, machine))


def preferred_settings(config: Config, kept: Settings | None, history_key: str) -> KeptSettings:
    """Return the memory settings of the earlier attempt of the run, or else those with which an
    earlier run was completed that had run out of memory.

    Args:
        kept: settings of the previous attempt; None to read them from the run's folder.
        history_key: key of the run in the history of this machine.
    """
    if kept is None:
        kept = kept_settings(config)
    if kept:
        return KeptSettings(kept)
    return KeptSettings(recall(history_key), FROM_HISTORY)


def choose_memory_settings(
    config: Config,
    layout: ParallelLayout,
    device_type: str,
    memory: RankMemory,
    kept: KeptSettings,
) -> Settings:
    """Return the values of all memory settings that the config leaves open: the defaults if they
    fit or if the memory is not predicted, otherwise the fastest settings that fit.

    Call it when the data are tokenized, so that the lengths of the samples are known.

    Args:
        kept: settings that are preferred if they fit.

    Raises:
        ConfigError: if even the smallest settings do not fit on the accelerator.
    """
    is_cpu = device_type == "cpu"
    keys = open_settings(config, is_cpu=is_cpu)
    usable = _usable(kept.settings, keys, config)
    chosen = _choose(config, layout, is_cpu, memory, replace(kept, settings=usable))
    defaults: Settings = {RECOMPUTATION: config.train_args.recomputation}
    resolved = with_settings(config, {**defaults, **chosen})
    return values_of(resolved, keys)


def _usable(kept: Settings, keys: tuple[str, ...], config: Config) -> Settings:
    """Return the kept settings that are open and belong to the config's global batch."""
    kept = {key: value for key, value in kept.items() if key in keys}
    args = config.train_args
    num_samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
    is_same = int(kept.get(SIZE, 0)) * int(kept.get(ACCUMULATION, 0)) == num_samples
    if args.global_batch_size is None and not is_same:
        kept = {key: value for key, value in kept.items() if key not in (SIZE, ACCUMULATION)}
    return kept


def _choose(
    config: Config,
    layout: ParallelLayout,
    is_cpu: bool,
    memory: RankMemory,
    kept: KeptSettings,
) -> Settings:
    has_choice = bool(open_settings(config, is_cpu=is_cpu))
    if memory.device is None and not (is_cpu and has_choice):
        return kept.settings
    preferred = with_settings(config, kept.settings)
    if not config.train_args.auto_find_batch_size and _fits_by_far(preferred, memory):
        changed = changed_settings(config, kept.settings)
        if changed:
            logger.info(
                UserText(
                    "memory: {settings_text}, {reason}",
                    code="memory-settings",
                    settings_text=settings_text(changed),
                    reason=kept.reason,
                )
            )
        return kept.settings
    from paceline.planner.model_profile import describe

    try:
        profile = describe(config)
    except ConfigError:
        return kept.settings  # the ranks report what is wrong with the model
    dtype = config.train_args.compute_format
    machine = local_machine(layout.num_processes, is_cpu, dtype, memory.usable_bytes)
    trials = Trials(config, profile, micro_batch(config), machine)
    fit = fit_memory(
        trials,
        layout,
        get_spec(layout.strategy).variant(config),
        kept=kept,
        host_memory_bytes=memory.host_bytes,
    )
    if fit is None:
        return kept.settings
    text = fit.text(config, memory.usable_bytes)
    if text is not None:
        logger.info(text)
    if memory.device is not None:
        warning = check_fits(fit, trials, memory.device.total_bytes, machine.name)
        if warning is not None:
            logger.warning(warning)
    return fit.settings


def _fits_by_far(config: Config, memory: RankMemory) -> bool:
    """Return whether a bound that needs no model shows that the run fits.

    On a CPU, where nothing is refused and a description of the model would delay the start, the
    bound may take all of the memory, and a run whose bound is not known counts as one that fits.
    """
    is_cpu, size_bytes = memory.device is None, memory.usable_bytes
    share = 1.0 if is_cpu else ROOMY
    if fits_roughly(config, size_bytes, share=share) is not None:
        return True
    batch = micro_batch(config)
    if batch.has_tokens and batch.known and fits_roughly(config, size_bytes, batch, share):
        return True
    return is_cpu and upper_bound(config) is None


#: Phases before the first step, in which only the state of the run takes memory.
_BEFORE_TRAINING = ("starting", "loading")


def smaller_settings(
    config: Config, layout: ParallelLayout, device_type: str, phase: str
) -> Settings | None:
    """Return the settings to change after a rank ran out of memory: a smaller micro-batch, then
    recomputation, then offloading. None if the config leaves nothing open that takes less memory.

    Args:
        config: the config with the current settings.
        phase: what the rank did.
    """
    keys = open_settings(config, is_cpu=device_type == "cpu")
    if phase == "evaluation":
        steps: Iterable[Settings] = _smaller_evaluations(config)
    elif phase in _BEFORE_TRAINING:
        steps = _offloads(config)
    else:
        steps = chain(_smaller_batches(config), _recomputations(config), _offloads(config))
    for settings in steps:
        is_open = all(key in keys for key in settings)
        if is_open and _is_possible(with_settings(config, settings), layout, device_type):
            return settings
    return None


def _smaller_evaluations(config: Config) -> Iterator[Settings]:
    args = config.train_args
    size = args.per_device_eval_batch_size or args.per_device_train_batch_size
    if size > 1:
        yield {EVAL_SIZE: size // 2}


def _smaller_batches(config: Config) -> Iterator[Settings]:
    """Yield the next smaller micro-batch that divides the samples of a rank."""
    args = config.train_args
    size, count = args.per_device_train_batch_size, args.gradient_accumulation_steps
    smaller = next((each for each in range(size - 1, 0, -1) if size * count % each == 0), None)
    if smaller is not None and not _depends_on_micro_batches(config):
        yield {SIZE: smaller, ACCUMULATION: size * count // smaller}


def _depends_on_micro_batches(config: Config) -> bool:
    """Return whether the result depends on the size of micro-batches beyond rounding. Language
    models have no BatchNorm."""
    from paceline.planner.model_profile import describe

    return config.task not in CAUSAL_TASKS and describe(config).has_batch_norm


def _recomputations(config: Config) -> Iterator[Settings]:
    names = ("none", "selective", "full")
    setting = config.train_args.recomputation
    if setting in names:
        for name in names[names.index(str(setting)) + 1 :]:
            yield {RECOMPUTATION: name}


def _offloads(config: Config) -> Iterator[Settings]:
    if config.parallel.cpu_offload == "none":
        if config.task in CAUSAL_TASKS:  # which have blocks
            yield {OFFLOAD: "activations"}
        yield {OFFLOAD: "optimizer"}
    elif config.parallel.cpu_offload == "activations":
        yield {OFFLOAD: "optimizer"}


def _is_possible(config: Config, layout: ParallelLayout, device_type: str) -> bool:
    try:
        check_strategy(layout.strategy, config, layout.axes)
        check_compile(config, device_type)
    except ConfigError:
        return False
    return True


def with_less_memory(spec: RunSpec, phase: str) -> tuple[RunSpec, Settings] | None:
    """Return the spec with smaller memory settings after a rank ran out of memory, and what has
    changed; None if nothing is open."""
    settings = smaller_settings(spec.config, spec.layout, spec.device_type, phase)
    if settings is None:
        return None
    config = with_settings(spec.config, settings)
    derived, size = spec.derived, config.train_args.per_device_train_batch_size
    if SIZE in settings:
        count = accumulation_of(derived.global_batch_size, size, derived.replicas)
        derived = replace(derived, micro_batch_size=size, gradient_accumulation_steps=count)
    return replace(spec, config=config, derived=derived), settings

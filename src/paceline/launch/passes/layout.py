"""Choose the strategy and the mesh of a run, and check what they support."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from paceline.config.chosen import MEMORY_SETTINGS, changed_settings, read_chosen
from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.core.log import CONSOLE_ONLY
from paceline.core.run_dir import RunDir
from paceline.core.texts import UserText
from paceline.launch.passes.data import read_data_early
from paceline.launch.passes.draft import Draft, known
from paceline.models.context.choice import method_of_run
from paceline.models.head.router_coefficient import check_router_loss
from paceline.parallel.capabilities import Placement
from paceline.parallel.limits.images import check_vision_language
from paceline.parallel.registry import (
    ParallelLayout,
    check_placement,
    check_strategy,
    get_spec,
    layout,
    mode_of,
)
from paceline.planner.estimate import with_accumulation
from paceline.planner.search.trials import Setting, Settings, with_fixed, with_settings

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


def choose_layout(draft: Draft) -> Draft:
    """Choose the layout for the devices: the configured one, or, with ``mode: auto``, the best that
    fits in memory, with the settings that it needs. Over several hosts rank 0 chooses, and the
    drafts of the other ranks have its layout and its settings.

    Raises:
        ConfigError: if the product of the axes is not the number of ranks.
    """
    if draft.layout is not None:
        return draft.with_config(with_settings(draft.config, draft.settings))
    name = mode_of(draft.config.parallel)
    if name == "auto":
        return _choose_mode(draft)
    num_devices = draft.num_devices
    if draft.outer is not None:  # the ranks of an outer launcher include the servers
        num_devices -= get_spec(name).extra_ranks(draft.config)
    if num_devices < 1:
        raise ConfigError(
            "`parallel.mode: {name}` has no worker: all ranks are servers",
            code="no-worker",
            fix="start more ranks, or lower `parameter_server.num_servers`",
            name=name,
        )
    chosen = layout(draft.config.parallel, num_devices, name)
    _log_strategy(chosen.text())
    return _with_layout(draft, chosen)


def _choose_mode(draft: Draft) -> Draft:
    """Choose the mode, the mesh and the settings for ``mode: auto``. The data are read first if the
    choice depends on the lengths of the samples."""
    from paceline.planner.auto.pick import pick, pick_without_lengths

    num_devices, memory = draft.num_devices, known(draft.host).memory
    free_bytes = None if memory is None or memory.device is None else memory.device.free_bytes
    kept = kept_settings(draft.config)
    fixed = kept if draft.outer is None else {**kept, "parallel.num_gpus": num_devices}
    config = with_fixed(draft.config, fixed)
    choice = pick_without_lengths(config, num_devices, free_bytes, device_type=draft.device_type)
    if choice is None:
        if draft.config.task in CAUSAL_TASKS:
            draft = read_data_early(draft)
        choice = pick(config, num_devices, free_bytes, device_type=draft.device_type)
    _log_strategy(f"{choice.layout.text()}, chosen by `mode: auto`: {choice.why}")
    for remark in choice.remarks:
        logger.info(UserText("auto: {remark}", code="auto-remark", remark=remark))
    settings = {**kept, **choice.settings}
    draft = draft.with_config(with_settings(draft.config, settings))
    return _with_layout(replace(draft, settings=settings), choice.layout)


def _log_strategy(text: str) -> None:
    # The event log contains this in its `run_start` event.
    logger.info(f"strategy: {text}", extra=CONSOLE_ONLY)


def _with_layout(draft: Draft, chosen: ParallelLayout) -> Draft:
    """Return the draft with a layout, whose processes include the servers."""
    num_servers = get_spec(chosen.strategy).extra_ranks(draft.config)
    num_processes = chosen.num_processes + num_servers
    return replace(draft, layout=replace(chosen, num_processes=num_processes))


def set_accumulation(draft: Draft) -> Draft:
    """Set the gradient accumulation that follows from a global batch size in the config."""
    return draft.with_config(with_accumulation(draft.config, known(draft.layout).axes.replicas))


def check_support(draft: Draft) -> None:
    """Check that the strategy supports the config, the hosts, the launcher and the devices."""
    chosen = known(draft.layout)
    num_launched = None if draft.outer is None else draft.outer.world_size
    place = Placement(draft.device_type, draft.config.parallel.nnodes, num_launched)
    check_placement(chosen.strategy, draft.config, place)
    check_strategy(chosen.strategy, draft.config, chosen.axes)
    if chosen.axes.context > 1:
        method_of_run(draft.config, chosen.axes, draft.device_type)


def check_images(draft: Draft) -> None:
    """Check that a vision-language model is not divided in a way that vision towers do not
    support."""
    check_vision_language(draft.config, known(draft.layout).axes)
    check_router_loss(draft.config, known(draft.layout).axes)


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

"""The memory settings that were chosen for a run: ``chosen.json`` beside its ``config.yaml``.

``config.yaml`` has the values of all settings, so the file alone does not tell which of them the
user left open. What ``chosen.json`` lists stays open when the run resumes, and when ``config.yaml``
itself is started.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.config.yaml_read import Document
from paceline.core.texts import UserText

SIZE = "train_args.per_device_train_batch_size"
ACCUMULATION = "train_args.gradient_accumulation_steps"
RECOMPUTATION = "train_args.gradient_checkpointing"
OFFLOAD = "parallel.cpu_offload"
EVAL_SIZE = "train_args.per_device_eval_batch_size"
#: Settings that decide how much memory a run takes and, up to rounding, not what it trains.
MEMORY_SETTINGS = (SIZE, ACCUMULATION, RECOMPUTATION, OFFLOAD, EVAL_SIZE)

#: Dotted key → value of a setting.
ChosenValue = str | int | float | bool
ChosenSettings = Mapping[str, ChosenValue]
_FILE = "chosen.json"


def read_chosen(config_file: Path) -> dict[str, ChosenValue]:
    """Return the settings that were chosen for the run of a ``config.yaml``; empty if there are
    none or if the file cannot be read."""
    if config_file.name != "config.yaml":
        return {}
    try:
        content = json.loads(config_file.with_name(_FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if key in MEMORY_SETTINGS}


def open_settings(config: Config, *, is_cpu: bool) -> tuple[str, ...]:
    """Return the memory settings that the config leaves open, by dotted key."""
    args, parallel = config.train_args, config.parallel
    is_set = args.model_fields_set
    has_open_sizes = args.auto_find_batch_size or not (
        is_set & {"per_device_train_batch_size", "gradient_accumulation_steps"}
    )
    is_open = {
        SIZE: has_open_sizes,
        ACCUMULATION: has_open_sizes,
        RECOMPUTATION: config.task in CAUSAL_TASKS and "gradient_checkpointing" not in is_set,
        OFFLOAD: not is_cpu and "cpu_offload" not in parallel.model_fields_set,
        EVAL_SIZE: "per_device_eval_batch_size" not in is_set,
    }
    return tuple(key for key in MEMORY_SETTINGS if is_open[key])


def values_of(config: Config, keys: tuple[str, ...]) -> dict[str, ChosenValue]:
    """Return the values of memory settings that have one, as ``chosen.json`` has them."""
    values: dict[str, ChosenValue] = {}
    for key in keys:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value is not None:
            values[key] = value
    return values


def changed_settings(config: Config, settings: ChosenSettings) -> dict[str, ChosenValue]:
    """Return the memory settings that differ from the config's, where `auto` stands for no
    recomputation."""
    current = {**values_of(config, tuple(settings)), RECOMPUTATION: config.train_args.recomputation}
    return {key: value for key, value in settings.items() if value != current.get(key)}


def open_text(keys: list[str]) -> str:
    """Return the notice about settings of a ``config.yaml`` that stay open."""
    names = ", ".join(f"`{key}`" for key in keys)
    return UserText(
        "{names}: chosen by Paceline for an earlier run, so they stay open ({file})",
        code="chosen-keys-open",
        names=names,
        file=_FILE,
    )


def without_chosen(document: Document, config_file: Path) -> tuple[Document, list[str]]:
    """Return a config file without the settings that were chosen, and their keys. A setting whose
    value was edited since is kept, because the user has set it."""
    value, removed = deepcopy(document.value), []
    for key, chosen in read_chosen(config_file).items():
        section, _, name = key.partition(".")
        settings = value.get(section)
        if isinstance(settings, dict) and settings.get(name) == chosen:
            del settings[name]
            removed.append(key)
    return (replace(document, value=value), removed) if removed else (document, [])

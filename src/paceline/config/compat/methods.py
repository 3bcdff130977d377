"""Training methods that Paceline does not have, and the keys by which a config asks for one of
them.

A config for preference optimization, reinforcement learning, reward modeling or distillation must
not train supervised fine-tuning instead. Most such configs do not name their method: TRL's trainers
are chosen by the script that reads the file. So a method is recognized by the keys that only the
trainers of that method read.
"""

from __future__ import annotations

from typing import Any

from paceline.config.compat.keys import Ignored
from paceline.config.compat.methods_table import (
    DATA_COLUMNS,
    DATA_TYPES,
    LOSSES,
    METHOD_KEYS,
    METHODS,
    SUPERVISED_LOSSES,
)

_NAMED_BY = ("task", "stage", "rl", "rlhf_type")
#: keys that hold the data; their columns may ask for a method, and they are read all the same
DATA_KEYS = (
    "dataset",
    "datasets",
    "dataset_mixture",
    "val_dataset",
    "eval_dataset",
    "test_datasets",
)
#: keys of TRL's that only control what is logged: false asks for nothing
_LOGGING_KEYS = ("log_completions", "wandb_log_unique_prompts")
_SPELLINGS = {
    "reward": "rm",
    "reward_model": "rm",
    "rlhf": "dpo",
    "onlinedpo": "online_dpo",
    "nashmd": "nash_md",
    "ipo": "ipo",
}


def named_method(key: str, value: Any) -> str | None:
    """The method that a value names: `stage: dpo`, `rl: kto`, `reward_model: true`; None if it
    names none."""
    if key in ("reward_model", "process_reward_model") and str(value).lower() == "true":
        return "rm" if key == "reward_model" else "prm"
    if key not in _NAMED_BY or not isinstance(value, str):
        return None
    name = value.strip().lower().replace("-", "_")
    name = _SPELLINGS.get(name, name)
    return name if name in METHODS else None


def methods_of(key: str, value: Any) -> tuple[str, ...]:
    """The methods of which ``key: value`` is a setting; empty if it is not a setting of such a
    method, or turns one off."""
    named = named_method(key, value)
    if named is not None:
        return (named,)
    if key == "loss_type":
        return _methods_of_loss(value)
    if key in DATA_KEYS:
        return _methods_of_data(value)
    if key == "pref_loss" and value in METHODS:
        return (value,)
    entry = METHOD_KEYS.get(key)
    if entry is None or value in (None, "", [], {}):
        return ()
    tools, methods = entry
    # TRL refuses a key that its trainer does not have, so the key alone tells the trainer;
    # elsewhere false turns it off.
    is_off = ("t" not in tools or key in _LOGGING_KEYS) and (
        value is False or str(value).lower() in ("false", "none", "no")
    )
    return () if is_off else methods


def _methods_of_loss(value: Any) -> tuple[str, ...]:
    names = [str(one).strip().lower() for one in (value if isinstance(value, list) else [value])]
    if all(name in SUPERVISED_LOSSES for name in names):
        return ()
    return next((LOSSES[name] for name in names if name in LOSSES), ())


def _methods_of_data(value: Any) -> tuple[str, ...]:
    """By the columns that a source lists, as alignment-handbook's `dataset_mixture` does, or by
    axolotl's `type`."""
    sources = value.get("datasets") if isinstance(value, dict) and "datasets" in value else value
    for source in sources if isinstance(sources, list) else [sources]:
        if not isinstance(source, dict):
            continue
        kind = str(source.get("type")).partition(".")[0]
        if kind in DATA_TYPES:
            return DATA_TYPES[kind]
        columns = source.get("columns")
        if isinstance(columns, list | dict):
            named = [{str(name) for name in columns}]
            if isinstance(columns, dict):
                named.append({str(name) for name in columns.values()})
            for needed, methods in DATA_COLUMNS:
                if any(needed <= names for names in named):
                    return methods
    return ()


def method_setting(key: str) -> Ignored | None:
    """The entry of a key that belongs to such a method, for a config in which it asks for nothing;
    None for other keys."""
    if key not in METHOD_KEYS:
        return None
    tools, methods = METHOD_KEYS[key]
    return Ignored(
        tools, "info", f"it is a setting of {', '.join(methods)}, which this config does not train"
    )

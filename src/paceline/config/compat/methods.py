"""Training methods that Paceline does not have, and the keys by which a config asks for one of
them.

A config for preference optimization, reinforcement learning, reward modeling or distillation must
not train supervised fine-tuning instead. Most such configs do not name their method: TRL's trainers
are chosen by the script that reads the file. So a method is recognized by the keys that only the
trainers of that method read.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.config.compat.conversion import read_table
from paceline.config.compat.keys import Ignored

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


@dataclass(frozen=True)
class MethodTables:
    """The tables of ``methods.yaml``.

    Args:
        methods: what each method is, by its name.
        keys: key → (letters of the tools, the methods that read it).
        losses: values of TRL's and ms-swift's `loss_type` → methods.
        supervised_losses: values of `loss_type` with which supervised fine-tuning is trained.
        data_types: beginnings of axolotl's `type` of a source → methods.
        data_columns: (columns of preference data that a source lists, methods).
    """

    methods: dict[str, str]
    keys: dict[str, tuple[str, tuple[str, ...]]]
    losses: dict[str, tuple[str, ...]]
    supervised_losses: frozenset[str]
    data_types: dict[str, tuple[str, ...]]
    data_columns: list[tuple[frozenset[str], tuple[str, ...]]]


@cache
def method_tables() -> MethodTables:
    """Read ``methods.yaml``, once."""
    table = read_table("methods.yaml")
    return MethodTables(
        methods=table["methods"],
        keys={
            key: (tools, tuple(group["methods"].split()))
            for group in table["keys"]
            for tools, keys in group["keys"].items()
            for key in keys.split()
        },
        losses={
            loss: tuple(group["methods"].split())
            for group in table["losses"]
            for loss in group["losses"].split()
        },
        supervised_losses=frozenset([*table["supervised_losses"].split(), "none", ""]),
        data_types={kind: tuple(names.split()) for kind, names in table["data_types"].items()},
        data_columns=[
            (frozenset(group["columns"].split()), tuple(group["methods"].split()))
            for group in table["data_columns"]
        ],
    )


def named_method(key: str, value: Any) -> str | None:
    """The method that a value names: `stage: dpo`, `rl: kto`, `reward_model: true`; None if it
    names none."""
    if key in ("reward_model", "process_reward_model") and str(value).lower() == "true":
        return "rm" if key == "reward_model" else "prm"
    if key not in _NAMED_BY or not isinstance(value, str):
        return None
    name = value.strip().lower().replace("-", "_")
    name = _SPELLINGS.get(name, name)
    return name if name in method_tables().methods else None


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
    if key == "pref_loss" and value in method_tables().methods:
        return (value,)
    entry = method_tables().keys.get(key)
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
    tables = method_tables()
    losses = [str(loss).strip().lower() for loss in (value if isinstance(value, list) else [value])]
    if all(loss in tables.supervised_losses for loss in losses):
        return ()
    return next((tables.losses[loss] for loss in losses if loss in tables.losses), ())


def _methods_of_data(value: Any) -> tuple[str, ...]:
    """By the columns that a source lists, as alignment-handbook's `dataset_mixture` does, or by
    axolotl's `type`."""
    tables = method_tables()
    sources = value.get("datasets") if isinstance(value, dict) and "datasets" in value else value
    for source in sources if isinstance(sources, list) else [sources]:
        if not isinstance(source, dict):
            continue
        kind = str(source.get("type")).partition(".")[0]
        if kind in tables.data_types:
            return tables.data_types[kind]
        columns = source.get("columns")
        if isinstance(columns, list | dict):
            named = [{str(name) for name in columns}]
            if isinstance(columns, dict):
                named.append({str(name) for name in columns.values()})
            for needed, methods in tables.data_columns:
                if any(needed <= names for names in named):
                    return methods
    return ()


def method_setting(key: str) -> Ignored | None:
    """The entry of a key that belongs to such a method, for a config in which it asks for nothing;
    None for other keys."""
    if key not in method_tables().keys:
        return None
    tools, methods = method_tables().keys[key]
    return Ignored(
        tools, "info", f"it is a setting of {', '.join(methods)}, which this config does not train"
    )

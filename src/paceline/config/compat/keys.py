"""Keys of other tools: how each is read, why some have no effect, and which belong to an
unsupported training method.

The tables are data: ``aliases.yaml`` (keys that are read as native keys), ``ignored.yaml`` and
``methods.yaml``.

A config for preference optimization, reinforcement learning, reward modeling or distillation must
not train supervised fine-tuning instead. Most such configs do not name their method: TRL's trainers
are chosen by the script that reads the file. A method is therefore recognized by the keys that only
its trainers read.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.config.compat import conversion, datasets, parallel_values, values
from paceline.config.compat.conversion import Convert, by_case, read_table
from paceline.config.compat.llamafactory import v1
from paceline.config.entries import FOREIGN_SECTIONS
from paceline.config.schema.tasks import ANSWER_TASKS, ROLLOUT_TASKS

#: Modules with the functions that ``convert`` names in ``aliases.yaml``.
_CONVERTERS = {
    "": conversion,
    "datasets": datasets,
    "llamafactory_v1": v1,
    "parallel_values": parallel_values,
    "values": values,
}

TOOLS = {
    "s": "ms-swift",
    "l": "LLaMA-Factory",
    "a": "axolotl",
    "t": "TRL",
    "c": "Accelerate",
    "u": "Unsloth",
}


@dataclass(frozen=True)
class Alias:
    """A key that is read as a native key.

    Args:
        target: the native key, dotted; the first one if a value sets several; empty if none is
            ever set.
        tools: letters of :data:`TOOLS`; empty if the key is native and only some of its values
            belong to other tools.
        convert: converts the value.
        is_weak: whether any other key that sets the same overrides what the value sets.
        meaning: for the documentation, if the conversion is more than a rename.
    """

    target: str
    tools: str
    convert: Convert
    is_weak: bool = False
    meaning: str = ""


@dataclass(frozen=True)
class Ignored:
    """A key of other tools that has no effect. ``level`` is ``warning`` if the key would change
    the training."""

    tools: str
    level: str
    reason: str


@dataclass(frozen=True)
class AliasTables:
    """The sections of ``aliases.yaml``, which its comments describe, each by key."""

    aliases: dict[str, Alias]
    sections: dict[str, Alias]
    shared: dict[str, Alias]
    shared_if_foreign: dict[str, Alias]


@dataclass(frozen=True)
class IgnoredTables:
    """The entries of ``ignored.yaml`` by key, and by key prefix."""

    keys: dict[str, Ignored]
    prefixes: dict[str, Ignored]


@cache
def alias_tables() -> AliasTables:
    """Read ``aliases.yaml``."""
    return AliasTables(
        **{
            section: {key: _alias(**entry) for key, entry in entries.items()}
            for section, entries in read_table("aliases.yaml").items()
        }
    )


def _alias(
    tools: str = "",
    target: str = "",
    convert: str = "to()",
    weak: bool = False,
    meaning: str = "",
) -> Alias:
    path, bracket, argument = convert.removesuffix(")").partition("(")
    module, _, name = path.rpartition(".")
    if module or bracket:
        function = getattr(_CONVERTERS[module], name)
        converter = function(argument or target) if bracket else function
    else:
        converter = by_case(name)
    return Alias(target, tools, converter, weak, meaning)


@cache
def ignored_tables() -> IgnoredTables:
    """Read ``ignored.yaml``."""
    tables: dict[str, dict[str, Ignored]] = {"keys": {}, "prefixes": {}}
    for group in read_table("ignored.yaml"):
        for name, table in tables.items():
            for tools, keys in group.get(name, {}).items():
                ignored = Ignored(tools, group["level"], group["reason"])
                table.update(dict.fromkeys(keys.split(), ignored))
    return IgnoredTables(**tables)


def alias_of(section: str, key: str) -> Alias | None:
    """Return the alias for ``key`` in ``section`` (empty for the top level), or None.

    Aliases are read at the top level, under ``train_args``, and in the section of their target.
    """
    tables = alias_tables()
    if f"{section}.{key}" in tables.sections:
        return tables.sections[f"{section}.{key}"]
    alias = tables.aliases.get(key)
    if alias is None or section in ("", "train_args", *FOREIGN_SECTIONS) or not alias.target:
        return alias
    is_inside = alias.target.startswith(f"{section}.")
    # Unsloth's settings of vision models are in its section `lora`.
    return alias if is_inside or (section == "lora" and alias.tools == "u") else None


def ignored_of(key: str) -> Ignored | None:
    """Return the entry of a key that has no effect, or None."""
    tables = ignored_tables()
    return tables.keys.get(key) or next(
        (entry for prefix, entry in tables.prefixes.items() if key.startswith(prefix)), None
    )


def all_foreign() -> set[str]:
    """Return every known key of other tools."""
    return set(alias_tables().aliases) | set(ignored_tables().keys)


def tool_names(letters: str, scores: Counter[str]) -> str:
    """Return the likeliest tools of a key: at most two, or one if the other keys decide."""
    ranked = sorted(letters, key=lambda letter: -scores[letter])
    best = max(scores.values(), default=0)
    leaders = [letter for letter in TOOLS if scores[letter] == best]
    if len(leaders) == 1 and leaders[0] in letters:
        return TOOLS[leaders[0]]
    return ", ".join(TOOLS[letter] for letter in ranked[:2])


_NAMED_BY = ("task", "stage", "rl", "rlhf_type")
#: Keys with data sources, which are read even if their columns belong to an unsupported method.
DATA_KEYS = (
    "dataset",
    "datasets",
    "dataset_mixture",
    "val_dataset",
    "eval_dataset",
    "test_datasets",
)
#: Keys of TRL that only control logging, so that false does not request a method.
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
        methods: name of a method → its description.
        keys: key → (letters of the tools, the methods that read it).
        losses: values of TRL's and ms-swift's `loss_type` → methods.
        supervised_losses: values of `loss_type` for supervised fine-tuning.
        data_types: prefixes of axolotl's `type` of a source → methods.
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
    """Read ``methods.yaml``."""
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
    """Return the method that a value names (`stage: dpo`, `rl: kto`, `reward_model: true`), or
    None."""
    if key in ("reward_model", "process_reward_model") and str(value).lower() == "true":
        return "rm" if key == "reward_model" else "prm"
    if key not in _NAMED_BY or not isinstance(value, str):
        return None
    if key == "task" and value in (*ANSWER_TASKS, *ROLLOUT_TASKS):
        return None
    name = value.strip().lower().replace("-", "_")
    name = _SPELLINGS.get(name, name)
    return name if name in method_tables().methods else None


def task_of_method(method: str) -> str | None:
    """Return Paceline's task that trains with a method of ``methods.yaml``, or None."""
    tasks: dict[str, dict[str, str]] = {}
    for name in ("preference.yaml", "rollouts.yaml"):
        tasks |= read_table(name)["tasks"]
    return tasks[method]["task"] if method in tasks else None


def methods_of(key: str, value: Any) -> tuple[str, ...]:
    """Return the unsupported methods that have the setting ``key: value``; empty for other keys and
    for values that turn a method off."""
    named = named_method(key, value)
    if named is not None:
        return (named,)
    if key == "loss_type":
        return _methods_of_loss(value)
    if key in DATA_KEYS:
        return _methods_of_data(value)
    if key == "pref_loss" and isinstance(value, str) and value in method_tables().methods:
        return (value,)
    entry = method_tables().keys.get(key)
    if entry is None or value in (None, "", [], {}):
        return ()
    tools, methods = entry
    # TRL rejects keys that its trainer does not have, so the key alone identifies the trainer;
    # elsewhere false turns the method off.
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
    """Return the methods by the columns that a source lists (alignment-handbook's
    `dataset_mixture`), or by axolotl's `type`."""
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
    """Return the entry of an unsupported method's key that is turned off; None for other keys."""
    if key not in method_tables().keys:
        return None
    tools, methods = method_tables().keys[key]
    return Ignored(
        tools, "info", f"it is a setting of {', '.join(methods)}, which this config does not use"
    )

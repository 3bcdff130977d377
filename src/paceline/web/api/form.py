"""The form, with a field for each config key, generated from the JSON schema of the config."""

from functools import cache
from typing import Any, TypedDict

from pydantic import JsonValue

from paceline.config.fields import KEYS, SECTIONS, chinese, describe
from paceline.config.schema import Config
from paceline.config.schema.tasks import TASKS
from paceline.parallel.registry import STRATEGIES
from paceline.web.presets import BUILT_IN_DATASETS, BUILT_IN_MODELS, HUB_MODELS

#: Keys that the form shows first. All others are in collapsed groups.
ESSENTIAL = (
    "model", "dataset", "task", "lora.enable", "parallel.mode", "parallel.device",
    "train_args.learning_rate", "train_args.num_train_epochs",
    "train_args.per_device_train_batch_size", "train_args.max_length",
)  # fmt: skip
#: Keys that are often set, by group. All others are in their section.
COMMON: dict[str, tuple[str, ...]] = {
    "data": ("val_dataset", "split_dataset_ratio", "format", "system"),
    "training": (
        "train_args.max_steps", "train_args.gradient_accumulation_steps",
        "train_args.warmup_ratio", "train_args.precision", "train_args.gradient_checkpointing",
        "train_args.save_steps", "train_args.eval_steps", "train_args.seed",
    ),
    "lora": ("lora.rank", "lora.alpha", "lora.dropout", "lora.target_modules"),
}  # fmt: skip

#: Common values of keys that accept any text. The form offers them in a list, and "other".
SUGGESTED: dict[str, tuple[str, ...]] = {
    "task": TASKS,
    "parallel.mode": ("auto", *STRATEGIES),
    "parallel.device": ("auto", "cpu", "cuda", "mps", "xpu"),
    "train_args.gradient_checkpointing": ("auto", "none", "selective", "full"),
}
#: Values that are proposed while typing.
PROPOSED: dict[str, tuple[str, ...]] = {
    "model": (*BUILT_IN_MODELS, *HUB_MODELS),
    "dataset": tuple(BUILT_IN_DATASETS),
    "lora.target_modules": ("all-linear",),
    "parallel.num_gpus": ("auto", "1", "2", "4", "8"),
}

#: The parts of a JSON schema that pydantic writes for the config.
Schema = TypedDict(
    "Schema",
    {
        "$defs": dict[str, "Schema"],
        "$ref": str,
        "anyOf": list["Schema"],
        "const": JsonValue,
        "description": str,
        "enum": list[JsonValue],
        "exclusiveMaximum": float,
        "exclusiveMinimum": float,
        "maximum": float,
        "minimum": float,
        "properties": dict[str, "Schema"],
        "type": str,
    },
    total=False,
)


class FieldGroup(TypedDict):
    """Keys that the form shows together. ``essential``: not collapsed."""

    name: str
    essential: bool
    help: str
    help_zh: str
    keys: list[str]


class FormField(TypedDict):
    """The field of a key.

    Attributes:
        kind: bool, integer, number, choice, text or yaml.
        help, help_zh: the description in English and Chinese.
        takes: the accepted values as text.
        suggested: common values of a key that accepts others too.
        proposed: values that are proposed while typing.
        exclusive: which of the bounds are excluded.
    """

    key: str
    kind: str
    help: str
    help_zh: str
    takes: str
    default: object
    required: bool
    nullable: bool
    choices: list[JsonValue]
    suggested: list[str]
    proposed: list[str]
    minimum: float | None
    maximum: float | None
    exclusive: list[str]


class Form(TypedDict):
    """``fields`` are by key."""

    schema: Schema
    groups: list[FieldGroup]
    fields: dict[str, FormField]


_NUMERIC = ("integer", "number")
_BARE = ("null", "boolean")  # types that can be part of a list of choices


@cache
def form() -> Form:
    schema = _config_schema()
    shown = {*ESSENTIAL, *(key for keys in COMMON.values() for key in keys)}
    rest = [key for key in KEYS if key not in shown and key not in ("output_dir", "resume")]
    groups = [_group("essential", list(ESSENTIAL), is_essential=True)]
    groups += [
        _group(name, [*keys, *(key for key in rest if key.startswith(f"{name}."))])
        for name, keys in COMMON.items()
    ]
    groups.append(_group("more", [key for key in rest if "." not in key]))
    for name, kind in SECTIONS.items():
        if name not in COMMON:
            keys = [key for key in rest if key.startswith(f"{name}.")]
            help = (kind.__doc__ or "").split("\n")[0]
            groups.append(_group(name, keys, help=help, help_zh=chinese()[name]))
    return {
        "schema": schema,
        "groups": groups,
        "fields": {key: _field(key, schema) for key in KEYS},
    }


def _group(
    name: str, keys: list[str], is_essential: bool = False, help: str = "", help_zh: str = ""
) -> FieldGroup:
    return {
        "name": name, "essential": is_essential, "help": help, "help_zh": help_zh, "keys": keys,
    }  # fmt: skip


def _config_schema() -> Schema:
    content: Any = Config.model_json_schema()
    schema: Schema = content
    return schema


def _field(key: str, schema: Schema) -> FormField:
    section, _, name = key.rpartition(".")
    parent = schema if not section else _resolved(schema["properties"][section], schema)
    prop, info = parent["properties"][name], KEYS[key]
    members = _members(prop, schema)
    types = {member.get("type") for member in members} - {"null"}
    choices = [
        choice
        for member in members
        for choice in member.get("enum", [member["const"]] if "const" in member else [])
    ]
    if "boolean" in types and choices:
        choices += ["true", "false"]
    has_only_choices = all(
        "enum" in member or "const" in member or member.get("type") in _BARE for member in members
    )
    unbounded: Schema = {}
    bounds = next((each for each in members if each.get("type") in _NUMERIC), unbounded)
    return {
        "key": key,
        "kind": _kind(types, choices, has_only_choices),
        "help": info.description or prop.get("description") or "",
        "help_zh": chinese()[key],
        "takes": describe(info),
        "default": None if info.is_required() else info.get_default(call_default_factory=True),
        "required": info.is_required(),
        "nullable": any(member.get("type") == "null" for member in members),
        "choices": choices,
        "suggested": list(SUGGESTED.get(key, ())),
        "proposed": list(PROPOSED.get(key, ())),
        "minimum": bounds.get("minimum", bounds.get("exclusiveMinimum")),
        "maximum": bounds.get("maximum", bounds.get("exclusiveMaximum")),
        "exclusive": [
            bound for bound in ("exclusiveMinimum", "exclusiveMaximum") if bound in bounds
        ],
    }


def _kind(types: set[str | None], choices: list[JsonValue], has_only_choices: bool) -> str:
    if types == {"boolean"}:
        return "bool"
    if choices and has_only_choices:
        return "choice"
    if types <= {*_NUMERIC} and types and not choices:
        return "integer" if types == {"integer"} else "number"
    return "yaml" if types & {"array", "object"} else "text"


def _members(prop: Schema, schema: Schema) -> list[Schema]:
    """Return the members of a union, or the single type, with references resolved."""
    prop = _resolved(prop, schema)
    if "anyOf" not in prop:
        return [prop]
    return [inner for member in prop["anyOf"] for inner in _members(member, schema)]


def _resolved(prop: Schema, schema: Schema) -> Schema:
    if "$ref" not in prop:
        return prop
    target = schema["$defs"][prop["$ref"].rpartition("/")[2]]
    resolved: Schema = {**target, **prop}
    del resolved["$ref"]
    return resolved

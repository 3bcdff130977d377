"""The form, with a field for each config key, generated from the JSON schema of the config; and
presets for common jobs."""

from functools import cache
from typing import Any, TypedDict

from pydantic import JsonValue

from paceline.config.fields import KEYS, SECTIONS, chinese, describe
from paceline.config.schema import Config
from paceline.config.schema.tasks import ANSWER_TASKS
from paceline.parallel.registry import STRATEGIES

#: Keys that the form shows first, by group. All others are in their section, which is collapsed.
COMMON: dict[str, tuple[str, ...]] = {
    "what": ("model", "task", "system"),
    "data": ("dataset", "val_dataset", "split_dataset_ratio", "format", "train_args.max_length"),
    "training": (
        "train_args.learning_rate", "train_args.num_train_epochs", "train_args.max_steps",
        "train_args.per_device_train_batch_size", "train_args.gradient_accumulation_steps",
        "train_args.warmup_ratio", "train_args.precision", "train_args.gradient_checkpointing",
        "train_args.save_steps", "train_args.eval_steps", "train_args.seed",
    ),
    "lora": ("lora.enable", "lora.rank", "lora.alpha", "lora.dropout", "lora.target_modules"),
    "devices": ("parallel.mode", "parallel.num_gpus", "parallel.device"),
}  # fmt: skip

#: Suggested values of keys that accept any text.
SUGGESTED: dict[str, tuple[str, ...]] = {
    "model": (
        "builtin:qwen2-tiny",
        "builtin:qwen2-micro",
        "builtin:small-cnn",
        "builtin:mlp",
        "builtin:dlrm",
    ),
    "task": ("sft", "pretrain", *ANSWER_TASKS, "classify", "recommend"),
    "parallel.mode": ("auto", *STRATEGIES),
    "parallel.device": ("auto", "cpu", "cuda", "mps", "xpu"),
    "lora.target_modules": ("all-linear",),
    "parallel.num_gpus": ("auto", "1", "2", "4", "8"),
}

#: The config of each common job.
PRESETS = {
    "first": """\
# A first run: train a small model on Python's own documentation.
# Nothing is downloaded.
model: builtin:qwen2-tiny
dataset: builtin:python-docs
split_dataset_ratio: 0.05
train_args:
  max_length: 256
  per_device_train_batch_size: 8
  max_steps: 90
  warmup_ratio: 0.1
  eval_steps: 45
""",
    "lora": """\
# Fine-tune a pretrained model on your examples with low-rank adapters:
# needs little memory and gives a small result.
model: Qwen/Qwen2.5-0.5B-Instruct
dataset: ./datasets/mine.jsonl
split_dataset_ratio: 0.05
lora:
  enable: true
  rank: 16
  alpha: 32
train_args:
  learning_rate: 1e-4
  num_train_epochs: 3
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 4
  warmup_ratio: 0.05
""",
    "full": """\
# Fine-tune all weights of a pretrained model on your examples.
model: Qwen/Qwen2.5-0.5B-Instruct
dataset: ./datasets/mine.jsonl
split_dataset_ratio: 0.05
train_args:
  learning_rate: 2e-5
  num_train_epochs: 3
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 8
  warmup_ratio: 0.05
  gradient_checkpointing: full
""",
    "pretrain": """\
# Train on plain text with loss on every token: a new model, or a pretrained one that
# has to learn a language or a domain.
model: builtin:qwen2-tiny
task: pretrain
dataset: builtin:python-source
split_dataset_ratio: 0.02
train_args:
  learning_rate: 1e-3
  num_train_epochs: 1
  per_device_train_batch_size: 8
  max_length: 512
  warmup_ratio: 0.05
""",
    "classify": """\
# Classify images. For your own images, use a folder with one subfolder per class.
model: builtin:small-cnn
task: classify
dataset: builtin:digits
split_dataset_ratio: 0.1
train_args:
  learning_rate: 3e-3
  num_train_epochs: 8
  per_device_train_batch_size: 32
  warmup_ratio: 0.1
""",
    "recommend": """\
# Predict clicks with embedding tables. For your own log, use a CSV file and name its
# columns in `recommend`.
model: builtin:dlrm
task: recommend
dataset: builtin:clicks
split_dataset_ratio: 0.1
recommend:
  embedding_dim: 8
train_args:
  learning_rate: 1e-2
  num_train_epochs: 2
  per_device_train_batch_size: 512
  warmup_ratio: 0.05
""",
    "own": """\
# Your own model, data and loss: a subclass of paceline.Task in a Python file.
model: my-model        # shown in the report
task: ./my_task.py:MyTask
dataset: my-data       # shown in the report if the task creates its own data
train_args:
  learning_rate: 1e-3
  num_train_epochs: 3
  per_device_train_batch_size: 32
""",
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
    """Keys that the form shows together. ``common``: not collapsed."""

    name: str
    common: bool
    help: str
    help_zh: str
    keys: list[str]


class FormField(TypedDict):
    """The field of a key.

    Attributes:
        kind: bool, integer, number, choice, text or yaml.
        help, help_zh: the description in English and Chinese.
        takes: the accepted values as text.
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
    common = {key for keys in COMMON.values() for key in keys}
    top_level = [
        key
        for key in KEYS
        if "." not in key and key not in common and key not in ("output_dir", "resume")
    ]
    groups = [_group(name, list(keys), is_common=True) for name, keys in COMMON.items()]
    groups.append(_group("more", top_level))
    for name, kind in SECTIONS.items():
        keys = [key for key in KEYS if key.startswith(f"{name}.") and key not in common]
        help = (kind.__doc__ or "").split("\n")[0]
        groups.append(_group(name, keys, help=help, help_zh=chinese()[name]))
    return {
        "schema": schema,
        "groups": groups,
        "fields": {key: _field(key, schema) for key in KEYS},
    }


def _group(
    name: str, keys: list[str], is_common: bool = False, help: str = "", help_zh: str = ""
) -> FieldGroup:
    return {"name": name, "common": is_common, "help": help, "help_zh": help_zh, "keys": keys}


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

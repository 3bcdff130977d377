"""The form: one field a key of the config, made from the JSON schema of the config, and presets for
the common jobs."""

from functools import cache
from typing import Any

from paceline.config.fields import KEYS, SECTIONS, describe
from paceline.config.schema import Config

#: Keys that the form shows first, by group; all others stand in the section they belong to, closed
#: at first.
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

#: What may be chosen where any text is taken; the first is no better than the others.
SUGGESTED: dict[str, tuple[str, ...]] = {
    "model": (
        "builtin:qwen2-tiny",
        "builtin:qwen2-micro",
        "builtin:small-cnn",
        "builtin:mlp",
        "builtin:dlrm",
    ),
    "task": ("sft", "pretrain", "classify", "recommend"),
    "parallel.mode": (
        "auto",
        "single",
        "dp",
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "deepspeed",
        "tensor",
        "pipeline",
        "hybrid",
        "local_sgd",
        "diloco",
        "parameter_server",
    ),
    "parallel.device": ("auto", "cpu", "cuda", "mps", "xpu"),
    "lora.target_modules": ("all-linear",),
    "parallel.num_gpus": ("auto", "1", "2", "4", "8"),
}

PRESETS: list[dict[str, str]] = [
    {
        "id": "first",
        "yaml": (
            """# The first run: a small model learns from Python's own documentation.
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
"""
        ),
    },
    {
        "id": "lora",
        "yaml": (
            """# A pretrained model learns from your examples through low-rank adapters:
# little memory, a small result.
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
"""
        ),
    },
    {
        "id": "full",
        "yaml": (
            """# All weights of a pretrained model are trained on your examples.
model: Qwen/Qwen2.5-0.5B-Instruct
dataset: ./datasets/mine.jsonl
split_dataset_ratio: 0.05
train_args:
  learning_rate: 2e-5
  num_train_epochs: 3
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 8
  warmup_ratio: 0.05
  gradient_checkpointing: true
"""
        ),
    },
    {
        "id": "pretrain",
        "yaml": (
            """# Every token of plain text carries loss: a new model, or one that goes on to learn
# a language or a field.
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
"""
        ),
    },
    {
        "id": "classify",
        "yaml": (
            """# Images into classes; of your own images: a folder with one subfolder a class.
model: builtin:small-cnn
task: classify
dataset: builtin:digits
split_dataset_ratio: 0.1
train_args:
  learning_rate: 3e-3
  num_train_epochs: 8
  per_device_train_batch_size: 32
  warmup_ratio: 0.1
"""
        ),
    },
    {
        "id": "recommend",
        "yaml": (
            """# The chance of a click, with embedding tables; your own log: a CSV file
# whose columns `recommend` names.
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
"""
        ),
    },
    {
        "id": "own",
        "yaml": (
            """# Your own model, data and loss: a class in a Python file (docs/how-to/own-task.md).
model: my-model        # a name for the report
task: ./my_task.py:MyTask
dataset: my-data       # likewise, where the task makes its own data
train_args:
  learning_rate: 1e-3
  num_train_epochs: 3
  per_device_train_batch_size: 32
"""
        ),
    },
]


Schema = dict[str, Any]  # a JSON schema as pydantic writes it
_BARE = ("null", "boolean")  # kinds whose few values stand beside words in a list of choices


@cache
def form() -> Schema:
    """``{schema, groups: [{name, help, keys}], fields: {key: Field}}``. A field: ``key, kind``
    (bool, integer, number, choice, text, yaml), ``help, takes`` (in words), ``default, required,
    choices, minimum, maximum, exclusive`` (bounds left out)."""
    schema = Config.model_json_schema()
    common = {key for keys in COMMON.values() for key in keys}
    groups = [
        {"name": name, "common": True, "help": "", "keys": list(keys)}
        for name, keys in COMMON.items()
    ]
    rest = [
        key
        for key in KEYS
        if "." not in key and key not in common and key not in ("output_dir", "resume")
    ]
    groups.append({"name": "more", "common": False, "help": "", "keys": rest})
    for name, kind in SECTIONS.items():
        keys = [key for key in KEYS if key.startswith(f"{name}.") and key not in common]
        groups.append(
            {
                "name": name,
                "common": False,
                "help": (kind.__doc__ or "").split("\n")[0],
                "keys": keys,
            }
        )
    return {
        "schema": schema,
        "groups": groups,
        "fields": {key: _field(key, schema) for key in KEYS},
    }


def _field(key: str, schema: Schema) -> Schema:
    section, _, name = key.rpartition(".")
    holder = schema if not section else _resolved(schema["properties"][section], schema)
    prop = holder["properties"][name]
    kinds = _members(prop, schema)
    types = {one.get("type") for one in kinds} - {"null"}
    choices = [
        word for one in kinds for word in one.get("enum", [one["const"]] if "const" in one else [])
    ]
    if "boolean" in types and choices:
        choices += ["true", "false"]
    numeric = next((one for one in kinds if one.get("type") in ("integer", "number")), {})
    low, high = numeric.get("minimum"), numeric.get("maximum")
    return {
        "key": key,
        "kind": _kind(
            types,
            choices,
            all("enum" in one or "const" in one or one.get("type") in _BARE for one in kinds),
        ),
        "help": KEYS[key].description or prop.get("description") or "",
        "takes": describe(KEYS[key]),
        "default": (
            None if KEYS[key].is_required() else KEYS[key].get_default(call_default_factory=True)
        ),
        "required": KEYS[key].is_required(),
        "nullable": any(one.get("type") == "null" for one in kinds),
        "choices": choices,
        "suggested": list(SUGGESTED.get(key, ())),
        "minimum": low if low is not None else numeric.get("exclusiveMinimum"),
        "maximum": high if high is not None else numeric.get("exclusiveMaximum"),
        "exclusive": [
            bound for bound in ("exclusiveMinimum", "exclusiveMaximum") if bound in numeric
        ],
    }


def _kind(types: set[Any], choices: list[str], only_choices: bool) -> str:
    if types == {"boolean"}:
        return "bool"
    if choices and only_choices:
        return "choice"
    if types <= {"integer", "number"} and types and not choices:
        return "integer" if types == {"integer"} else "number"
    return "yaml" if types & {"array", "object"} else "text"


def _members(prop: Schema, schema: Schema) -> list[Schema]:
    """The members of a union, or the one type there is, with references followed."""
    prop = _resolved(prop, schema)
    return [
        inner
        for one in prop.get("anyOf", [prop])
        for inner in ([one] if one is prop else _members(one, schema))
    ]


def _resolved(prop: Schema, schema: Schema) -> Schema:
    if "$ref" in prop:
        return {
            **schema["$defs"][prop["$ref"].rpartition("/")[2]],
            **{k: v for k, v in prop.items() if k != "$ref"},
        }
    return prop

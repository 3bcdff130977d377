"""Converters of other tools' values that ``values.yaml`` cannot express; ``aliases.yaml`` names
them."""

import json
import re
from pathlib import Path
from typing import Any, get_args

from paceline.config.chat_names import (
    FALLBACK,
    ROLES,
    TEMPLATE_NAMES,
    TOKENIZER_DEFAULT,
    canonical_name,
    is_inline,
    is_path,
)
from paceline.config.compat.conversion import (
    Conversion,
    Convert,
    UnsupportedValue,
    as_names,
    by_case,
    info,
    is_off,
    skips_off,
    warning,
)
from paceline.config.entries import as_number, quoted_names
from paceline.config.schema.base import Logger
from paceline.config.schema.lora import ALL_LINEAR, is_regex
from paceline.config.yaml_read import YamlValue
from paceline.core.errors import first_line


def adapter(value: Any) -> Conversion:
    """Convert axolotl's `adapter`: the name of the method, or the path of an adapter to continue
    training."""
    if isinstance(value, str) and (re.search(r"[/\\]", value) or value.startswith(".")):
        return adapter_path(value)
    return by_case("tuner")(value)


def adapter_path(value: Any) -> Conversion:
    paths = as_names(value)
    if not paths:
        return Conversion()
    if len(paths) > 1:
        raise UnsupportedValue(
            f"expected one adapter to continue training, got {len(paths)}",
            "keep one of them, and merge the others first",
        )
    return Conversion({"lora.adapter": paths[0]}, weak={"lora.enable": True})


def scheduler_args(value: Any) -> Conversion:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise UnsupportedValue("expected a mapping", "write it as {min_lr: 1e-6}") from None
    return Conversion({"train_args.lr_scheduler_kwargs": value})


def warmup_steps(value: Any) -> Conversion:
    value = as_number(value)
    if isinstance(value, float) and 0 < value < 1:
        return info("below 1 it is a fraction of the steps", {"train_args.warmup_ratio": value})
    return Conversion({"train_args.warmup_steps": value})


@skips_off
def profiler_steps(value: Any) -> Conversion:
    """Convert axolotl's number of steps to profile, which it counts from the first step on."""
    weak: dict[str, YamlValue] = {"train_args.profile.start_step": 1}
    return Conversion({"train_args.profile.num_steps": value}, weak)


def profiler_start(value: Any) -> Conversion:
    """Convert axolotl's first step to profile, which is counted from 0."""
    value = as_number(value)
    if is_off(value) or not isinstance(value, int):
        return Conversion()
    return Conversion({"train_args.profile.start_step": value + 1})


def ratio(value: Any) -> Conversion:
    """Convert a fraction of the rows (below 1) or a number of rows."""
    value = as_number(value)
    is_count = isinstance(value, float) and value >= 1 and value.is_integer()
    return Conversion({"split_dataset_ratio": int(value) if is_count else value})


def percentage(value: Any) -> Conversion:
    """Convert a percentage of the rows."""
    value = as_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedValue(f"`{value}` is not a percentage", "write a number such as 5")
    return Conversion({"split_dataset_ratio": value / 100})


@skips_off
def packed_length(value: Any) -> Conversion:
    """Convert axolotl's old length of packed rows."""
    weak: dict[str, YamlValue] = {
        "train_args.packing_strategy": "bfd",
        "train_args.max_length": value,
    }
    text = "whole samples are packed into rows of up to `max_length` tokens"
    return Conversion({"train_args.packing": True}, weak, (("info", text),))


#: ms-swift's names of columns → Paceline's.
_SWIFT_COLUMNS = {
    "query": "prompt", "response": "completion", "messages": "messages", "system": "system",
    "images": "images", "tools": "tools", "label": "label", "history": "history",
    "rejected_response": "rejected", "text": "text",
}  # fmt: skip


def column_names(value: Any) -> Conversion:
    """Convert ms-swift's mapping of the columns of the data to its names."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise UnsupportedValue("expected a mapping", "write columns: {COLUMN: query}")
    unknown = [name for name in value.values() if str(name) not in _SWIFT_COLUMNS]
    if unknown:
        raise UnsupportedValue(
            f"`{unknown[0]}` is not a column that is read",
            f"use {', '.join(_SWIFT_COLUMNS)}, or set `columns` of the source",
        )
    columns: dict[str, YamlValue] = {
        _SWIFT_COLUMNS[str(name)]: column for column, name in value.items()
    }
    return Conversion({"_columns": columns} if columns else {})


def per_epoch(target: str) -> Convert:
    """Return a converter for axolotl's `saves_per_epoch` and `evals_per_epoch`, which are resolved
    with the number of epochs."""

    def convert(value: Any) -> Conversion:
        value = as_number(value)
        if is_off(value):
            return Conversion()
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UnsupportedValue(
                f"`{value}` is not a number per epoch", "write a number of at least 1"
            )
        return Conversion({target: value})

    return convert


def roles_to_train(value: Any) -> Conversion:
    """Accept axolotl's list of roles that carry the loss if it names only the assistant."""
    names = [name.lower() for name in as_names(value or [])]
    if value is None or (names and all(ROLES.get(name) == "assistant" for name in names)):
        return Conversion()
    raise UnsupportedValue(
        "Paceline computes the loss on the assistant's turns, not on the turns"
        f" of {', '.join(names) or 'an empty list of roles'}",
        "use roles_to_train: [assistant], or train_on_inputs: true for a loss on every token",
    )


def report_to(value: Any) -> Conversion:
    if is_off(value) or value == ["none"]:
        return Conversion({"report_to": []})
    names = [name.lower() for name in as_names(value)]
    if "all" in names:
        return info("name the other loggers to use them", {"report_to": ["tensorboard"]})
    known = get_args(Logger)
    sets: dict[str, YamlValue] = {"report_to": [name for name in names if name in known]}
    unsupported = ", ".join(name for name in names if name not in (*known, "none"))
    text = f"{unsupported} is not supported; supported are {', '.join(known)}"
    return warning(text if unsupported else "", sets)


def tracker_project(logger: str) -> Convert:
    """Return a converter for the project of a tracker, which some tools use as a switch."""
    return skips_off(
        lambda value: Conversion({f"_use_{logger}": True}, weak={"train_args.project": value})
    )


#: ms-swift's names of its own callbacks.
_SWIFT_CALLBACKS = frozenset({
    "activation_cpu_offload", "adalora", "deepspeed_elastic", "early_stop", "graceful_exit",
    "lisa", "perf_log", "perf_metrics",
})  # fmt: skip


def callbacks(value: Any) -> Conversion:
    """Convert ms-swift's names of callbacks beside the classes of the user, ``./file.py:Class``.
    Any other name stays, and is refused when the classes are loaded."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return Conversion({"callbacks": value})
    classes: list[YamlValue] = [name for name in names if name not in _SWIFT_CALLBACKS]
    sets: dict[str, YamlValue] = {"callbacks": classes}
    if "activation_cpu_offload" in names:
        sets["_activation_offload"] = True
    rest = [name for name in names if name not in classes and name != "activation_cpu_offload"]
    text = f"{quoted_names(rest)}: a callback is given as ./file.py:Class"
    return warning(text if rest else "", sets)


def axolotl_metrics(value: Any) -> Conversion:
    """Convert axolotl's names of metrics of generated text."""
    names = ["bleu" if name == "sacrebleu" else name for name in as_names(value)]
    kept: list[YamlValue] = [name for name in names if name != "comet"]
    text = "`comet` is left out: it downloads a model of its own"
    return warning(text if len(kept) < len(names) else "", {"evaluation.metrics": kept})


@skips_off
def chat_template(value: Any) -> Conversion:
    """Convert a name, a file, or the text of a template."""
    text = str(value)
    if text.strip().lower() == "jinja":
        return Conversion({"_jinja": True})
    if is_inline(text) or is_path(text) or text == TOKENIZER_DEFAULT:
        return Conversion({"chat_template": text})
    prefix = FALLBACK if text.startswith(FALLBACK) else ""
    name = canonical_name(text.removeprefix(FALLBACK))
    if name is None:
        return warning(
            "unknown template, so the tokenizer's own is used; known templates:"
            f" {', '.join(TEMPLATE_NAMES)}"
        )
    return Conversion({"chat_template": prefix + name})


def variables(value: Any) -> Conversion:
    names = ", ".join(value) if isinstance(value, dict) else str(value)
    return warning(
        f"environment variables ({names}) are not set from a config; set them in your shell"
    )


# -- modules with adapters

_ALL_SPELLINGS = ("all", "all-linear", "all_linear", "alllinear")
_GROUPS = ("all-embedding", "all_embedding", "all-router", "all_router", "all-norm", "all_norm")
#: Embeddings and output heads, which "all linear layers" does not include.
_ENDS = re.compile(r"embed|wte$|wpe$|lm_head$|output_layer$|(^|\.)(head|score|output)$")


def targets(value: Any) -> Conversion:
    """Convert `all`, names as a list or comma-separated, or a regular expression, which peft
    matches with full module names."""
    if isinstance(value, str) and is_regex(value):
        return _regex("lora.target_modules", value)
    names = as_names(value)
    if not names:
        return Conversion()
    if not any(name.lower() in _ALL_SPELLINGS for name in names):
        _refuse_groups(names)
        return Conversion({"lora.target_modules": names})
    ends, covered = split_beside_all(names)
    return Conversion(
        {"lora.target_modules": ALL_LINEAR},
        weak={"_save_in_full": ends} if ends else {},
        notices=(("info", f"{quoted_names(covered)}: included in all linear layers"),)
        if covered
        else (),
    )


def split_beside_all(names: list[str]) -> tuple[list[str], list[str]]:
    """Split the names listed together with "all linear layers" into embeddings and heads, and
    linear layers."""
    rest = [name for name in names if name.lower() not in _ALL_SPELLINGS]
    _refuse_groups(rest)
    ends = [name for name in rest if _ENDS.search(name)]
    return ends, [name for name in rest if name not in ends]


def _refuse_groups(names: list[str]) -> None:
    groups = [name for name in names if name.lower() in _GROUPS]
    if groups:
        raise UnsupportedValue(
            f"`{groups[0]}` is not supported; only `all-linear` is",
            "list these modules in `lora.modules_to_save` to train them in full, or remove them",
        )


def tokens(value: Any) -> Conversion:
    """Convert a list of special tokens in which a `.txt` file stands for the words in it."""
    names: list[str] = []
    for name in as_names(value):
        names += _read_tokens(Path(name)) if name.endswith(".txt") else [name]
    return Conversion({"new_special_tokens": names})


def special_tokens(value: Any) -> Conversion:
    """Convert axolotl's `special_tokens`, which are added to the tokenizer if it does not have
    them."""
    named = {key: token for key, token in value.items() if token} if isinstance(value, dict) else {}
    new = as_names(named.pop("additional_special_tokens", []))
    sets: dict[str, YamlValue] = {
        key: str(named.pop(key)) for key in ("eos_token", "bos_token") if key in named
    }
    new += [str(token) for token in sets.values() if token not in new]
    if new:
        sets["new_special_tokens"] = new
    text = f"{quoted_names(named)} in it: the tokenizer keeps its own"
    return warning(text if named else "", sets)


def _read_tokens(file: Path) -> list[str]:
    try:
        return file.expanduser().read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise UnsupportedValue(
            f"{file} cannot be read: {first_line(error)}", "check the path, or list the tokens"
        ) from None


def target_regex(value: Any) -> Conversion:
    """Convert ms-swift's regular expression, which overrides a list of names."""
    if not isinstance(value, str):
        raise UnsupportedValue("expected a regular expression", "write it as text")
    return _regex("_target_regex", value)


def _regex(target: str, text: str) -> Conversion:
    try:
        re.compile(text)
    except re.error as error:
        raise UnsupportedValue(
            f"invalid regular expression: {error}", "fix it, or list the names"
        ) from None
    return Conversion({target: text})


@skips_off
def module_names(value: Any) -> Conversion:
    """Convert names of modules to patterns of the names of their parameters."""
    return _patterns("_extra_modules", [re.escape(name) for name in as_names(value)])


def name_prefixes(target: str) -> Convert:
    """Return a converter for ms-swift's prefixes of the names of parameters."""
    return skips_off(
        lambda value: _patterns(target, [f"^{re.escape(name)}" for name in as_names(value)])
    )


def frozen_share(value: Any) -> Conversion:
    """Convert ms-swift's share of the parameters that are frozen, from the first one on."""
    value = as_number(value)
    if is_off(value):
        return Conversion()
    if value != 1:
        raise UnsupportedValue(
            "only 0 and 1 are supported: which parameters a share covers depends on the model",
            "set `train_args.trainable_layers: N` to train the last N layers and freeze the rest,"
            " or list the frozen parameters in `train_args.freeze`",
        )
    return Conversion({"_frozen_share": 1})


@skips_off
def trained_regex(value: Any) -> Conversion:
    """Convert ms-swift's regular expression for the names of parameters that are trained although
    others are frozen."""
    return Conversion({"_trained_patterns": [str(value)]})


@skips_off
def unfrozen(value: Any) -> Conversion:
    """Convert axolotl's patterns of trained parameters, which match at the start of a name."""
    patterns = as_names(value)
    partial = [pattern for pattern in patterns if re.search(r"\[\d*:\d*\]$", pattern)]
    if partial:
        raise UnsupportedValue(
            f"`{partial[0]}`: training a range of rows is not supported",
            "remove the range, which trains the whole parameter",
        )
    return _patterns("_unfrozen", [f"^(?:{pattern})" for pattern in patterns])


def _patterns(target: str, patterns: list[str]) -> Conversion:
    return Conversion({target: [*patterns]} if patterns else {})


def embedding_group(rate: Any) -> list[YamlValue]:
    """Return the parameter group of axolotl's embeddings, which have no weight decay."""
    return [{"params": ["embed_tokens", "lm_head"], "learning_rate": rate, "weight_decay": 0.0}]


@skips_off
def lr_groups(value: Any) -> Conversion:
    """Convert axolotl's learning rates of modules."""
    groups: list[YamlValue] = []
    for group in value if isinstance(value, list) else [value]:
        if not isinstance(group, dict) or "modules" not in group or "lr" not in group:
            raise UnsupportedValue(
                "expected a list of mappings with `modules` and `lr`",
                "write lr_groups: [{name: NAME, modules: [NAME], lr: 1e-5}]",
            )
        patterns: list[YamlValue] = [re.escape(name) for name in as_names(group["modules"])]
        groups.append({"params": patterns, "learning_rate": group["lr"]})
    return Conversion({"train_args.parameter_groups": groups})


@skips_off
def embedding_lr(value: Any) -> Conversion:
    """Convert axolotl's learning rate of the embeddings and the output layer."""
    return Conversion({"train_args.parameter_groups": embedding_group(value)})

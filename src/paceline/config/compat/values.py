"""Values of other tools' keys that ``values.yaml`` cannot express. Read beside ``aliases.yaml``."""

import json
import re
from typing import Any

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
    warning,
)
from paceline.config.entries import quoted_names
from paceline.config.schema.lora import ALL_LINEAR, is_regex


def adapter(value: Any) -> Conversion:
    """axolotl's `adapter` names the method; a path is an adapter to go on from."""
    if isinstance(value, str) and (re.search(r"[/\\]", value) or value.startswith(".")):
        return adapter_path(value)
    return by_case("tuner")(value)


def adapter_path(value: Any) -> Conversion:
    paths = as_names(value)
    if not paths:
        return Conversion()
    if len(paths) > 1:
        raise UnsupportedValue(
            f"{len(paths)} adapters are given; training goes on from one",
            "keep one of them, and merge the others before",
        )
    return Conversion({"lora.adapter": paths[0]}, weak={"lora.enable": True})


def scheduler_args(value: Any) -> Conversion:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise UnsupportedValue(
                f"`{value}` is not a mapping", "write it as {min_lr: 1e-6}"
            ) from None
    return Conversion({"train_args.lr_scheduler_kwargs": value})


def warmup_steps(value: Any) -> Conversion:
    if isinstance(value, float) and 0 < value < 1:
        return info("below 1 it is a share of the steps", {"train_args.warmup_ratio": value})
    return Conversion({"train_args.warmup_steps": value})


def ratio(value: Any) -> Conversion:
    """A share of the rows below 1, a number of rows from 1 on."""
    is_count = isinstance(value, float) and value >= 1 and value == int(value)
    return Conversion({"split_dataset_ratio": int(value) if is_count else value})


def per_epoch(target: str) -> Convert:
    """axolotl's `saves_per_epoch` and `evals_per_epoch`; settled against the number of epochs."""

    def convert(value: Any) -> Conversion:
        if is_off(value):
            return Conversion()
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UnsupportedValue(
                f"`{value}` is not a number per epoch", "write a number of at least 1"
            )
        return Conversion({target: value})

    return convert


def roles_to_train(value: Any) -> Conversion:
    """axolotl's list of roles whose turns carry the loss; here it is the assistant, under any of
    its names."""
    names = [name.lower() for name in as_names(value or [])]
    if value is None or (names and all(ROLES.get(name) == "assistant" for name in names)):
        return Conversion()
    raise UnsupportedValue(
        "the loss is on the turns of the assistant, not on those of"
        f" {', '.join(names) or 'no role at all'}",
        "use roles_to_train: [assistant], or train_on_inputs: true for a loss on every token",
    )


def report_to(value: Any) -> Conversion:
    if is_off(value) or value == ["none"]:
        return Conversion({"report_to": []})
    names = [name.lower() for name in as_names(value)]
    if "all" in names:
        return info("of all the places, TensorBoard is there", {"report_to": ["tensorboard"]})
    kept = [name for name in names if name == "tensorboard"]
    lost = [name for name in names if name not in ("tensorboard", "none")]
    if not lost:
        return Conversion({"report_to": kept})
    return warning(
        f"{', '.join(lost)} cannot be reported to; report.html, events.jsonl and TensorBoard are"
        " there",
        {"report_to": kept},
    )


def chat_template(value: Any) -> Conversion:
    """A name, a file, or a template written out."""
    if is_off(value):
        return Conversion()
    text = str(value)
    if text.strip().lower() == "jinja":
        return Conversion({"_jinja": True})
    if is_inline(text) or is_path(text) or text == TOKENIZER_DEFAULT:
        return Conversion({"chat_template": text})
    prefix = FALLBACK if text.startswith(FALLBACK) else ""
    name = canonical_name(text.removeprefix(FALLBACK))
    if name is None:
        return warning(
            "there is no template of this name, so the tokenizer's own is used; named:"
            f" {', '.join(TEMPLATE_NAMES)}"
        )
    return Conversion({"chat_template": prefix + name})


def template_name(value: Any) -> Conversion:
    """LLaMA-Factory's and ms-swift's `template`, which is overridden by `chat_template`."""
    out = chat_template(value)
    return Conversion(weak=out.sets, notices=out.notices)


def variables(value: Any) -> Conversion:
    names = ", ".join(value) if isinstance(value, dict) else str(value)
    return warning(
        f"environment variables ({names}) are not set from a config; set them in your shell"
    )


# -- the modules that get adapters

_ALL_SPELLINGS = ("all", "all-linear", "all_linear", "alllinear")
_GROUPS = ("all-embedding", "all_embedding", "all-router", "all_router", "all-norm", "all_norm")
#: Embeddings and output heads, which "all linear layers" leaves out.
_ENDS = re.compile(r"embed|wte$|wpe$|lm_head$|output_layer$|(^|\.)(head|score|output)$")


def targets(value: Any) -> Conversion:
    """`all`, names in a list or with commas, or a regular expression, which peft matches with the
    whole name of a module."""
    if isinstance(value, str) and is_regex(value):
        return _regex("lora.target_modules", value)
    names = as_names(value)
    if not names:
        return Conversion()
    if not any(name.lower() in _ALL_SPELLINGS for name in names):
        _refuse_groups(names)
        return Conversion({"lora.target_modules": names})
    ends, covered = split_beside_all(names)
    says = (("info", f"{quoted_names(covered)}: among all linear layers"),) if covered else ()
    return Conversion(
        {"lora.target_modules": ALL_LINEAR},
        weak={"_save_in_full": ends} if ends else {},
        notices=says,
    )


def split_beside_all(names: list[str]) -> tuple[list[str], list[str]]:
    """Names given beside "all linear layers": embeddings and heads, and those that are among the
    linear layers."""
    rest = [name for name in names if name.lower() not in _ALL_SPELLINGS]
    _refuse_groups(rest)
    ends = [name for name in rest if _ENDS.search(name)]
    return ends, [name for name in rest if name not in ends]


def _refuse_groups(names: list[str]) -> None:
    groups = [name for name in names if name.lower() in _GROUPS]
    if groups:
        raise UnsupportedValue(
            f"`{groups[0]}` is not available; `all-linear` is",
            "name these modules in `lora.modules_to_save` to train them in full, or leave them out",
        )


def target_regex(value: Any) -> Conversion:
    """ms-swift's regular expression, which comes before a list of names."""
    if not isinstance(value, str):
        raise UnsupportedValue("it is not a regular expression", "write it as text")
    return _regex("_target_regex", value)


def _regex(target: str, text: str) -> Conversion:
    try:
        re.compile(text)
    except re.error as error:
        raise UnsupportedValue(
            f"it is not a valid regular expression: {error}", "repair it, or give a list of names"
        ) from None
    return Conversion({target: text})

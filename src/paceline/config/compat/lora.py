"""The modules that get adapters, as other tools name them: a list, a regular expression, or all
linear layers."""

import re
from typing import Any

from paceline.config.compat.conversion import Conversion, UnsupportedValue, as_bool, words

ALL_LINEAR = "all-linear"
_ALL_SPELLINGS = ("all", "all-linear", "all_linear", "alllinear")
_GROUPS = ("all-embedding", "all_embedding", "all-router", "all_router", "all-norm", "all_norm")
#: A name of modules has none of these, apart from the dot.
_REGEX_SIGNS = re.compile(r"[\\()\[\]|*+?^${}]")
#: Embeddings and output heads, which "all linear layers" leaves out.
_ENDS = re.compile(r"embed|wte$|wpe$|lm_head$|output_layer$|(^|\.)(head|score|output)$")


def is_regex(text: str) -> bool:
    return bool(_REGEX_SIGNS.search(text))


def targets(value: Any) -> Conversion:
    """`all`, names in a list or with commas, or a regular expression, which peft matches with the
    whole name of a module."""
    if isinstance(value, str) and is_regex(value):
        try:
            re.compile(value)
        except re.error as error:
            raise UnsupportedValue(
                f"it is not a valid regular expression: {error}",
                "repair it, or give a list of names",
            ) from None
        return Conversion({"lora.target_modules": value})
    names = words(value)
    if not names:
        return Conversion()
    if not any(name.lower() in _ALL_SPELLINGS for name in names):
        _refuse_groups(names)
        return Conversion({"lora.target_modules": names})
    ends, covered = split_beside_all(names)
    says = (("info", f"{_listed(covered)}: among all linear layers"),) if covered else ()
    return Conversion(
        {"lora.target_modules": ALL_LINEAR}, weak={"_save_in_full": ends} if ends else {}, says=says
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


def target_linear(value: Any) -> Conversion:
    return Conversion({"_target_linear": True}) if as_bool(value) is True else Conversion()


def target_regex(value: Any) -> Conversion:
    """ms-swift's regular expression, which comes before a list of names."""
    if not isinstance(value, str):
        raise UnsupportedValue("it is not a regular expression", "write it as text")
    try:
        re.compile(value)
    except re.error as error:
        raise UnsupportedValue(
            f"it is not a valid regular expression: {error}", "repair it"
        ) from None
    return Conversion({"_target_regex": value})


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

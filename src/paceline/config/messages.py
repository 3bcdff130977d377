"""The schema's complaints in plain words: what was given, what is allowed, how to fix it."""

import math
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.config.entries import ConfigEntry, Problem, short
from paceline.config.fields import KEYS, SECTIONS, SOURCE_KEYS, describe, literals, takes
from paceline.config.schema.data import DatasetSource
from paceline.config.yaml_read import YamlValue, kind_of
from paceline.core.errors import did_you_mean

Find = Callable[[str], ConfigEntry | None]
_EXAMPLES = {
    "model": "add `model: Qwen/Qwen2.5-0.5B`, a local folder, or `builtin:NAME`",
    "dataset": "add `dataset: ./data.jsonl`, a hub id, or `builtin:NAME`",
}


def explain(error: ValidationError, data: dict[str, YamlValue], find: Find) -> list[Problem]:
    """One problem for each key the schema refuses. ``find`` gives the entry that set a native
    key."""
    by_key: dict[str, list[ErrorDetails]] = {}
    for one in error.errors(include_url=False):
        loc = one["loc"]
        key = ".".join(
            str(part)
            for part in (loc[:2] if loc and loc[0] in SECTIONS and len(loc) > 1 else loc[:1])
        )
        by_key.setdefault(key, []).append(one)
    return [_one(key, errors, data, find) for key, errors in by_key.items()]


def _one(key: str, errors: list[ErrorDetails], data: dict[str, YamlValue], find: Find) -> Problem:
    first = errors[0]
    if first["type"] == "missing" and key in _EXAMPLES and first["loc"] == (key,):
        return Problem(
            f"`{key}` is missing", fix=f"{_EXAMPLES[key]} (or {key}=... on the command line)"
        )
    if key not in KEYS or first["type"] == "value_error":
        return _between_keys(key, first, find)
    value, entry = _lookup(data, key), find(key)
    if key in SOURCE_KEYS:
        return _source(key, value, errors, entry)
    return refuse(key, value, entry, _reason(value, [one["type"] for one in errors]))


def refuse(key: str, value: Any, entry: ConfigEntry | None, reason: str) -> Problem:
    """The problem of a value that a native key does not take."""
    info = KEYS[key]
    shown = f"`{key}: {short(value)}`"
    if entry is not None and (entry.key != key or entry.token):
        same = entry.path[-1] == key.rpartition(".")[2]
        shown = entry.shown() if same else f"{entry.shown()}, which sets `{key}`,"
    fix = did_you_mean(value.lower(), literals(info)) if isinstance(value, str) else None
    return Problem(f"{shown} {reason}", entry, allowed=describe(info), fix=fix)


def _reason(value: Any, types: list[str]) -> str:
    if any(one.startswith(("greater_than", "less_than")) for one in types):
        return "is out of range"
    if all(one in ("literal_error", "list_type") for one in types) and isinstance(
        value, str | list
    ):
        return "is not one of the values it takes"
    if "int_from_float" in types:
        return "is not a whole number"
    return (
        "holds a value it does not take"
        if isinstance(value, list | dict)
        else f"is {kind_of(value)}, which it does not take"
    )


def _source(key: str, value: Any, errors: list[ErrorDetails], entry: ConfigEntry | None) -> Problem:
    """Of a union's complaints, those about a mapping say most."""
    inner = [
        one
        for one in errors
        if "DatasetSource" in one["loc"] and one["type"] not in ("model_type",)
    ]
    shown = entry.shown() if entry else f"`{key}: {short(value)}`"
    fix: str | None
    for one in inner:
        name = str(one["loc"][-1])
        if one["type"] == "missing":
            return Problem(
                f"{shown}: a source of samples has no `path`",
                entry,
                fix="add path: a file, a folder or a hub id",
            )
        if one["type"] == "extra_forbidden":
            fix = did_you_mean(name, DatasetSource.model_fields, "remove it")
            return Problem(
                f"{shown}: a source of samples has no key `{name}`", entry, describe(KEYS[key]), fix
            )
        info = DatasetSource.model_fields.get(name)
        if info is not None:
            fix = did_you_mean(str(one["input"]), literals(info))
            return Problem(
                f"{shown}: `{name}: {short(one['input'])}` is not taken",
                entry,
                f"for `{name}`: {describe(info)}",
                fix,
            )
    return Problem(f"{shown} is not a source of samples", entry, describe(KEYS[key]))


def _between_keys(key: str, first: ErrorDetails, find: Find) -> Problem:
    """Describe a violated rule about several keys, with the place of each key that it names."""
    message = str(first["msg"]).removeprefix("Value error, ")
    tokens = {token.rstrip(":") for token in message.replace("`", " ").split()}
    named = {name: find(name) for name in KEYS if name.rpartition(".")[2] in tokens}
    entries = {name: entry for name, entry in named.items() if entry is not None}
    if not entries:
        return Problem(message, find(key))
    places = [f"`{name}` ({entry.shown()}, {entry.place()})" for name, entry in entries.items()]
    return Problem(f"{message}: {' and '.join(places)}", list(entries.values())[-1])


def _lookup(data: dict[str, YamlValue], key: str) -> Any:
    value: Any = data
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def strict_problems(data: dict[str, YamlValue], find: Find) -> list[Problem]:
    """What the schema would let pass: true and false as numbers, text as true or false, numbers
    that are not finite."""
    out = []
    for key, info in KEYS.items():
        value = _lookup(data, key)
        if isinstance(value, bool) and takes(info, int, float) and not takes(info, bool):
            out.append(refuse(key, value, find(key), "is true/false, not a number"))
        elif isinstance(value, float) and not math.isfinite(value):
            out.append(refuse(key, value, find(key), "is not a finite number"))
        elif (
            takes(info, bool)
            and not isinstance(value, bool | None)
            and not (isinstance(value, str) and value in literals(info))
        ):
            out.append(refuse(key, value, find(key), f"is {kind_of(value)}, not true or false"))
    return out

"""The schema, looked at from outside: every key by its dotted name, and its type in plain words."""

import types
import typing
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from paceline.config.schema import Config
from paceline.config.schema.base import Section
from paceline.config.schema.data import DatasetSource


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _walk() -> tuple[dict[str, FieldInfo], dict[str, type[Section]]]:
    keys: dict[str, FieldInfo] = {}
    sections: dict[str, type[Section]] = {}
    for name, info in Config.model_fields.items():
        if _is_section(info.annotation):
            kind = typing.cast("type[Section]", info.annotation)
            sections[name] = kind
            keys.update({f"{name}.{sub}": sub_info for sub, sub_info in kind.model_fields.items()})
        else:
            keys[name] = info
    return keys, sections


#: dotted key → field, for every key of the schema; and the sections
KEYS, SECTIONS = _walk()
#: keys whose value is a free mapping
FREE = tuple(key for key, info in KEYS.items() if get_origin(info.annotation) is dict)
SOURCE_KEYS = ("dataset", "val_dataset")


def _parts(annotation: Any, metadata: list[Any] | None = None) -> list[tuple[Any, list[Any]]]:
    """The members of a union, each with its constraints."""
    metadata = list(metadata or [])
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        inner, *more = get_args(annotation)
        flat: list[Any] = []
        for one in more:
            flat.extend(one.metadata if isinstance(one, FieldInfo) else [one])
        return _parts(inner, metadata + flat)
    if origin in (Union, types.UnionType):
        return [part for one in get_args(annotation) for part in _parts(one, metadata)]
    return [(annotation, metadata)]


def literals(info: FieldInfo) -> list[str]:
    """The words a field takes, where it takes only some."""
    return [
        str(word)
        for kind, _ in _parts(info.annotation, info.metadata)
        if get_origin(kind) is Literal
        for word in get_args(kind)
    ]


def takes_none(info: FieldInfo) -> bool:
    return any(kind is type(None) for kind, _ in _parts(info.annotation))


def takes(info: FieldInfo, *kinds: type) -> bool:
    """True where a member of the field's type is one of ``kinds`` (``list`` stands for any
    list)."""
    return any(
        kind in kinds or get_origin(kind) in kinds
        for kind, _ in _parts(info.annotation, info.metadata)
    )


def describe(info: FieldInfo) -> str:
    """What a field takes, in plain words: ``a whole number of at least 1``, ``` `auto` or
    true/false ```."""
    words = [_one(kind, metadata) for kind, metadata in _parts(info.annotation, info.metadata)]
    return " or ".join(dict.fromkeys(words))


def _one(kind: Any, metadata: list[Any]) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in get_args(kind))
    if origin is list:
        (inner,) = get_args(kind)
        return "a list of " + " or ".join(
            dict.fromkeys(_one(k, m).removeprefix("a ") for k, m in _parts(inner))
        )
    if origin is dict:
        return "a mapping"
    if kind is DatasetSource:
        return "a mapping with " + ", ".join(f"`{name}`" for name in DatasetSource.model_fields)
    simple = {
        type(None): "null",
        bool: "true or false",
        str: "text",
        int: "a whole number",
        float: "a number",
    }
    return simple.get(kind, str(kind)) + (_range(metadata) if kind in (int, float) else "")


def _range(metadata: list[Any]) -> str:
    low = high = ""
    for one in metadata:
        if (value := getattr(one, "ge", None)) is not None:
            low = f"at least {value}"
        elif (value := getattr(one, "gt", None)) is not None:
            low = f"more than {value}"
        elif (value := getattr(one, "le", None)) is not None:
            high = f"at most {value}"
        elif (value := getattr(one, "lt", None)) is not None:
            high = f"less than {value}"
    return " of " + " and ".join(part for part in (low, high) if part) if low or high else ""

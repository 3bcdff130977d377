"""Introspection of the schema: every key by its dotted name, and descriptions of types."""

import types
import typing
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from paceline.config.schema import Config
from paceline.config.schema.base import Section
from paceline.config.schema.data import DatasetSource


def _keys() -> dict[str, FieldInfo]:
    keys: dict[str, FieldInfo] = {}
    for name, info in Config.model_fields.items():
        if name in SECTIONS:
            fields = SECTIONS[name].model_fields
            keys.update({f"{name}.{key}": field for key, field in fields.items()})
        else:
            keys[name] = info
    return keys


#: The sections by name.
SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}
#: Dotted key → field, for every key of the schema.
KEYS = _keys()
#: Keys whose value is a free mapping.
FREE = tuple(key for key, info in KEYS.items() if get_origin(info.annotation) is dict)
SOURCE_KEYS = ("dataset", "val_dataset")


def _parts(annotation: Any, metadata: list[Any] | None = None) -> list[tuple[Any, list[Any]]]:
    """Return the members of a union, each with its constraints."""
    metadata = list(metadata or [])
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        inner, *constraints = get_args(annotation)
        for constraint in constraints:
            metadata += constraint.metadata if isinstance(constraint, FieldInfo) else [constraint]
        return _parts(inner, metadata)
    if origin in (Union, types.UnionType):
        return [part for member in get_args(annotation) for part in _parts(member, metadata)]
    return [(annotation, metadata)]


def literals(info: FieldInfo) -> list[str]:
    """Return the literal values that a field accepts."""
    return [
        str(value)
        for kind, _ in _parts(info.annotation, info.metadata)
        if get_origin(kind) is Literal
        for value in get_args(kind)
    ]


def takes_none(info: FieldInfo) -> bool:
    return any(kind is type(None) for kind, _ in _parts(info.annotation))


def takes(info: FieldInfo, *kinds: type) -> bool:
    """Return whether the field accepts one of ``kinds`` (``list`` means any list)."""
    return any(
        kind in kinds or get_origin(kind) in kinds
        for kind, _ in _parts(info.annotation, info.metadata)
    )


def describe(info: FieldInfo) -> str:
    """Describe what a field accepts: ``a whole number of at least 1``, ``` `auto` or
    true/false ```."""
    members = [_describe(*part) for part in _parts(info.annotation, info.metadata)]
    return " or ".join(dict.fromkeys(members))


def _describe(kind: Any, metadata: list[Any]) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if origin is list:
        (inner,) = get_args(kind)
        members = [_describe(*part).removeprefix("a ") for part in _parts(inner)]
        return "a list of " + " or ".join(dict.fromkeys(members))
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
    bounds = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    limits = [
        f"{text} {getattr(constraint, name)}"
        for name, text in bounds.items()
        for constraint in metadata
        if getattr(constraint, name, None) is not None
    ]
    return f" of {' and '.join(limits)}" if limits else ""

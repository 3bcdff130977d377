"""Introspection of the schema: every key by its dotted name, and descriptions."""

import types
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
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


def _takes_mapping(info: FieldInfo) -> bool:
    """Return whether the value is a free mapping, or a mapping with known keys."""
    kinds = [kind for kind, _ in _parts(info.annotation)]
    return get_origin(info.annotation) is dict or any(_is_section(kind) for kind in kinds)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


#: Keys whose value is a mapping, so that overrides may set a key of it.
MAPPINGS = tuple(key for key, info in KEYS.items() if _takes_mapping(info))


def literals(info: FieldInfo) -> list[str]:
    """Return the literal values that a field accepts."""
    return [
        str(value)
        for kind, _ in _parts(info.annotation, info.metadata)
        if get_origin(kind) is Literal
        for value in get_args(kind)
    ]


def takes(info: FieldInfo, *kinds: type) -> bool:
    """Return whether the field accepts one of ``kinds`` (``list`` means any list)."""
    return any(
        kind in kinds or get_origin(kind) in kinds
        for kind, _ in _parts(info.annotation, info.metadata)
    )


def takes_value(info: FieldInfo, value: Any) -> bool:
    """Return whether the field accepts values of this kind: true and false, a number, text, a list,
    a mapping; any field accepts null."""
    if isinstance(value, bool):
        return takes(info, bool)
    if isinstance(value, int | float):
        return takes(info, int, float)
    if isinstance(value, list):
        return takes(info, list)
    if isinstance(value, dict):
        return _takes_mapping(info)
    return True


@dataclass(frozen=True)
class Wording:
    """What :func:`describe` calls each type in one language."""

    simple: dict[object, str]
    list_of: str
    mapping: str
    mapping_with: str
    source: str
    ranged: str
    bounds: dict[str, str]
    both_bounds: str
    literals: str
    alternatives: str
    last_alternative: str


_SOURCE_KEYS = ", ".join(f"`{name}`" for name in DatasetSource.model_fields)
ENGLISH = Wording(
    simple={
        type(None): "null",
        bool: "true or false",
        str: "text",
        int: "a whole number",
        float: "a number",
    },
    list_of="a list of {}",
    mapping="a mapping",
    mapping_with="a mapping with {}",
    source=f"a mapping with {_SOURCE_KEYS}",
    ranged="{kind} of {bounds}",
    bounds={"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"},
    both_bounds=" and ",
    literals=", ",
    alternatives=" or ",
    last_alternative=" or ",
)
CHINESE = Wording(
    simple={
        type(None): "`null`",
        bool: "布尔值",
        str: "字符串",
        int: "整数",
        float: "数值",
    },
    list_of="由{}组成的列表",
    mapping="映射",
    mapping_with="含 {} 的映射",
    source="[数据源映射](source.md)",
    ranged="{bounds}的{kind}",
    bounds={"ge": "不小于 {} ", "gt": "大于 {} ", "le": "不大于 {} ", "lt": "小于 {} "},
    both_bounds="且",
    literals="、",
    alternatives="、",
    last_alternative="或",
)


def describe(info: FieldInfo, wording: Wording = ENGLISH) -> str:
    """Describe what a field accepts: ``a whole number of at least 1``, ``` `auto` or
    true/false ```."""
    parts = _parts(info.annotation, info.metadata)
    return _alternatives([_describe(*part, wording) for part in parts], wording)


def _describe(kind: Any, metadata: list[Any], wording: Wording) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return wording.literals.join(f"`{value}`" for value in get_args(kind))
    if origin is list:
        (inner,) = get_args(kind)
        members = [_describe(*part, wording).removeprefix("a ") for part in _parts(inner)]
        return wording.list_of.format(_alternatives(members, wording))
    if origin is dict:
        return wording.mapping
    if kind is DatasetSource:
        return wording.source
    if _is_section(kind):
        keys = [
            f"`{name}` ({describe(field, wording)})" for name, field in kind.model_fields.items()
        ]
        return wording.mapping_with.format(", ".join(keys))
    text = wording.simple.get(kind, str(kind))
    bounds = _bounds(metadata, wording) if kind in (int, float) else ""
    return wording.ranged.format(kind=text, bounds=bounds) if bounds else text


def _bounds(metadata: list[Any], wording: Wording) -> str:
    return wording.both_bounds.join(
        text.format(getattr(constraint, name))
        for name, text in wording.bounds.items()
        for constraint in metadata
        if getattr(constraint, name, None) is not None
    )


def _alternatives(members: list[str], wording: Wording) -> str:
    *first, last = dict.fromkeys(members)
    listed = [wording.alternatives.join(first)] if first else []
    return wording.last_alternative.join([*listed, last])


@cache
def chinese() -> dict[str, str]:
    """Return the Chinese description of each section (``lora``), key (``lora.rank``) and key of a
    data source (``dataset.path``)."""
    text = Path(__file__).with_name("descriptions_zh.yaml").read_text(encoding="utf-8")
    descriptions: dict[str, str] = yaml.safe_load(text)
    return descriptions

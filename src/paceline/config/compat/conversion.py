"""Convert values of other tools' keys into Paceline's: each converter takes one value and returns a
:class:`Conversion`. Converters that need no code are in ``values.yaml``."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from paceline.config.entries import Notice, as_bool, short
from paceline.config.yaml_read import SafeLoader, YamlValue


@cache
def read_table(name: str) -> Any:
    """Read a data file of this package, given by its path below the package."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=SafeLoader)


@dataclass(frozen=True)
class Conversion:
    """The result of converting a value of another tool.

    An empty result means that Paceline behaves the same without the value.

    Args:
        sets: values by dotted native key; names with ``_`` in front are resolved later, together
            with other keys.
        weak: the same, but overridden by any other spelling that sets the key.
        notices: texts to report after the key.
    """

    sets: dict[str, YamlValue] = field(default_factory=dict)
    weak: dict[str, YamlValue] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()


class UnsupportedValue(Exception):
    """A value that is not supported and cannot be ignored without changing the training. ``key``:
    the key with the value, if another key is being read."""

    def __init__(self, why: str, fix: str, key: str | None = None) -> None:
        super().__init__(why)
        self.why, self.fix, self.key = why, fix, key


Convert = Callable[[Any], Conversion]


@dataclass(frozen=True)
class ConversionCase:
    """A case of a converter in ``values.yaml``, where a comment explains the fields."""

    of: str = ""
    sets: dict[str, YamlValue] = field(default_factory=dict)
    weak: dict[str, YamlValue] = field(default_factory=dict)
    same: str = ""
    lower: str = ""
    info: str = ""
    warning: str = ""
    refused: str = ""
    fix: str = ""
    like: str = ""

    def matches(self, value: Any) -> bool:
        patterns = self.of.split()
        if not patterns or ("off" in patterns and is_off(value)):
            return True
        if isinstance(value, Mapping):
            return "<mapping>" in patterns
        if isinstance(value, str) and "<text>" in patterns:
            return True
        text = "null" if value is None else str(value).lower()
        return any(fnmatchcase(text, pattern) for pattern in patterns)

    def convert(self, value: Any) -> Conversion:
        if self.like:
            return by_case(self.like)(value)
        shown = short(value)
        if self.refused:
            raise UnsupportedValue(
                self.refused.replace("{value}", shown), self.fix.replace("{value}", shown)
            )
        sets = dict(self.sets)
        if self.same:
            sets[self.same] = as_bool(value)
        if self.lower:
            sets[self.lower] = value.lower() if isinstance(value, str) else value
        texts = (("info", self.info), ("warning", self.warning))
        notices = tuple((level, text.replace("{value}", shown)) for level, text in texts if text)
        return Conversion(sets, self.weak, notices)


def by_case(name: str) -> Convert:
    """Return the converter of that name in ``values.yaml``."""

    def convert(value: Any) -> Conversion:
        for fields in read_table("values.yaml")[name]:
            case = ConversionCase(**fields)
            if case.matches(value):
                return case.convert(value)
        return Conversion()

    return convert


def read_json_object(path: Path, fix: str) -> dict[str, YamlValue]:
    """Read a JSON object from a file that a config refers to.

    Args:
        fix: advice for the error.

    Raises:
        UnsupportedValue: the file cannot be read, or does not contain an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedValue(f"cannot read {path}: {error}", fix) from None
    if not isinstance(value, dict):
        raise UnsupportedValue(f"{path}: expected a JSON object", fix)
    return value


def info(text: str, sets: dict[str, YamlValue] | None = None) -> Conversion:
    return Conversion(sets or {}, notices=(("info", text),))


def warning(text: str, sets: dict[str, YamlValue] | None = None) -> Conversion:
    """Return what a value sets, with a warning unless the text is empty."""
    return Conversion(sets or {}, notices=(("warning", text),) if text else ())


def is_off(value: object) -> bool:
    """Return whether a value turns a feature off: null, false, 0, empty, ``none``."""
    return value in (None, False, 0, "", [], {}) or (
        isinstance(value, str) and value.lower() in ("none", "no", "false", "off")
    )


def skips_off(convert: Convert) -> Convert:
    """Return the converter, except that a value that turns the feature off sets nothing."""
    return lambda value: Conversion() if is_off(value) else convert(value)


def as_names(value: Any) -> list[str]:
    """Return a list, or comma-separated text, as a list of non-empty names."""
    items = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def to(target: str) -> Convert:
    """Return a converter that sets ``target`` to the value."""
    return lambda value: Conversion({target: value})


def flag(target: str) -> Convert:
    return lambda value: Conversion({target: as_bool(value)})


def inverse(target: str) -> Convert:
    """Return a converter for a flag with the opposite meaning."""
    return lambda value: Conversion({target: _negated(value)})


def weak_inverse(target: str) -> Convert:
    """Return a converter for a flag with the opposite meaning. Its default, false, is weak."""

    def convert(value: Any) -> Conversion:
        sets = {target: _negated(value)}
        return Conversion(weak=sets) if as_bool(value) is False else Conversion(sets)

    return convert


def _negated(value: Any) -> Any:
    flag = as_bool(value)
    return not flag if isinstance(flag, bool) else value


def unless_off(target: str) -> Convert:
    """Return a converter for a number that sets nothing if it is 0."""
    return lambda value: Conversion({} if is_off(value) else {target: value})


def listed(target: str) -> Convert:
    return lambda value: Conversion({target: as_names(value)})

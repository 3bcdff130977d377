"""Values of other tools' keys, turned into Paceline's: each converter takes one value and returns a
:class:`Conversion`. Those that need no code are in ``values.yaml``."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from paceline.config.entries import short
from paceline.config.yaml_read import SafeLoader, YamlValue


@cache
def read_table(name: str) -> Any:
    """Read a data file of this package, once. ``name``: its path below the package."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=SafeLoader)


@dataclass(frozen=True)
class Conversion:
    """What a value of another tool is read as.

    ``sets``: values by dotted native key (a name with ``_`` in front is settled later, against the
    other keys).
    ``weak``: the same, but giving way to any other spelling that sets the key. ``says``: (level,
    message), reported after the key. Nothing set and nothing reported means the value is off there
    as it is here.
    """

    sets: dict[str, YamlValue] = field(default_factory=dict)
    weak: dict[str, YamlValue] = field(default_factory=dict)
    says: tuple[tuple[str, str], ...] = ()


class UnsupportedValue(Exception):
    """A value that has no meaning here and cannot be left out without changing what is trained."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


Convert = Callable[[Any], Conversion]


@dataclass(frozen=True)
class Case:
    """A case of a converter in ``values.yaml``; the comment there explains the fields."""

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

    def fits(self, value: Any) -> bool:
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
        says = (("info", self.info), ("warning", self.warning))
        reported = tuple((level, text.replace("{value}", shown)) for level, text in says if text)
        return Conversion(sets, self.weak, reported)


def by_case(name: str) -> Convert:
    """Return the converter of that name in ``values.yaml``."""

    def convert(value: Any) -> Conversion:
        cases = (Case(**entry) for entry in read_table("values.yaml")[name])
        case = next((case for case in cases if case.fits(value)), None)
        return Conversion() if case is None else case.convert(value)

    return convert


def read_json_object(path: Path, fix: str) -> dict[str, YamlValue]:
    """Read a JSON file that a config names; ``fix``: what to do if that is not possible."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedValue(f"{path} cannot be read: {error}", fix) from None
    if not isinstance(value, dict):
        raise UnsupportedValue(f"{path} is not a JSON object", fix)
    return value


def info(text: str, sets: dict[str, YamlValue] | None = None) -> Conversion:
    return Conversion(sets or {}, says=(("info", text),))


def warning(text: str, sets: dict[str, YamlValue] | None = None) -> Conversion:
    return Conversion(sets or {}, says=(("warning", text),))


def is_off(value: object) -> bool:
    """True for values that turn a feature off: null, false, 0, empty, ``none``."""
    return value in (None, False, 0, "", [], {}) or (
        isinstance(value, str) and value.lower() in ("none", "no", "false", "off")
    )


def as_bool(value: Any) -> Any:
    """The words for true and false that launchers pass as text; anything else as it is, for the
    schema to refuse."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def words(value: Any) -> list[str]:
    """A list, or text with commas, as a list of words."""
    items = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def to(target: str) -> Convert:
    """Take the value as it is."""
    return lambda value: Conversion({target: value})


def flag(target: str) -> Convert:
    return lambda value: Conversion({target: as_bool(value)})


def inverse(target: str) -> Convert:
    """A flag with the opposite sense."""
    return lambda value: Conversion({target: _negated(value)})


def weak_inverse(target: str) -> Convert:
    """A flag with the opposite sense that gives way when it is false, which is the default."""

    def convert(value: Any) -> Conversion:
        sets = {target: _negated(value)}
        return Conversion(weak=sets) if as_bool(value) is False else Conversion(sets)

    return convert


def _negated(value: Any) -> Any:
    flag = as_bool(value)
    return not flag if isinstance(flag, bool) else value


def weakly(target: str) -> Convert:
    return lambda value: Conversion(weak={target: value})


def listed(target: str) -> Convert:
    return lambda value: Conversion({target: words(value)})

"""Parse the overrides of a sweep: values separated by commas, and ranges for a search."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config.yaml_read import YamlValue, parse_value
from paceline.core.errors import ConfigError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(?P<low>{_NUMBER})\.\.(?P<high>{_NUMBER})(?::(?P<suffix>.*))?")
_RANGE_FORM = "LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP"
_OPENING = {"[": "]", "{": "}", "(": ")"}
_MAX_NAME_CHARS = 80
#: Keys for which each run of a sweep has a value of its own.
REPLACED_BY_SWEEP = ("output_dir", "checkpoint_dir")


@dataclass(frozen=True)
class Values:
    """A key with the values to compare, as they were written."""

    key: str
    values: tuple[str, ...]

    def contains(self, value: object) -> bool:
        return value in self.values


@dataclass(frozen=True)
class SampledRange:
    """A key whose values are sampled between two limits, both included.

    Args:
        step: distance between the values; None for any value (of integers: 1).
        is_integer: whether both limits are written as integers.
    """

    key: str
    low: float
    high: float
    is_log: bool = False
    step: float | None = None
    is_integer: bool = False

    def text_of(self, value: float) -> str:
        """Return a value of the range as it is written in an override."""
        return str(int(value)) if self.is_integer else repr(float(value))

    def contains(self, value: object) -> bool:
        if not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        step = self.step or (1.0 if self.is_integer else None)
        if step is None:
            return True
        distance = (value - self.low) / step
        return abs(distance - round(distance)) < 1e-8


@dataclass(frozen=True)
class SweepSpace:
    """The parsed overrides.

    Args:
        fixed: the overrides that every run has, as ``key=value``.
        axes: the keys that differ between runs.
    """

    fixed: tuple[str, ...]
    axes: tuple[Values | SampledRange, ...]

    @property
    def ranges(self) -> list[SampledRange]:
        return [axis for axis in self.axes if isinstance(axis, SampledRange)]


def parse_space(overrides: Sequence[str]) -> SweepSpace:
    """Split overrides (``key=value``) into fixed ones and the axes of the sweep.

    Raises:
        ConfigError: a value is not valid YAML, a range is malformed, a key has several values twice
            or is set by the sweep itself.
    """
    fixed: list[str] = []
    axes: list[Values | SampledRange] = []
    for override in overrides:
        axis = _parse_axis(*override.split("=", 1))
        if axis is None:
            fixed.append(override)
        else:
            axes.append(axis)
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1 or any(item.startswith(f"{key}=") for item in fixed):
            raise ConfigError(
                "`{key}` is set several times",
                code="repeated-sweep-key",
                fix="write all values once: {key}=A,B",
                key=key,
            )
        if key in (*REPLACED_BY_SWEEP, "resume"):
            raise ConfigError(
                "`{key}` cannot have several values in a sweep",
                code="fixed-in-sweep",
                fix="set one value of `{key}`; each run has a folder of its own",
                key=key,
            )
    return SweepSpace(tuple(fixed), tuple(axes))


def combinations(axes: Sequence[Values]) -> list[tuple[str, ...]]:
    """Return the overrides of each combination; the last key varies fastest."""
    choices = [[f"{axis.key}={value}" for value in axis.values] for axis in axes]
    return list(itertools.product(*choices))


def extremes(axes: Sequence[Values | SampledRange]) -> list[tuple[str, ...]]:
    """Return combinations in which every value and both limits of every range appear: they are
    checked before a search, which cannot check all values of a range."""
    choices = [_checked_values(axis) for axis in axes]
    count = max((len(texts) for texts in choices), default=0)
    return [
        tuple(
            f"{axis.key}={texts[min(number, len(texts) - 1)]}"
            for axis, texts in zip(axes, choices, strict=True)
        )
        for number in range(count)
    ]


def values_of(arguments: Sequence[str]) -> dict[str, YamlValue]:
    """Return the keys and the parsed values of overrides."""
    pairs = [argument.split("=", 1) for argument in arguments]
    return {key: parse_value(text, f"{key}=") for key, text in pairs}


def folder_name(arguments: Sequence[str]) -> str:
    """Return the name of a run's folder, such as ``rank-8_learning_rate-1e-4``."""
    pairs = [argument.split("=", 1) for argument in arguments]
    parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in pairs]
    text = "_".join(parts)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")
    if name == text and len(name) <= _MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256("\n".join(arguments).encode()).hexdigest()[:8]
    return f"{name[: _MAX_NAME_CHARS - 9]}-{digest}"


def _parse_axis(key: str, text: str) -> Values | SampledRange | None:
    """Return the axis that an override describes, or None for a single value."""
    if ".." in text and (match := _RANGE.fullmatch(text.strip())) is not None:
        return _range(key, text, match)
    values = _split(text)
    for value in values:
        if not value and len(values) > 1:
            raise ConfigError(
                "`{key}={text}` has an empty value",
                code="empty-sweep-value",
                fix="write {key}=A,B",
                key=key,
                text=text,
            )
    parsed = [parse_value(value, f"{key}=") for value in values]
    if any(value in parsed[:index] for index, value in enumerate(parsed)):
        raise ConfigError(
            "`{key}={text}` has a value twice",
            code="repeated-value",
            fix="remove the second one",
            key=key,
            text=text,
        )
    return Values(key, tuple(values)) if len(values) > 1 else None


def _range(key: str, text: str, match: re.Match[str]) -> SampledRange:
    low, high, suffix = match["low"], match["high"], match["suffix"]
    is_integer = all(re.fullmatch(r"[-+]?\d+", limit) for limit in (low, high))
    step = None
    if suffix not in (None, "log"):
        if re.fullmatch(_NUMBER, suffix) is None or float(suffix) <= 0:
            raise ConfigError(
                "`{key}={text}` is not a range",
                code="invalid-range",
                allowed=_RANGE_FORM,
                key=key,
                text=text,
            )
        step = float(suffix)
        is_integer = is_integer and step.is_integer()
    axis = SampledRange(key, float(low), float(high), suffix == "log", step, is_integer)
    if not axis.low < axis.high or not math.isfinite(axis.high):
        raise ConfigError(
            "`{key}={text}`: the lower limit must be below the upper one",
            code="reversed-range",
            allowed=_RANGE_FORM,
            key=key,
            text=text,
        )
    if axis.is_log and axis.low <= 0:
        raise ConfigError(
            "`{key}={text}`: a logarithmic range must be above 0",
            code="non-positive-range",
            fix="raise the lower limit, or remove `:log`",
            key=key,
            text=text,
        )
    return axis


def _checked_values(axis: Values | SampledRange) -> list[str]:
    if isinstance(axis, Values):
        return list(axis.values)
    return [axis.text_of(axis.low), axis.text_of(axis.high)]


def _split(text: str) -> list[str]:
    """Split at the commas that are not inside brackets or quotes."""
    parts, closing, quote = [""], "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and not parts[-1].strip():
            quote = char
        elif char in _OPENING:
            closing = _OPENING[char] + closing
        elif closing and char == closing[0]:
            closing = closing[1:]
        elif char == "," and not closing:
            parts.append("")
            continue
        parts[-1] += char
    return [part.strip() for part in parts] if len(parts) > 1 else [text]

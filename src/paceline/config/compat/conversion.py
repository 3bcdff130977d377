"""Values of other tools' keys, turned into Paceline's. Each function takes one value and gives an
:class:`Conversion`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Conversion:
    """What one foreign value comes to.

    ``sets``: values by dotted native key (a name with ``_`` in front is settled later, against the
    other keys).
    ``weak``: the same, but giving way to any other spelling that sets the key. ``says``: (level,
    words), said after the key. Nothing set and nothing said means the value is off there as it is
    here.
    """

    sets: dict[str, Any] = field(default_factory=dict)
    weak: dict[str, Any] = field(default_factory=dict)
    says: tuple[tuple[str, str], ...] = ()


class UnsupportedValue(Exception):
    """A value that has no meaning here and cannot be left out without changing what is trained."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


Convert = Callable[[Any], Conversion]


def info(words: str, **sets: Any) -> Conversion:
    return Conversion(sets=_dotted(sets), says=(("info", words),))


def warning(words: str, **sets: Any) -> Conversion:
    return Conversion(sets=_dotted(sets), says=(("warning", words),))


def _dotted(sets: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in sets.items()}


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


def on_here(why: str) -> Convert:
    """A feature that is always on here: asking for it is fine, turning it off changes the numbers
    and is said."""
    return lambda value: warning(why) if as_bool(value) is False else info(why)

"""What a check found."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        name: stable, for scripts.
        ok: all is as it should be.
        value: what was found, for a person.
        advice: what to do about it; None where all is well.
        fatal: a run would fail. What is not well and not fatal costs time, or may surprise.
    """

    name: str
    ok: bool
    value: str
    advice: str | None = None
    fatal: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def well(name: str, value: str) -> Check:
    return Check(name, True, value)


def doubtful(name: str, value: str, advice: str) -> Check:
    return Check(name, False, value, advice)


def broken(name: str, value: str, advice: str) -> Check:
    return Check(name, False, value, advice, fatal=True)

"""What all metric loggers have in common. Imports no client."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import JsonValue

T = TypeVar("T")

DEFAULT_PROJECT = "paceline"


@dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker shows it.

    Args:
        id: identifier of the run at the tracker. A resumed run has the identifier of its first
            attempt.
        is_new: whether no earlier attempt has used the identifier.
        project: name of the project, or None for the default of the tracker.
        resumed_from: step that the run resumes from, or None.
    """

    id: str
    is_new: bool
    name: str
    project: str | None
    space_id: str | None
    folder: Path
    config: Mapping[str, JsonValue]
    resumed_from: int | None

    def project_of(self, variable: str) -> str:
        """Return the project of the config, else of an environment variable, else the
        default."""
        return self.project or os.environ.get(variable) or DEFAULT_PROJECT


class Tracker(Protocol):
    """A run at a tracker. Its methods are called in a thread of their own, and may block or
    raise."""

    @property
    def id(self) -> str:
        """Identifier by which a resumed run continues this one; empty if it needs none."""

    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        """Log figures of a step. ``time_s`` is in seconds since the epoch."""

    def finish(self, has_failed: bool) -> None:
        """Write or send what is pending, and mark the run as ended."""


def flat(values: Mapping[str, T], separator: str = ".") -> dict[str, T]:
    """Return nested mappings as one, with joined keys."""
    result: dict[str, T] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = flat(value, separator)
            result |= {f"{key}{separator}{name}": item for name, item in inner.items()}
        else:
            result[key] = value
    return result

"""Count the rows of a dataset that were read, kept and dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

from pydantic import JsonValue

from paceline.core.report import DataFigures, SourceRows


@dataclass
class DataCounts:
    """Numbers of rows: ``read`` is the sum of ``kept`` and all ``dropped``, and ``kept`` includes
    ``truncated``. ``excluded_turns`` counts the assistant turns in kept rows whose loss the data or
    the config disables."""

    read: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    excluded_turns: int = 0

    def add(self, other: DataCounts) -> None:
        """Add the counts of later rows."""
        for name in ("read", "kept", "truncated", "excluded_turns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped = dict(Counter(self.dropped) + Counter(other.dropped))

    def as_dict(self) -> DataFigures:
        figures: DataFigures = {
            "read": self.read,
            "kept": self.kept,
            "truncated": self.truncated,
            "dropped": dict(self.dropped),
        }
        if self.excluded_turns:
            figures["excluded_turns"] = self.excluded_turns
        return figures


@dataclass
class SourceCounts:
    """The counts of one of several streamed sources. ``dropped`` is the sum over all reasons."""

    name: str
    read: int = 0
    kept: int = 0
    dropped: int = 0
    samples: int = 0
    tokens: int = 0
    label_tokens: int = 0

    def add(self, other: SourceCounts) -> None:
        for item in fields(self)[1:]:
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass
class StreamCounts(DataCounts):
    """The counts of the rows that a run has streamed so far, with the numbers of their samples and
    tokens.

    Args:
        samples: those that were trained on. Packed rows are counted when the first of their window
            is used, so that ``kept`` may be ahead of it.
        label_tokens: those that carry loss.
        first: the place of a dropped row for each reason.
        sources: the counts of each source, by its index, if there are several.
        anchors: places from which the windows of packed rows are found again: the number of a
            window and of its first row, by stream.
    """

    samples: int = 0
    tokens: int = 0
    label_tokens: int = 0
    first: dict[str, str] = field(default_factory=dict, compare=False)
    sources: dict[int, SourceCounts] = field(default_factory=dict)
    anchors: dict[int, tuple[int, int]] = field(default_factory=dict, compare=False)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], names: Sequence[str]) -> StreamCounts:
        """Return the counts that :meth:`state` has converted. ``names``: names of all sources,
        which may have been moved since then."""
        sources = {
            int(number): SourceCounts(**{**row, "name": names[int(number)]})
            for number, row in state.get("sources", {}).items()
        }
        anchors = {int(number): tuple(place) for number, place in state.get("anchors", {}).items()}
        return cls(**{**state, "sources": sources, "anchors": anchors})

    def state(self) -> dict[str, JsonValue]:
        """Return the counts as JSON values."""
        state = asdict(self)
        for name in ("sources", "anchors"):
            state[name] = {str(number): value for number, value in state[name].items()}
        return state

    def add(self, other: DataCounts) -> None:
        super().add(other)
        if not isinstance(other, StreamCounts):
            return
        self.samples += other.samples
        self.tokens += other.tokens
        self.label_tokens += other.label_tokens
        self.first = {**other.first, **self.first}
        for number, counts in other.sources.items():
            self.of_source(number, counts.name).add(counts)
        for number, place in other.anchors.items():
            self.anchors[number] = max(place, self.anchors.get(number, place))

    def of_source(self, number: int, name: str) -> SourceCounts:
        """Return the counts of a source, which are created if there are none."""
        return self.sources.setdefault(number, SourceCounts(name))

    def copy(self) -> StreamCounts:
        return deepcopy(self)

    def as_dict(self) -> DataFigures:
        figures: DataFigures = {
            **super().as_dict(),
            "samples": self.samples,
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
        }
        if self.sources:
            figures["sources"] = [
                cast("SourceRows", asdict(counts)) for _, counts in sorted(self.sources.items())
            ]
        return figures

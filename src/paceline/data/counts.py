"""Count the rows of a dataset that were read, kept and dropped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from paceline.core.events import DataFigures


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
class StreamCounts(DataCounts):
    """The counts of the rows that a run has streamed so far, with the numbers of their tokens.
    ``label_tokens`` carry loss; ``first`` has the place of a dropped row for each reason."""

    tokens: int = 0
    label_tokens: int = 0
    first: dict[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def from_dict(cls, figures: DataFigures) -> StreamCounts:
        """Return the counts that :meth:`as_dict` has converted."""
        return cls(
            figures["read"],
            figures["kept"],
            figures["truncated"] or 0,
            dict(figures["dropped"]),
            figures.get("excluded_turns", 0),
            figures["tokens"],
            figures["label_tokens"],
        )

    def add(self, other: DataCounts) -> None:
        super().add(other)
        if isinstance(other, StreamCounts):
            self.tokens += other.tokens
            self.label_tokens += other.label_tokens
            self.first = {**other.first, **self.first}

    def copy(self) -> StreamCounts:
        return replace(self, dropped=dict(self.dropped), first=dict(self.first))

    def as_dict(self) -> DataFigures:
        return {
            **super().as_dict(),
            "tokens": self.tokens,
            "label_tokens": self.label_tokens,
        }

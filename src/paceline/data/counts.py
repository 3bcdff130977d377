"""Count the rows of a dataset that were read, kept and dropped."""

from dataclasses import dataclass, field

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

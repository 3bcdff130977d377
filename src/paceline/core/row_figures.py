"""The figures of packed rows and of the sources of a mixture in events."""

from typing import TypedDict


class PackingFigures(TypedDict, total=False):
    """Packed rows: ``rows`` per epoch (of each source, if sources are mixed), ``capacity`` in
    tokens, and ``fill``, the share of the capacity that has tokens."""

    strategy: str
    rows: list[int]
    capacity: int
    fill: float


class SourceFigures(TypedDict, total=False):
    """A source of a mixture. ``samples`` are those of an epoch of the source, ``share`` is its
    share of the rows at the first step."""

    name: str
    samples: int
    tokens: int
    share: float


class SourceStep(TypedDict, total=False):
    """A source of a mixture in the steps since the previous ``step`` event: the mean loss, and the
    numbers of samples and tokens of all these steps."""

    name: str
    loss: float | None
    samples: int
    tokens: int

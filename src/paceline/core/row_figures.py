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
    """One of several sources. ``samples`` and ``tokens`` are counts per epoch of the source, or
    ``rows``, if it is streamed and their number is known; ``share`` is its share of the rows at the
    first step, if it is known."""

    name: str
    samples: int
    tokens: int
    rows: int
    share: float


class SourceRows(TypedDict):
    """The numbers of rows, samples and tokens of a streamed source so far. ``dropped`` is the sum
    over all reasons."""

    name: str
    read: int
    kept: int
    dropped: int
    samples: int
    tokens: int
    label_tokens: int


class SourceStep(TypedDict, total=False):
    """One of several sources in the steps since the previous ``step`` event: the mean loss, and the
    numbers of samples and tokens of all these steps."""

    name: str
    loss: float | None
    samples: int
    tokens: int

"""Several sources in stated proportions: which source each position of the order reads.

The choice at each position is drawn independently, from the probabilities at the step that the
position belongs to. Each source has its own epochs. Positions are drawn in chunks, so that every
position is found at any time without the ones before it having been read: only the choices of
earlier chunks are counted, tens of millions per second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paceline.core.errors import ConfigError
from paceline.distributed.seeds import derive_seed

Stopping = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]

_CHUNK = 1 << 14
#: An epoch of a mixture must not have more rows. They are counted before the run starts.
_MAX_ROWS = 1 << 27


@dataclass(frozen=True)
class WeightSchedule:
    """The weights of the sources over the steps: linear between the given steps, and constant
    before the first and after the last of them.

    Args:
        steps: int64 [points], increasing.
        weights: float64 [points, sources].
    """

    steps: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, weights: Sequence[float | Mapping[int, float]]) -> "WeightSchedule":
        """Return the schedule of sources whose weight is a number, or numbers by step."""
        points = [
            {0: weight} if isinstance(weight, int | float) else dict(weight) for weight in weights
        ]
        steps = np.array(sorted({step for each in points for step in each}), dtype=np.int64)
        columns = [
            np.interp(steps, sorted(each), [each[step] for step in sorted(each)]) for each in points
        ]
        return cls(steps, np.stack(columns, axis=1).astype(np.float64))

    def at(self, steps: np.ndarray) -> np.ndarray:
        """Return the weights at each step: float64 [steps, sources]."""
        if len(self.steps) == 1:
            return np.broadcast_to(self.weights, (len(steps), self.weights.shape[1]))
        columns = [np.interp(steps, self.steps, column) for column in self.weights.T]
        return np.stack(columns, axis=1)

    def first_shares(self) -> list[float]:
        """Return the share of the rows that each source has at the first step."""
        weights = self.at(np.zeros(1, dtype=np.int64))[0]
        shares: list[float] = (weights / weights.sum()).tolist()
        return shares


@dataclass
class _Chunk:
    """The choices of consecutive positions.

    Args:
        sources: int64 [positions], the source of each.
        ordinals: int64 [positions], how often that source was chosen before.
        counts_after: int64 [sources], how often each was chosen up to the end.
    """

    sources: np.ndarray
    ordinals: np.ndarray
    counts_after: np.ndarray


@dataclass
class Mixture:
    """The source of each position, counted from 0 over all epochs.

    Args:
        num_rows: number of rows of an epoch of each source.
        schedule: the weights.
        stopping: when an epoch of the mixture ends: when the first source or every source has been
            read once; or, without replacement, when every row has been read once, where a source
            without rows left is not chosen again before the end.
        batch_size: number of positions of a step.
        seed: the run's seed.
    """

    num_rows: tuple[int, ...]
    schedule: WeightSchedule
    stopping: Stopping
    batch_size: int
    seed: int
    # The counts before each chunk so far, and the last chunks.
    _before: list[np.ndarray] = field(default_factory=list, init=False, repr=False)
    _chunks: dict[int, _Chunk] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._before.append(np.zeros(len(self.num_rows), dtype=np.int64))

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position in [start, stop), and how often that source was chosen
        before: two int64 [stop - start]."""
        parts = [
            self._part(number, max(start, number * _CHUNK), min(stop, (number + 1) * _CHUNK))
            for number in range(start // _CHUNK, -(-stop // _CHUNK))
        ]
        sources, ordinals = zip(*parts, strict=True)
        return np.concatenate(sources), np.concatenate(ordinals)

    def counts(self, position: int) -> np.ndarray:
        """Return how often each source was chosen before ``position``: int64 [sources]."""
        number, offset = divmod(position, _CHUNK)
        before = self._counts_before(number)
        if offset == 0:
            return before.copy()
        sources = self._chunk(number).sources[:offset]
        return before + np.bincount(sources, minlength=len(self.num_rows))

    def epoch_rows(self) -> int:
        """Return the number of rows of an epoch of the mixture.

        Raises:
            ConfigError: an epoch does not end, or not soon enough.
        """
        sizes = np.array(self.num_rows)
        if self.stopping == "all_exhausted_without_replacement":
            return int(sizes.sum())
        if self.stopping == "all_exhausted":
            self._check_last_weights()
        is_first = self.stopping == "first_exhausted"
        for number in range(_MAX_ROWS // _CHUNK):
            is_read = self._counts_before(number + 1) >= sizes
            if is_read.any() if is_first else is_read.all():
                chunk = self._chunk(number)
                ends = [
                    np.flatnonzero((chunk.sources == source) & (chunk.ordinals == size - 1))
                    for source, size in enumerate(sizes)
                ]
                positions = [int(end[0]) for end in ends if len(end)]
                return number * _CHUNK + (min if is_first else max)(positions) + 1
        raise ConfigError(
            "`mixing`: an epoch has more than {max_rows} rows, because the weight of a source with"
            " many rows is small",
            code="epoch-too-long",
            fix="raise the weight, or set `stopping_strategy: first_exhausted`",
            max_rows=f"{_MAX_ROWS:,}",
        )

    def _check_last_weights(self) -> None:
        idle = np.flatnonzero(self.schedule.weights[-1] == 0)
        for source in idle:
            if self._counts_at_end(int(source)) < self.num_rows[source]:
                raise ConfigError(
                    "`mixing`: source {next_source} of `dataset` has the weight 0 from step"
                    " {steps} on, and then not all of its rows have been read, so with"
                    " `stopping_strategy: {stopping}` no epoch ends",
                    code="unused-source",
                    fix="raise the weight, or set `stopping_strategy: first_exhausted`",
                    next_source=source + 1,
                    steps=int(self.schedule.steps[-1]),
                    stopping=self.stopping,
                )

    def _counts_at_end(self, source: int) -> int:
        """Return how often a source is chosen up to the last step of the schedule."""
        position = int(self.schedule.steps[-1]) * self.batch_size
        return int(self.counts(position)[source])

    def _part(self, number: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        chunk, part = self._chunk(number), slice(start - number * _CHUNK, stop - number * _CHUNK)
        return chunk.sources[part], chunk.ordinals[part]

    def _counts_before(self, number: int) -> np.ndarray:
        while len(self._before) <= number:
            self._chunk(len(self._before) - 1)
        return self._before[number]

    def _chunk(self, number: int) -> _Chunk:
        if number not in self._chunks:
            before = self._counts_before(number)
            while len(self._chunks) > 3:
                del self._chunks[next(iter(self._chunks))]
            self._chunks[number] = self._draw(number, before)
            if len(self._before) == number + 1:
                self._before.append(self._chunks[number].counts_after)
        return self._chunks[number]

    def _draw(self, number: int, before: np.ndarray) -> _Chunk:
        generator = np.random.Generator(np.random.PCG64(derive_seed(self.seed, "mixture", number)))
        drawn = generator.random(_CHUNK)
        positions = number * _CHUNK + np.arange(_CHUNK)
        weights = self.schedule.at(positions // self.batch_size)
        if self.stopping == "all_exhausted_without_replacement":
            sources = self._without_replacement(drawn, weights, before)
        else:
            sources = _choose(drawn, weights)
        ordinals = np.empty(_CHUNK, dtype=np.int64)
        counts = before.copy()
        for source in range(len(before)):
            chosen = np.flatnonzero(sources == source)
            ordinals[chosen] = before[source] + np.arange(len(chosen))
            counts[source] += len(chosen)
        return _Chunk(sources, ordinals, counts)

    def _without_replacement(
        self, drawn: np.ndarray, weights: np.ndarray, before: np.ndarray
    ) -> np.ndarray:
        """Choose among the sources that have rows left in the current epoch of the mixture."""
        sizes = np.array(self.num_rows)
        epoch = int(before.sum()) // int(sizes.sum())
        left = sizes * (epoch + 1) - before
        sources = np.empty(len(drawn), dtype=np.int64)
        start = 0
        while start < len(drawn):
            if not left.any():
                left = sizes.copy()
            window = slice(start, start + int(left.sum()))
            available = np.where(left > 0, weights[window], 0.0)
            # Only sources whose weight is 0 at this step may have rows left.
            available = np.where(available.sum(1, keepdims=True) > 0, available, left > 0)
            chosen = _choose(drawn[window], available)
            # The choices are valid up to the one that takes the last row of a source.
            ends = [
                rows[number - 1]
                for source, number in enumerate(left)
                if number and len(rows := np.flatnonzero(chosen == source)) >= number
            ]
            stop = min(ends) + 1 if ends else len(chosen)
            sources[start : start + stop] = chosen[:stop]
            left = left - np.bincount(chosen[:stop], minlength=len(left))
            start += stop
        return sources


def _choose(drawn: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the source of each position.

    Args:
        drawn: uniform numbers in [0, 1), float64 [positions].
        weights: float64 [positions, sources].
    """
    ends = np.cumsum(weights, axis=1)
    # Divided by the last end, the ends of the last sources are exactly 1 if their weight is 0.
    is_after: np.ndarray = drawn[:, None] >= ends[:, :-1] / ends[:, -1:]
    sources: np.ndarray = is_after.sum(axis=1, dtype=np.int64)
    return sources

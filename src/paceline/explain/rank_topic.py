"""What all topics share: a topic runs on every rank, and what the ranks show becomes one
recording."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from paceline.distributed.call_log import CountedCall
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.explain.calls import collectives_of, messages_of
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import (
    Check,
    DrawnMessage,
    DrawnRow,
    Frame,
    Recording,
    Span,
    check_traffic,
)
from paceline.messages.pages import PageText

T = TypeVar("T")


@dataclass(frozen=True)
class RankFrame:
    """What one rank shows in a frame.

    Args:
        caption: caption of the frame; the caption of rank 0 is shown.
        calls: counted calls of this rank that led to the frame; ``label``: what they sent.
        messages: further messages from this rank.
    """

    caption: str
    rows: tuple[DrawnRow, ...]
    calls: Sequence[CountedCall] = ()
    label: str = ""
    phase: str = ""
    messages: tuple[DrawnMessage, ...] = ()
    is_key: bool = False


class RankTopic(ABC):
    """A topic on one rank. :meth:`run` runs the algorithm and sets attributes, from which the other
    methods make the recording. Every rank makes it, and the recording of rank 0 is shown.

    Attributes:
        title, about: title, and description of the algorithm in a few sentences.
        actors: names of the rows of the picture; default: the ranks.
        columns: number of actors next to each other in the picture.
        spans: spans of all actors.
        figures: further keys of the JSON output.
        counted_bytes: bytes that this rank has sent within :meth:`count_traffic`.
    """

    title = ""
    about = ""
    columns = 1

    def __init__(self, world: Communicator, options: ExplainOptions) -> None:
        self.world = world
        self.options = options
        self.actors: list[str] = [
            PageText("rank {rank}", rank=rank) for rank in range(options.ranks)
        ]
        self.spans: list[Span] = []
        self.figures: dict[str, object] = {"ranks": options.ranks}
        if options.algorithm:
            self.figures = {"algorithm": options.algorithm, **self.figures}
        self.counted_bytes = 0

    @abstractmethod
    def run(self) -> None:
        """Run the algorithm. A collective, as all methods but :meth:`rank_frames`."""

    def rank_frames(self) -> Iterable[RankFrame]:
        """Return this rank's part of each frame. All ranks return equally many."""
        raise NotImplementedError

    def frames(self) -> Iterable[Frame]:
        return map(_join, zip(*self.gather(list(self.rank_frames())), strict=True))

    def check_frames(self, frames: Sequence[Frame]) -> Iterable[Check]:
        """Compare the bytes that the frames show with those that were counted."""
        return [check_traffic(frames, self.gather(self.counted_bytes))]

    def checks(self) -> Iterable[Check]:
        """Return further checks."""
        return ()

    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """Return labels and values that summarize the run."""

    def add_figures(self) -> None:
        """Add further keys to the JSON output."""

    def record(self) -> Recording:
        self.run()
        self.add_figures()
        frames = tuple(self.frames())
        return Recording(
            topic=self.options.topic,
            title=self.title,
            about=self.about,
            actors=tuple(self.actors),
            frames=frames,
            checks=(*self.check_frames(frames), *self.checks()),
            facts=tuple(self.facts().items()),
            spans=tuple(self.spans),
            figures=self.figures,
            columns=self.columns,
        )

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        return self.world.gather_objects(value)

    def gather_all(self, values: list[T]) -> list[T]:
        """Return the lists of all ranks as one."""
        return [value for values in self.gather(values) for value in values]

    @contextmanager
    def count_traffic(self) -> Iterator[None]:
        """Count what this rank sends within the block."""
        before = self.world.traffic.total
        yield
        self.counted_bytes += self.world.traffic.total - before

    def check_ranks(self, name: str, is_correct: bool) -> Check:
        """Check what every rank has compared with a reference."""
        return Check.equal(name, [True] * self.world.size, self.gather(is_correct))


def _join(parts: Sequence[RankFrame]) -> Frame:
    first, calls = parts[0], [part.calls for part in parts]
    return Frame(
        first.caption,
        tuple(part.rows for part in parts),
        phase=first.phase,
        messages=(
            *messages_of(calls, first.label),
            *(message for part in parts for message in part.messages),
        ),
        collectives=collectives_of(calls, first.label),
        is_key=first.is_key,
    )


def numbers_of(tensor: torch.Tensor | None) -> list[float]:
    """Return the numbers of a tensor, such as a gradient that exists."""
    assert tensor is not None
    numbers: list[float] = tensor.detach().reshape(-1).tolist()
    return numbers


def make_mesh(world: Communicator, axes: ParallelDims) -> Communicator:
    """Return the ranks of ``world`` as a mesh."""
    return Communicator(world.env, world.device, axes, world.group, world.ranks, world.waits)

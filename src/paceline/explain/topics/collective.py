"""`paceline explain all-reduce` and `explain broadcast`: record every step on real ranks."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist

from paceline.core.files import human_bytes
from paceline.explain.rank_topic import RankTopic
from paceline.explain.record import Cell, Check, DrawnMessage, DrawnRow, Frame
from paceline.messages.pages import PageText
from paceline.strategies.reducers.all_reduce.run import CollectiveTrace, all_reduce, broadcast
from paceline.strategies.reducers.all_reduce.schedules import Send

_ELEMENT_BYTES = 4  # float32

_ABOUT = {
    "ring": (
        "Each rank communicates only with its two neighbors. The tensor is divided into"
        " {chunks:chunk},"
        " which travel around the ring: first they are summed, then the sums are distributed. Each"
        " rank sends 2(N-1)/N of the tensor, almost independent of the number of ranks."
    ),
    "tree": (
        "Pairs of ranks, then pairs of pairs: the sum moves up to rank 0 in about log2(N) steps and"
        " down the same way. There are few steps, but each sends the full tensor."
    ),
    "halving": (
        "Recursive halving and doubling: in each step a rank sends half of its part and sums the"
        " other half; then the parts double again. It takes 2 log2(N) steps and sends 2(N-1)/N of"
        " the tensor. Ranks beyond a power of two first send their tensor to another rank."
    ),
    "naive": (
        "All ranks send their tensor to rank 0, which sums them and sends the result to all ranks."
        " Rank 0 sends N-1 times the tensor and is the bottleneck."
    ),
}
_ABOUT_BROADCAST = {
    "ring": (
        "The tensor moves from rank to rank in chunks: while a rank sends one chunk, it receives"
        " the next."
    ),
    "tree": (
        "Every rank that has the tensor sends it on: the number of ranks that have it doubles with"
        " each step."
    ),
    "naive": "Rank 0 sends the tensor to each of the other ranks.",
}
_ONE_ELEMENT = "chunk {chunk} (element {first})"
_START = "Start: rank r has 2^r in every element, so each value shows whose values it sums."


class CollectiveTopic(RankTopic):
    """Run an all-reduce or a broadcast on real ranks.

    The figures: ``algorithm, ranks, elements, steps: [{phase, step, sends: [{from, to, chunk,
    bytes}]}], messages_sent`` (per rank), ``segments`` (ranges of elements that move together) and
    ``states`` (the value of each segment on each rank, before the first step and after each).

    Attributes:
        sent: what each rank has sent.
        is_correct: whether the result equals the result of the backend's collective.
    """

    def run(self) -> None:
        world, elements = self.world, self.options.elements
        tensor = torch.full((elements,), 2.0**world.rank)
        backend, trace = tensor.clone(), CollectiveTrace()
        is_reduce = self.options.topic == "all-reduce"
        collective = all_reduce if is_reduce else broadcast
        with self.count_traffic():
            sent = collective(world, tensor, self.options.algorithm, trace=trace)
        if world.size > 1 and is_reduce:
            dist.all_reduce(backend)
        elif world.size > 1:
            dist.broadcast(backend, src=0)
        self.is_correct = torch.equal(tensor, backend)
        self.sent, self.steps = self.gather(sent), trace.steps
        edges = {e for step in trace.steps for send in step.sends for e in (send.start, send.stop)}
        self.segments = list(pairwise(sorted({0, elements} | edges)))
        starts = [start for start, _ in self.segments]
        states = self.gather([[int(values[each]) for each in starts] for values in trace.values])
        self.states = [list(state) for state in zip(*states, strict=True)]
        self.title = PageText(
            "{topic} by {algorithm}, {ranks:rank}",
            topic=self.options.topic.capitalize(),
            algorithm=self.options.algorithm,
            ranks=world.size,
        )
        self.about = about(self.options.topic, self.options.algorithm, world.size)

    def frames(self) -> Iterator[Frame]:
        yield Frame(_START, _rows(self.states[0], self.states[0]), is_key=True)
        totals = Counter(step.phase for step in self.steps)
        for step, (before, after) in zip(self.steps, pairwise(self.states), strict=True):
            sent_bytes = sum(send.count for send in step.sends) * _ELEMENT_BYTES
            name = PageText(
                "{phase}, step {step} of {total}",
                phase=step.phase,
                step=step.step + 1,
                total=totals[step.phase],
            )
            yield Frame(
                PageText(
                    "{name}: {messages:message}, {size} in total",
                    name=name,
                    messages=len(step.sends),
                    size=human_bytes(sent_bytes),
                ),
                _rows(after, before),
                phase=step.phase,
                messages=tuple(_message(send, self.segments) for send in step.sends),
                is_key=True,
            )

    def checks(self) -> list[Check]:
        return [
            self.check_ranks("same bits as the backend's collective", self.is_correct),
        ]

    def facts(self) -> dict[str, str]:
        elements = self.options.elements
        size_bytes = elements * _ELEMENT_BYTES
        max_bytes = max(rank.bytes for rank in self.sent)
        return {
            "Tensor": PageText(
                "{elements:element}, {size}", elements=elements, size=human_bytes(size_bytes)
            ),
            "Steps": str(len(self.steps)),
            "Sent by the rank that sends most": (
                PageText(
                    "{size} ({share} × the tensor)",
                    size=human_bytes(max_bytes),
                    share=f"{max_bytes / size_bytes:.2f}",
                )
            ),
            "Most messages of a rank": str(max(rank.messages for rank in self.sent)),
        }

    def add_figures(self) -> None:
        self.figures.update(
            elements=self.options.elements,
            steps=[
                {
                    "phase": step.phase,
                    "step": step.step,
                    "sends": [
                        {
                            "from": send.source,
                            "to": send.target,
                            "chunk": send.chunk,
                            "bytes": send.count * _ELEMENT_BYTES,
                        }
                        for send in step.sends
                    ],
                }
                for step in self.steps
            ],
            messages_sent=[rank.messages for rank in self.sent],
            segments=self.segments,
            states=self.states,
        )


def _message(send: Send, segments: list[tuple[int, int]]) -> DrawnMessage:
    places = [
        place
        for place, (start, stop) in enumerate(segments)
        if send.start <= start and stop <= send.stop
    ]
    label = "chunk {chunk} (elements {first}–{last})" if send.count > 1 else _ONE_ELEMENT
    return DrawnMessage(
        send.source,
        send.target,
        PageText(label, chunk=send.chunk, first=send.start, last=send.stop - 1),
        send.count * _ELEMENT_BYTES,
        row=0,
        cells=(places[0], places[-1] + 1),
    )


def _rows(state: list[list[int]], before: list[list[int]]) -> tuple[tuple[DrawnRow, ...], ...]:
    """Return whose values each rank has in each segment."""
    ranks = len(state)
    return tuple(
        (
            DrawnRow(
                "",
                tuple(
                    Cell(
                        holders(value, ranks),
                        ranks=ranks_of(value, ranks),
                        tone="new" if value != old_value else "",
                    )
                    for value, old_value in zip(values, old, strict=True)
                ),
            ),
        )
        for values, old in zip(state, before, strict=True)
    )


def about(collective: str, algorithm: str, ranks: int) -> str:
    """Return the description of the algorithm."""
    table = _ABOUT if collective == "all-reduce" else _ABOUT_BROADCAST
    return PageText(table[algorithm], chunks=ranks)


def ranks_of(value: int, ranks: int) -> tuple[int, ...]:
    """Return the ranks whose values a value sums."""
    return tuple(rank for rank in range(ranks) if value >> rank & 1)


def holders(value: int, ranks: int) -> str:
    """Return whose values a value sums: ``0+2``, ``all``, or the number of ranks if more than
    four."""
    parts = ranks_of(value, ranks)
    if len(parts) == ranks and ranks > 1:
        return "all"
    return (
        "+".join(map(str, parts))
        if len(parts) <= 4
        else PageText("{count} of {total}", count=len(parts), total=ranks)
    )

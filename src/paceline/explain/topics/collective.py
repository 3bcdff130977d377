"""`paceline explain all-reduce` and `explain broadcast`: record every step on real ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import (
    Cell,
    Check,
    DrawnMessage,
    DrawnRow,
    Frame,
    Recording,
    check_traffic,
)
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator
    from paceline.strategies.reducers.all_reduce.run import CollectiveTrace
    from paceline.strategies.reducers.all_reduce.schedules import Send, Sent, Step

PRELOAD = ("paceline.strategies.reducers.all_reduce.run",)
_ELEMENT_BYTES = 4  # float32

_ABOUT = {
    "ring": (
        "Each rank communicates only with its two neighbors. The tensor is divided into {chunks},"
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
_START = "Start: rank r has 2^r in every element, so each value shows whose values it sums."


@dataclass(frozen=True)
class RankTrace:
    """The recording of one rank. ``counted_bytes``: as its traffic counter recorded them;
    ``is_correct``: the result equals the result of the backend's collective."""

    trace: CollectiveTrace
    sent: Sent
    counted_bytes: int
    is_correct: bool


def record(options: ExplainOptions) -> Recording:
    """Run the collective on real ranks.

    The figures: ``algorithm, ranks, elements, steps: [{phase, step, sends: [{from, to, chunk,
    bytes}]}], messages_sent`` (per rank), ``segments`` (ranges of elements that move together) and
    ``states`` (the value of each segment on each rank, before the first step and after each).
    """
    collective, algorithm = options.topic, options.algorithm
    ranks, elements = options.ranks, options.elements
    traces: list[RankTrace] = run_on_ranks(_record_rank, ranks, collective, algorithm, elements)
    steps = traces[0].trace.steps
    edges = {edge for step in steps for send in step.sends for edge in (send.start, send.stop)}
    segments = list(pairwise(sorted({0, elements} | edges)))
    states = [
        [[int(rank.trace.values[number][start]) for start, _ in segments] for rank in traces]
        for number in range(len(steps) + 1)
    ]
    frames = _frames(steps, segments, states)
    size_bytes = elements * _ELEMENT_BYTES
    max_sent = max(rank.sent.bytes for rank in traces)
    return Recording(
        topic=collective,
        title=f"{collective.capitalize()} by {algorithm}, {counted(ranks, 'rank')}",
        about=about(collective, algorithm, ranks),
        actors=tuple(f"rank {rank}" for rank in range(ranks)),
        frames=frames,
        checks=(
            check_traffic(frames, [rank.counted_bytes for rank in traces]),
            Check.equal(
                "same bits as the backend's collective",
                [True] * ranks,
                [rank.is_correct for rank in traces],
            ),
        ),
        facts=(
            ("Tensor", f"{counted(elements, 'element')}, {human_bytes(size_bytes)}"),
            ("Steps", str(len(steps))),
            (
                "Sent by the rank that sends most",
                f"{human_bytes(max_sent)} ({max_sent / size_bytes:.2f} × the tensor)",
            ),
            ("Most messages of a rank", str(max(rank.sent.messages for rank in traces))),
        ),
        figures={
            "algorithm": algorithm,
            "ranks": ranks,
            "elements": elements,
            "steps": [_step_figures(step) for step in steps],
            "messages_sent": [rank.sent.messages for rank in traces],
            "segments": segments,
            "states": states,
        },
    )


def _step_figures(step: Step) -> dict[str, object]:
    sends = [
        {
            "from": send.source,
            "to": send.target,
            "chunk": send.chunk,
            "bytes": send.count * _ELEMENT_BYTES,
        }
        for send in step.sends
    ]
    return {"phase": step.phase, "step": step.step, "sends": sends}


def _frames(
    steps: list[Step], segments: list[tuple[int, int]], states: list[list[list[int]]]
) -> tuple[Frame, ...]:
    frames = [Frame(_START, _rows(segments, states[0], states[0]), is_key=True)]
    totals = Counter(step.phase for step in steps)
    for number, step in enumerate(steps):
        sent_bytes = sum(send.count for send in step.sends) * _ELEMENT_BYTES
        name = f"{step.phase}, step {step.step + 1} of {totals[step.phase]}"
        messages = counted(len(step.sends), "message")
        frames.append(
            Frame(
                f"{name}: {messages}, {human_bytes(sent_bytes)} in total",
                _rows(segments, states[number + 1], states[number]),
                phase=step.phase,
                messages=tuple(_message(send, segments) for send in step.sends),
                is_key=True,
            )
        )
    return tuple(frames)


def _message(send: Send, segments: list[tuple[int, int]]) -> DrawnMessage:
    places = [
        place
        for place, (start, stop) in enumerate(segments)
        if send.start <= start and stop <= send.stop
    ]
    span = f"elements {send.start}–{send.stop - 1}" if send.count > 1 else f"element {send.start}"
    return DrawnMessage(
        send.source,
        send.target,
        f"chunk {send.chunk} ({span})",
        send.count * _ELEMENT_BYTES,
        row=0,
        cells=(places[0], places[-1] + 1),
    )


def _rows(
    segments: list[tuple[int, int]], state: list[list[int]], before: list[list[int]]
) -> tuple[tuple[DrawnRow, ...], ...]:
    """Return whose values each rank has in each segment."""
    ranks = len(state)
    rows = []
    for values, old in zip(state, before, strict=True):
        cells = tuple(
            Cell(
                holders(value, ranks),
                ranks=tuple(rank for rank in range(ranks) if value >> rank & 1),
                tone="new" if value != old_value else "",
            )
            for value, old_value in zip(values, old, strict=True)
        )
        rows.append((DrawnRow("", cells),))
    return tuple(rows)


def _record_rank(world: Communicator, collective: str, algorithm: str, elements: int) -> RankTrace:
    import torch
    import torch.distributed as dist

    from paceline.strategies.reducers.all_reduce import run as collectives

    tensor = torch.full((elements,), 2.0**world.rank)
    backend, trace = tensor.clone(), collectives.CollectiveTrace()
    before = world.traffic.total
    if collective == "all-reduce":
        sent = collectives.all_reduce(world, tensor, algorithm, trace)
    else:
        sent = collectives.broadcast(world, tensor, algorithm, trace=trace)
    counted_bytes = world.traffic.total - before
    if world.size > 1:
        if collective == "all-reduce":
            dist.all_reduce(backend)
        else:
            dist.broadcast(backend, src=0)
    return RankTrace(trace, sent, counted_bytes, torch.equal(tensor, backend))


def about(collective: str, algorithm: str, ranks: int) -> str:
    """Return the description of the algorithm."""
    table = _ABOUT if collective == "all-reduce" else _ABOUT_BROADCAST
    return table[algorithm].format(chunks=counted(ranks, "chunk"))


def holders(value: int, ranks: int) -> str:
    """Return whose values a value sums: ``0+2``, ``all``, or the number of ranks if more than
    four."""
    parts = [rank for rank in range(ranks) if value >> rank & 1]
    if len(parts) == ranks and ranks > 1:
        return "all"
    return "+".join(map(str, parts)) if len(parts) <= 4 else f"{len(parts)} of {ranks}"

"""`paceline explain all-reduce` and `explain broadcast`: the algorithm on real ranks, every step
recorded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.explain.run import ExplainOptions, Recording
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.collectives.run import Trace
    from paceline.distributed.collectives.schedules import Send, Sent
    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.distributed.collectives.run",)
_ELEMENT_BYTES = 4  # float32

_ABOUT = {
    "ring": (
        "Each rank talks to its two neighbours alone. In {chunks} the tensor goes round: first the"
        " chunks are summed up on their way, then the finished ones are passed on. Every rank sends"
        " 2(N-1)/N of the tensor, however many ranks there are."
    ),
    "tree": (
        "Pairs of ranks, then pairs of pairs: the sum moves up to rank 0 in about log2(N) steps,"
        " and down the same way. Few steps, but each carries the whole tensor."
    ),
    "halving": (
        "Recursive halving and doubling: with each step a rank gives half of its part away and sums"
        " up the other half; then the parts double again. 2 log2(N) steps, 2(N-1)/N of the tensor."
        " Ranks beyond a power of two fold into another first."
    ),
    "naive": (
        "All ranks send their tensor to rank 0, which adds up and sends the result to everyone."
        " Rank 0 sends N-1 times the tensor: it is the bottleneck."
    ),
}
_ABOUT_BROADCAST = {
    "ring": (
        "The tensor goes down the line of ranks in chunks: while a rank passes one on, the next"
        " already comes in."
    ),
    "tree": (
        "Whoever has the tensor hands it on: the number of ranks that have it doubles with each"
        " step."
    ),
    "naive": "Rank 0 sends the tensor to each of the others itself.",
}


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded. ``is_correct``: the result is that of the backend's own
    collective."""

    trace: Trace
    sent: Sent
    is_correct: bool


def record(options: ExplainOptions) -> Recording:
    """Run it on real processes. Rank r begins with 2^r in every element, so that each value tells
    whose parts are in it.

    The content: ``algorithm, ranks, elements, steps, bytes_sent, messages_sent, result_ok`` (bytes
    and messages one a rank). The player has beside it ``segments`` (ranges of elements that move
    together) and ``held`` (before the first step and after each: for each rank, for each segment,
    the value).
    """
    collective, algorithm = options.topic, options.algorithm
    ranks, elements = options.ranks, options.elements
    traces: list[RankTrace] = run_on_ranks(_record_rank, ranks, collective, algorithm, elements)
    steps = traces[0].trace.steps
    edges = {edge for step in steps for send in step.sends for edge in (send.start, send.stop)}
    segments = list(pairwise(sorted({0, elements} | edges)))
    held = [
        [[int(rank.trace.values[number][start]) for start, _ in segments] for rank in traces]
        for number in range(len(steps) + 1)
    ]
    totals = Counter(step.phase for step in steps)
    names = [f"{step.phase}, step {step.step + 1} of {totals[step.phase]}" for step in steps]
    is_correct = all(rank.is_correct for rank in traces)
    size_bytes = elements * _ELEMENT_BYTES
    text = about(collective, algorithm, ranks)
    tensor = counted(elements, "element")
    caption = "The start: each rank holds its own values"
    rest = "; rank 0's are to be everyone's." if collective == "broadcast" else "."
    captions = [caption + rest]
    lines = [
        f"{collective} by {algorithm}: {counted(ranks, 'rank')}, {tensor} of float32"
        f" ({human_bytes(size_bytes)})",
        text,
        "",
        "Rank r begins with 2^r in every element. Below: whose parts each rank holds, by elements.",
        *_held_lines(segments, held[0]),
    ]
    for number, step in enumerate(steps):
        sent_bytes = sum(send.count for send in step.sends) * _ELEMENT_BYTES
        messages = counted(len(step.sends), "message")
        captions.append(f"{names[number]}: {messages}, {human_bytes(sent_bytes)} in all")
        lines += ["", names[number], *map(_send_line, step.sends)]
        lines += _held_lines(segments, held[number + 1])
    lines.append("")
    for number, rank in enumerate(traces):
        share = f", {rank.sent.bytes / size_bytes:.2f} × the tensor" if size_bytes else ""
        messages = counted(rank.sent.messages, "message")
        lines.append(f"rank {number} sent {human_bytes(rank.sent.bytes)} in {messages}{share}")
    verdict = "the same as the backend's own" if is_correct else "NOT the same as the backend's own"
    lines.append(f"result: {verdict} {collective}")
    bytes_sent = [rank.sent.bytes for rank in traces]
    messages_sent = [rank.sent.messages for rank in traces]
    busiest = max(bytes_sent)
    sends = [
        [
            {
                "from": send.source,
                "to": send.target,
                "chunk": send.chunk,
                "bytes": send.count * _ELEMENT_BYTES,
            }
            for send in step.sends
        ]
        for step in steps
    ]
    return Recording(
        title=f"{collective.capitalize()} by {algorithm}, {counted(ranks, 'rank')}",
        about=text,
        is_correct=is_correct,
        facts=[
            ("Ranks", str(ranks)),
            ("Tensor", f"{tensor}, {human_bytes(size_bytes)}"),
            ("Steps", str(len(steps))),
            (
                "Busiest rank sends",
                f"{human_bytes(busiest)} ({busiest / size_bytes:.2f} × the tensor)",
            ),
            ("Messages of the busiest rank", str(max(messages_sent))),
            ("Result", "as the backend's" if is_correct else "differs from the backend's"),
        ],
        lines=lines,
        captions=captions,
        player={
            "kind": "chunks",
            "ranks": ranks,
            "elements": elements,
            "steps": [
                {
                    "phase": step.phase,
                    "step": step.step,
                    "sends": [
                        {**listed, "start": send.start, "stop": send.stop}
                        for listed, send in zip(sends[number], step.sends, strict=True)
                    ],
                }
                for number, step in enumerate(steps)
            ],
            "segments": segments,
            "held": held,
        },
        content={
            "algorithm": algorithm,
            "ranks": ranks,
            "elements": elements,
            "steps": [
                {"phase": step.phase, "step": step.step, "sends": sends[number]}
                for number, step in enumerate(steps)
            ],
            "bytes_sent": bytes_sent,
            "messages_sent": messages_sent,
            "result_ok": is_correct,
        },
    )


def _record_rank(world: Communicator, collective: str, algorithm: str, elements: int) -> RankTrace:
    import torch
    import torch.distributed as dist

    from paceline.distributed.collectives import run as collectives

    tensor = torch.full((elements,), 2.0**world.rank)
    backend, trace = tensor.clone(), collectives.Trace()
    if collective == "all-reduce":
        sent = collectives.all_reduce(world, tensor, algorithm, trace)
    else:
        sent = collectives.broadcast(world, tensor, algorithm, trace=trace)
    if world.size > 1:
        if collective == "all-reduce":
            dist.all_reduce(backend)
        else:
            dist.broadcast(backend, src=0)
    return RankTrace(trace, sent, torch.equal(tensor, backend))


def about(collective: str, algorithm: str, ranks: int) -> str:
    """What the algorithm does, in a few sentences."""
    table = _ABOUT if collective == "all-reduce" else _ABOUT_BROADCAST
    return table[algorithm].format(chunks=counted(ranks, "chunk"))


def holders(value: int, ranks: int) -> str:
    """Whose parts a value holds: ``0+2``, ``all``, or how many if there are too many to name."""
    parts = [rank for rank in range(ranks) if value >> rank & 1]
    if len(parts) == ranks and ranks > 1:
        return "all"
    return "+".join(map(str, parts)) if len(parts) <= 4 else f"{len(parts)} of {ranks}"


def _send_line(send: Send) -> str:
    span = f"elements {send.start}–{send.stop - 1}" if send.count > 1 else f"element {send.start}"
    size = human_bytes(send.count * _ELEMENT_BYTES)
    return f"  rank {send.source} → rank {send.target}   chunk {send.chunk} ({span})   {size}"


def _held_lines(segments: list[tuple[int, int]], held: list[list[int]]) -> list[str]:
    """Whose parts each rank holds, as a table of ranks and segments."""
    heads = [f"{start}" if stop - start == 1 else f"{start}–{stop - 1}" for start, stop in segments]
    rows = [[holders(value, len(held)) for value in row] for row in held]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    labels = ["  holds    ", *(f"  rank {rank:<3} " for rank in range(len(rows)))]
    return [
        (label + "  ".join(map(str.ljust, row, widths))).rstrip()
        for label, row in zip(labels, [heads, *rows], strict=True)
    ]

"""`paceline explain all-reduce` and `explain broadcast`: record every step on real ranks."""

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


@dataclass(frozen=True)
class RankTrace:
    """The recording of one rank. ``is_correct``: the result equals that of the backend's
    collective."""

    trace: Trace
    sent: Sent
    is_correct: bool


def record(options: ExplainOptions) -> Recording:
    """Run the collective on real ranks. Rank r starts with 2^r in every element, so that each value
    shows which ranks' values it sums.

    The content: ``algorithm, ranks, elements, steps, bytes_sent, messages_sent, result_ok`` (bytes
    and messages per rank). The player also has ``segments`` (ranges of elements that move together)
    and ``states`` (before the first step and after each: the value of each segment on each rank).
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
    totals = Counter(step.phase for step in steps)
    names = [f"{step.phase}, step {step.step + 1} of {totals[step.phase]}" for step in steps]
    is_correct = all(rank.is_correct for rank in traces)
    size_bytes = elements * _ELEMENT_BYTES
    text = about(collective, algorithm, ranks)
    tensor = counted(elements, "element")
    caption = "Start: each rank has its own values"
    if collective == "broadcast":
        caption += "; rank 0's are to be sent to all"
    captions = [f"{caption}."]
    lines = [
        (
            f"{collective} by {algorithm}: {counted(ranks, 'rank')}, {tensor} of float32"
            f" ({human_bytes(size_bytes)})"
        ),
        text,
        "",
        "Rank r starts with 2^r in every element. Below: whose values each rank has, by element.",
        *_state_lines(segments, states[0]),
    ]
    for number, step in enumerate(steps):
        sent_bytes = sum(send.count for send in step.sends) * _ELEMENT_BYTES
        messages = counted(len(step.sends), "message")
        captions.append(f"{names[number]}: {messages}, {human_bytes(sent_bytes)} in total")
        lines += ["", names[number], *map(_send_line, step.sends)]
        lines += _state_lines(segments, states[number + 1])
    lines.append("")
    for number, rank in enumerate(traces):
        share = f", {rank.sent.bytes / size_bytes:.2f} × the tensor" if size_bytes else ""
        messages = counted(rank.sent.messages, "message")
        lines.append(f"rank {number} sent {human_bytes(rank.sent.bytes)} in {messages}{share}")
    verdict = "equal to the backend's" if is_correct else "NOT equal to the backend's"
    lines.append(f"result: {verdict} {collective}")
    bytes_sent = [rank.sent.bytes for rank in traces]
    messages_sent = [rank.sent.messages for rank in traces]
    max_sent = max(bytes_sent)
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
                "Sent by the rank that sends most",
                f"{human_bytes(max_sent)} ({max_sent / size_bytes:.2f} × the tensor)",
            ),
            ("Most messages of a rank", str(max(messages_sent))),
            ("Result", "equal to the backend's" if is_correct else "differs from the backend's"),
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
            "states": states,
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


def _send_line(send: Send) -> str:
    span = f"elements {send.start}–{send.stop - 1}" if send.count > 1 else f"element {send.start}"
    size = human_bytes(send.count * _ELEMENT_BYTES)
    return f"  rank {send.source} → rank {send.target}   chunk {send.chunk} ({span})   {size}"


def _state_lines(segments: list[tuple[int, int]], state: list[list[int]]) -> list[str]:
    """Return whose values each rank has, as a table of ranks and segments."""
    heads = [f"{start}" if stop - start == 1 else f"{start}–{stop - 1}" for start, stop in segments]
    rows = [[holders(value, len(state)) for value in row] for row in state]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    labels = ["  values of", *(f"  rank {rank:<3} " for rank in range(len(rows)))]
    return [
        (label + "  ".join(map(str.ljust, row, widths))).rstrip()
        for label, row in zip(labels, [heads, *rows], strict=True)
    ]

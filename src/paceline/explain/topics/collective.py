"""`paceline explain all-reduce` and `explain broadcast`: the algorithm on real ranks, every step
recorded."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator
    from paceline.explain.run import ExplainOptions

PRELOAD = ("paceline.distributed.collectives.run",)

Story = dict[str, Any]

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


def tell(options: ExplainOptions) -> Story:
    """What was recorded, as :func:`record`."""
    return record(options.topic, options.algorithm, options.ranks, options.elements)


def surface(story: Story) -> Story:
    """The part of it that is printed as JSON, whose keys are fixed."""
    steps = [
        {
            **step,
            "sends": [
                {key: send[key] for key in ("from", "to", "chunk", "bytes")}
                for send in step["sends"]
            ],
        }
        for step in story["steps"]
    ]
    kept = {key: story[key] for key in ("algorithm", "ranks", "elements")}
    return {
        **kept,
        "steps": steps,
        **{key: story[key] for key in ("bytes_sent", "messages_sent", "result_ok")},
    }


def title(story: Story) -> str:
    return (
        f"{story['collective'].capitalize()} by {story['algorithm']},"
        f" {counted(story['ranks'], 'rank')}"
    )


def record(collective: str, algorithm: str, ranks: int, elements: int) -> Story:
    """Run it on real processes. Rank r begins with 2^r in every element, so that each value tells
    whose parts are in it.

    Returns: the fixed keys (``algorithm, ranks, elements, steps, bytes_sent, messages_sent,
    result_ok``; bytes and messages one a rank), and beside them ``collective``, ``segments``
    (ranges of elements that move together) and ``held`` (before the first step and after each: for
    each rank, for each segment, the value).
    """
    found = run_on_ranks(_record_rank, ranks, collective, algorithm, elements)
    first = found[0]
    steps = []
    for number, step in enumerate(first["steps"]):
        sends = [
            {"from": rank, **send}
            for rank, one in enumerate(found)
            for send in one["steps"][number]["sends"]
        ]
        steps.append({"phase": step["phase"], "step": step["step"], "sends": sends})
    return {
        "algorithm": algorithm,
        "ranks": ranks,
        "elements": elements,
        "steps": steps,
        "bytes_sent": [one["bytes"] for one in found],
        "messages_sent": [one["messages"] for one in found],
        "result_ok": all(one["ok"] for one in found),
        "collective": collective,
        "element_size": first["element_size"],
        "segments": first["segments"],
        "held": [[one["held"][number] for one in found] for number in range(len(steps) + 1)],
    }


def _record_rank(
    world: Communicator, collective: str, algorithm: str, elements: int
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from paceline.distributed.collectives import run as collectives

    tensor = torch.full((elements,), 2.0**world.rank)
    backend, trace = tensor.clone(), collectives.Trace()
    if collective == "all-reduce":
        done = collectives.all_reduce(world, tensor, algorithm, trace)
    else:
        done = collectives.broadcast(world, tensor, algorithm, trace=trace)
    if world.size > 1:
        if collective == "all-reduce":
            dist.all_reduce(backend)
        else:
            dist.broadcast(backend, src=0)
    cuts = {0, elements}
    for step in trace.steps:
        cuts |= {edge for send in step.sends for edge in (send.start, send.stop)}
    edges = sorted(cuts)
    segments = list(pairwise(edges))
    steps = [
        {
            "phase": step.phase,
            "step": step.step,
            "sends": [
                {
                    "to": send.target,
                    "chunk": send.chunk,
                    "start": send.start,
                    "stop": send.stop,
                    "bytes": send.count * tensor.element_size(),
                }
                for send in step.sends
                if send.source == world.rank
            ],
        }
        for step in trace.steps
    ]
    return {
        "steps": steps,
        "held": [[int(values[start]) for start, _ in segments] for values in trace.values],
        "segments": segments,
        "bytes": done.bytes,
        "messages": done.messages,
        "element_size": tensor.element_size(),
        "ok": bool(torch.equal(tensor, backend)),
    }


def holders(value: int, ranks: int) -> str:
    """Whose parts a value holds: ``0+2``, ``all``, or how many where there are too many to name."""
    parts = [rank for rank in range(ranks) if value >> rank & 1]
    if len(parts) == ranks and ranks > 1:
        return "all"
    return "+".join(map(str, parts)) if len(parts) <= 4 else f"{len(parts)} of {ranks}"


def about(story: Story) -> str:
    """What the algorithm does, in a few sentences."""
    table = _ABOUT if story["collective"] == "all-reduce" else _ABOUT_BROADCAST
    return table[story["algorithm"]].format(chunks=counted(story["ranks"], "chunk"))


def text(story: Story) -> str:
    """Every step for a terminal."""
    ranks = story["ranks"]
    size = story["elements"] * story["element_size"]
    lines = [
        (
            f"{story['collective']} by {story['algorithm']}: {counted(ranks, 'rank')},"
            f" {counted(story['elements'], 'element')} of float32 ({human_bytes(size)})"
        ),
        about(story),
        "",
        "Rank r begins with 2^r in every element. Below: whose parts each rank holds, by elements.",
        *_held(story, 0),
    ]
    totals: dict[str, int] = {}
    for step in story["steps"]:
        totals[step["phase"]] = totals.get(step["phase"], 0) + 1
    for number, step in enumerate(story["steps"], 1):
        lines += ["", f"{step['phase']}, step {step['step'] + 1} of {totals[step['phase']]}"]
        for send in step["sends"]:
            lines.append(
                f"  rank {send['from']} → rank {send['to']}   {what(send)}  "
                f" {human_bytes(send['bytes'])}"
            )
        lines += _held(story, number)
    lines += ["", *_totals(story, size)]
    return "\n".join(lines)


def what(send: dict[str, Any]) -> str:
    """``chunk 2 (elements 4–5)``."""
    last = send["stop"] - 1
    span = f"element {last}" if last == send["start"] else f"elements {send['start']}–{last}"
    return f"chunk {send['chunk']} ({span})"


def _held(story: Story, state: int) -> list[str]:
    heads = [
        f"{start}" if stop - start == 1 else f"{start}–{stop - 1}"
        for start, stop in story["segments"]
    ]
    rows = [[holders(value, story["ranks"]) for value in row] for row in story["held"][state]]
    widths = [max(len(head), *(len(row[at]) for row in rows)) for at, head in enumerate(heads)]
    lines = [
        "  holds    "
        + "  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True))
    ]
    for rank, row in enumerate(rows):
        lines.append(
            f"  rank {rank:<3} "
            + "  ".join(one.ljust(width) for one, width in zip(row, widths, strict=True))
        )
    return [line.rstrip() for line in lines]


def _totals(story: Story, size: int) -> list[str]:
    lines = []
    for rank, (sent, messages) in enumerate(
        zip(story["bytes_sent"], story["messages_sent"], strict=True)
    ):
        share = f", {sent / size:.2f} × the tensor" if size else ""
        lines.append(
            f"rank {rank} sent {human_bytes(sent)} in {counted(messages, 'message')}{share}"
        )
    verdict = (
        "the same as the backend's own"
        if story["result_ok"]
        else "NOT the same as the backend's own"
    )
    return [*lines, f"result: {verdict} {story['collective']}"]


def player(story: Story) -> dict[str, Any]:
    """What the page plays."""
    captions = ["The start: each rank holds its own values."]
    if story["collective"] == "broadcast":
        captions = ["The start: each rank holds its own values; rank 0's are to be everyone's."]
    totals: dict[str, int] = {}
    for step in story["steps"]:
        totals[step["phase"]] = totals.get(step["phase"], 0) + 1
    for step in story["steps"]:
        many, moved = (
            counted(len(step["sends"]), "message"),
            human_bytes(sum(send["bytes"] for send in step["sends"])),
        )
        captions.append(
            f"{step['phase']}, step {step['step'] + 1} of {totals[step['phase']]}: {many}, {moved}"
            " in all"
        )
    keys = ("ranks", "elements", "steps", "segments", "held")
    return {"kind": "chunks", "captions": captions, **{key: story[key] for key in keys}}


def facts(story: Story) -> list[tuple[str, str]]:
    """Figures for the head of the page."""
    size = story["elements"] * story["element_size"]
    busiest = max(story["bytes_sent"])
    return [
        ("Ranks", str(story["ranks"])),
        ("Tensor", f"{counted(story['elements'], 'element')}, {human_bytes(size)}"),
        ("Steps", str(len(story["steps"]))),
        ("Busiest rank sends", f"{human_bytes(busiest)} ({busiest / size:.2f} × the tensor)"),
        ("Messages of the busiest rank", str(max(story["messages_sent"]))),
        ("Result", "as the backend's" if story["result_ok"] else "differs from the backend's"),
    ]

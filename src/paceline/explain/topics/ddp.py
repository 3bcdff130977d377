"""`paceline explain ddp`: the timeline of a real step with gradient buckets and their overlapping
all-reduces."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import (
    Cell,
    Check,
    Collective,
    DrawnRow,
    Frame,
    Recording,
    Span,
    check_traffic,
    on_step_clock,
)
from paceline.launch.fork_server import OPTIMIZER_MODULE
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    import torch

    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.explain.training", "paceline.strategies.ddp.strategy", OPTIMIZER_MODULE)
_BUCKET_CAP_MB = 2.1  # two layers
_WARM_UP_STEPS = 3
_ABOUT = (
    "Distributed data parallel: every rank has the full model and its own part of the batch."
    " Backward runs from the last layer to the first and fills gradient buckets. The all-reduce of"
    " a full bucket starts immediately, while backward continues with earlier layers. At the end,"
    " each rank waits only for the rest of the last all-reduce."
)


@dataclass(frozen=True)
class Fill:
    """A gradient that backward has computed, on the clock of the spans."""

    rank: int
    bucket: int
    time_s: float
    size_bytes: int


@dataclass(frozen=True)
class RecordedRank:
    """The recording of one rank. ``buckets``: bytes of each, in the order in which backward fills
    them; ``sent_bytes``: sent for each; ``counted_bytes``: sent in the step, by its counter."""

    spans: list[Span]
    fills: list[Fill]
    buckets: list[int]
    sent_bytes: list[int]
    counted_bytes: int
    is_correct: bool


def record(options: ExplainOptions) -> Recording:
    """Record a step of a small training on real ranks.

    The figures: ``ranks, buckets`` (bytes of each, in the order in which backward fills them),
    ``fills`` (when each gradient was ready) and ``overlap`` (share of the all-reduce time on rank 0
    that overlapped with backward).
    """
    results: list[RecordedRank] = run_on_ranks(_record_rank, options.ranks)
    ranks, buckets = options.ranks, results[0].buckets
    spans, begin = on_step_clock(span for rank in results for span in rank.spans)
    fills = [
        Fill(fill.rank, fill.bucket, fill.time_s - begin, fill.size_bytes)
        for rank in results
        for fill in rank.fills
    ]
    overlap = _overlap([span for span in spans if span.actor == 0])
    share = "unknown" if overlap is None else f"{100 * overlap:.0f} %"
    frames = _frames(spans, fills, results)
    return Recording(
        topic="ddp",
        title=f"DDP: one step on {counted(ranks, 'rank')}, {counted(len(buckets), 'bucket')}",
        about=_ABOUT,
        actors=tuple(f"rank {rank}" for rank in range(ranks)),
        frames=frames,
        checks=(
            check_traffic(frames, [rank.counted_bytes for rank in results]),
            Check.equal(
                "gradients equal those of one process",
                [True] * ranks,
                [rank.is_correct for rank in results],
            ),
        ),
        facts=(
            ("Gradients", f"{human_bytes(sum(buckets))} in {counted(len(buckets), 'bucket')}"),
            ("Step", f"{1000 * max(span.end_s for span in spans):.1f} ms"),
            ("All-reduce during backward on rank 0", share),
        ),
        spans=tuple(spans),
        figures={
            "ranks": ranks,
            "buckets": buckets,
            "fills": [vars(fill) for fill in fills],
            "overlap": overlap,
        },
    )


def _overlap(spans: list[Span]) -> float | None:
    """Return the share of a rank's all-reduce time that overlapped with backward."""
    end_s = next(span.end_s for span in spans if span.kind == "backward")
    reduces = [span for span in spans if span.kind == "all-reduce"]
    total = sum(span.end_s - span.start_s for span in reduces)
    inside = sum(max(0.0, min(span.end_s, end_s) - span.start_s) for span in reduces)
    return inside / total if total else None


def _record_rank(world: Communicator) -> RecordedRank:

    from paceline.distributed.traffic import log_calls
    from paceline.explain import training
    from paceline.strategies.ddp.strategy import DDPStrategy

    strategy = DDPStrategy(training.make_config("ddp", _BUCKET_CAP_MB), world)
    model = training.make_model()
    gradients: list[tuple[torch.Tensor, float]] = []
    # Registered before the strategy's hooks, so that the last gradient precedes its all-reduce.
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda tensor: gradients.append((tensor, time.perf_counter()))
        )
    strategy.setup(model)
    optimizer = strategy.setup_optimizer(training.build_adamw)
    batch = training.make_batch(world.rank)
    is_correct = True
    marks: dict[str, float] = {}

    def micro_step(_: int, module: torch.nn.Module) -> torch.Tensor:
        marks["forward"] = time.perf_counter()
        loss = training.loss_of(module, batch, world.size)
        marks["backward"] = time.perf_counter()
        return loss

    for number in range(_WARM_UP_STEPS + 1):
        world.barrier()
        gradients.clear()
        before = world.traffic.total
        with log_calls() as calls:
            strategy.forward_backward(micro_step, 1)
        counted_bytes = world.traffic.total - before
        marks["update"] = time.perf_counter()
        if number == 0:
            is_correct = training.has_reference_gradients(model, world.size)
        else:
            optimizer.step()
        marks["end"] = time.perf_counter()
    world.barrier()
    last = gradients[-1][1]
    bounds = {
        "forward": (marks["forward"], marks["backward"]),
        "backward": (marks["backward"], last),
        "wait": (last, marks["update"]),
        "update": (marks["update"], marks["end"]),
    }
    spans = [
        Span(world.rank, "compute", kind, kind, start_s, end_s)
        for kind, (start_s, end_s) in bounds.items()
    ]
    for number, call in enumerate(calls):
        end_s = min(call.end_s, marks["update"])
        label = f"bucket {number}"
        spans.append(
            Span(world.rank, "network", "all-reduce", label, call.start_s, end_s, call.size_bytes)
        )
    buckets = [bucket.parameters for bucket in strategy.buckets.buckets]
    return RecordedRank(
        spans,
        _fills(world.rank, buckets, gradients),
        [sum(parameter.nbytes for parameter in parameters) for parameters in buckets],
        [call.size_bytes for call in calls],
        counted_bytes,
        is_correct,
    )


def _fills(
    rank: int,
    buckets: list[list[torch.nn.Parameter]],
    gradients: list[tuple[torch.Tensor, float]],
) -> list[Fill]:
    bucket_of = {
        id(parameter): number
        for number, parameters in enumerate(buckets)
        for parameter in parameters
    }
    return [
        Fill(rank, bucket_of[id(tensor)], time_s, tensor.nbytes) for tensor, time_s in gradients
    ]


def _frames(spans: list[Span], fills: list[Fill], results: list[RecordedRank]) -> tuple[Frame, ...]:
    """Return a frame for each change on rank 0."""
    buckets, end_s = results[0].buckets, max(span.end_s for span in spans)
    rank0_spans = [span for span in spans if span.actor == 0]
    backward_end_s = next(span.end_s for span in rank0_spans if span.kind == "backward")
    moments: list[tuple[float, str, int | None]] = [
        (0.0, "The step starts.", None),
        (end_s, "All ranks have applied the same update.", None),
    ]
    number = 0
    for span in rank0_spans:
        if span.kind == "all-reduce":
            is_last = span.start_s >= backward_end_s or number + 1 == len(buckets)
            rest = "it is the last one" if is_last else "backward continues"
            size = human_bytes(buckets[number])
            full = f"Rank 0: bucket {number} is full ({size}); its all-reduce starts, {rest}."
            moments.append((span.start_s, full, number))
            text = f"Rank 0: bucket {number} has the sum over all ranks."
            moments.append((span.end_s, text, None))
            number += 1
        elif span.kind == "forward":
            text = "Rank 0: forward is done; backward starts with the last layer."
            moments.append((span.end_s, text, None))
        elif span.kind == "backward":
            moments.append((span.end_s, "Rank 0: backward is done.", None))
        elif span.kind == "update":
            text = "Rank 0: all buckets are reduced; the optimizer updates the weights."
            moments.append((span.start_s, text, None))
    frames = []
    for time_s, text, bucket in sorted(moments, key=lambda moment: moment[0]):
        reduced = () if bucket is None else (_all_reduce(bucket, results),)
        rows = tuple(
            (DrawnRow("buckets", _bucket_cells(rank, time_s, spans, fills, buckets)),)
            for rank in range(len(results))
        )
        frames.append(Frame(text, rows, collectives=reduced, time_s=time_s))
    return tuple(frames)


def _all_reduce(bucket: int, results: list[RecordedRank]) -> Collective:
    actors = tuple(range(len(results)))
    return Collective("all-reduce", actors, f"bucket {bucket}", results[0].sent_bytes[bucket])


def _bucket_cells(
    rank: int, time_s: float, spans: list[Span], fills: list[Fill], buckets: list[int]
) -> tuple[Cell, ...]:
    """Return the state of each bucket of a rank at a time."""
    reduces = [span for span in spans if span.actor == rank and span.kind == "all-reduce"]
    cells = []
    for bucket, size_bytes in enumerate(buckets):
        filled_bytes = sum(
            fill.size_bytes
            for fill in fills
            if (fill.rank, fill.bucket) == (rank, bucket) and fill.time_s <= time_s
        )
        share = filled_bytes / size_bytes
        if bucket < len(reduces) and reduces[bucket].end_s <= time_s:
            cells.append(Cell(f"{bucket}: summed", tone="done"))
        elif bucket < len(reduces) and reduces[bucket].start_s <= time_s:
            cells.append(Cell(f"{bucket}: all-reduce", fill=share, tone="new"))
        else:
            cells.append(Cell(f"{bucket}: {100 * share:.0f} %", fill=share))
    return tuple(cells)

"""`paceline explain ddp`: the timeline of a real step with gradient buckets and their overlapping
all-reduces."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.explain import timeline
from paceline.explain.run import ExplainOptions, Recording
from paceline.explain.timeline import Span
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.explain.training", "paceline.parallel.ddp.strategy", "torch._dynamo")
_BUCKET_CAP_MB = 2.1  # two layers
_WARM_UP_STEPS = 3
_COLORS = {
    "forward": "var(--c3)",
    "backward": "var(--c1)",
    "all-reduce": "var(--c2)",
    "wait": "var(--c4)",
    "update": "var(--c5)",
    "summed": "var(--c6)",
}
_ABOUT = (
    "Distributed data parallel: every rank has the full model and its own part of the batch."
    " Backward runs from the last layer to the first and fills gradient buckets. The all-reduce of"
    " a full bucket starts immediately, while backward continues with earlier layers. At the end,"
    " each rank waits only for the rest of the last all-reduce."
)


class Fill(TypedDict):
    """A gradient that backward has computed, on the clock of the spans."""

    bucket: int
    time: float
    bytes: int
    rank: int


@dataclass(frozen=True)
class RankStep:
    """The recording of one rank. ``buckets``: bytes of each, in the order in which backward fills
    them."""

    spans: list[Span]
    fills: list[Fill]
    buckets: list[int]
    is_correct: bool


def record(options: ExplainOptions) -> Recording:
    """Record a step of a small training on real ranks.

    The content: ``topic, ranks, buckets`` (bytes of each, in the order in which backward fills
    them), ``spans`` (forward, backward, all-reduce, wait, update; seconds from the start of the
    step), ``fills`` (when each gradient was ready), ``overlap`` (share of the all-reduce time on
    rank 0 that overlapped with backward) and ``result_ok`` (the gradients equal those of one
    process).
    """
    results: list[RankStep] = run_on_ranks(_record_rank, options.ranks)
    ranks, buckets = options.ranks, results[0].buckets
    spans = [span for rank in results for span in rank.spans]
    fills = [fill for rank in results for fill in rank.fills]
    begin = timeline.on_step_clock(spans)
    for fill in fills:
        fill["time"] -= begin
    is_correct = all(rank.is_correct for rank in results)
    overlap = _overlap([span for span in spans if span["rank"] == 0])
    share = "unknown" if overlap is None else f"{100 * overlap:.0f} %"
    moments = _moments(spans, buckets)
    label, verdict = timeline.gradients_fact(is_correct)
    title = f"DDP: one step on {counted(ranks, 'rank')}"
    row_names, rows = stack(spans)
    return Recording(
        title=title,
        about=_ABOUT,
        is_correct=is_correct,
        facts=[
            ("Ranks", str(ranks)),
            ("Buckets", f"{len(buckets)}, {human_bytes(sum(buckets))} in total"),
            timeline.step_fact(spans),
            ("All-reduce during backward", share),
            (label, verdict),
        ],
        lines=[
            f"{title}, {counted(len(buckets), 'bucket')}",
            _ABOUT,
            "",
            *(f"{1000 * when:8.2f} ms  {text}" for when, text in moments),
            "",
            *(_rank_line(rank, spans) for rank in range(ranks)),
            f"all-reduce time during backward on rank 0: {share}",
            f"{label.lower()}: {verdict}",
        ],
        captions=timeline.captions(moments),
        player={
            **timeline.player(spans, ranks, moments, row_names, rows, _COLORS),
            "buckets": buckets,
            "fills": fills,
        },
        content={
            "topic": "ddp",
            "ranks": ranks,
            "buckets": buckets,
            "spans": spans,
            "fills": fills,
            "overlap": overlap,
            "result_ok": is_correct,
        },
    )


def _overlap(spans: list[Span]) -> float | None:
    """Return the share of a rank's all-reduce time that overlapped with backward."""
    end = next(span["end"] for span in spans if span["kind"] == "backward")
    reduces = [span for span in spans if span["kind"] == "all-reduce"]
    total = sum(span["end"] - span["start"] for span in reduces)
    inside = sum(max(0.0, min(span["end"], end) - span["start"]) for span in reduces)
    return inside / total if total else None


def _record_rank(world: Communicator) -> RankStep:
    import torch

    from paceline.explain import training
    from paceline.parallel.ddp.strategy import DDPStrategy

    timed = _timed(world)
    strategy = DDPStrategy(training.make_config("ddp", _BUCKET_CAP_MB), timed)
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
        timed.reduces.clear()
        strategy.forward_backward(micro_step, 1)
        marks["update"] = time.perf_counter()
        if number == 0:
            is_correct = training.has_reference_gradients(model, world.size)
        else:
            optimizer.step()
        marks["end"] = time.perf_counter()
    world.barrier()

    def compute(kind: str, start: float, end: float) -> Span:
        return Span(lane="compute", kind=kind, label=kind, start=start, end=end, rank=world.rank)

    last = gradients[-1][1]
    spans = [
        compute("forward", marks["forward"], marks["backward"]),
        compute("backward", marks["backward"], last),
        compute("wait", last, marks["update"]),
        compute("update", marks["update"], marks["end"]),
    ]
    for number, (start, end) in enumerate(timed.reduces):
        spans.append(
            Span(
                lane="network",
                kind="all-reduce",
                label=f"bucket {number}",
                start=start,
                end=end or marks["update"],
                bucket=number,
                rank=world.rank,
            )
        )
    buckets = [bucket.parameters for bucket in strategy.buckets.buckets]
    bucket_of = {
        id(parameter): number
        for number, parameters in enumerate(buckets)
        for parameter in parameters
    }
    fills = [
        Fill(bucket=bucket_of[id(tensor)], time=when, bytes=tensor.nbytes, rank=world.rank)
        for tensor, when in gradients
    ]
    sizes = [sum(parameter.nbytes for parameter in parameters) for parameters in buckets]
    return RankStep(spans, fills, sizes, is_correct)


def _timed(world: Communicator) -> Any:
    """Return the same communicator, which also records start and end of each all-reduce."""
    from paceline.distributed.communicator import Communicator

    class TimedCommunicator(Communicator):
        reduces: list[list[float]] = []  # noqa: RUF012

        def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            times = [time.perf_counter(), 0.0]
            self.reduces.append(times)
            work = super().all_reduce(tensor, *args, **kwargs)
            if work is not None:
                work.get_future().add_done_callback(
                    lambda _: times.__setitem__(1, time.perf_counter())
                )
            return work

    return TimedCommunicator(
        world.env, world.device, world.axes, world.group, world.ranks, world.waits
    )


def _moments(spans: list[Span], buckets: list[int]) -> timeline.Moments:
    """Return the time and the caption of each change on rank 0."""
    moments = [(0.0, "The step starts.")]
    moments.append((timeline.end_of(spans), "All ranks have applied the same update."))
    rank0_spans = [span for span in spans if span["rank"] == 0]
    backward_end = next(span["end"] for span in rank0_spans if span["kind"] == "backward")
    for span in rank0_spans:
        start, end = span["start"], span["end"]
        if span["kind"] == "all-reduce":
            number = span["bucket"]
            is_last = start >= backward_end or number + 1 == len(buckets)
            rest = "it is the last one" if is_last else "backward continues"
            size = human_bytes(buckets[number])
            full = f"Rank 0: bucket {number} is full ({size}); its all-reduce starts, {rest}."
            moments.append((start, full))
            moments.append((end, f"Rank 0: bucket {number} has the sum over all ranks."))
        elif span["kind"] == "forward":
            moments.append((end, "Rank 0: forward is done; backward starts with the last layer."))
        elif span["kind"] == "backward":
            moments.append((end, "Rank 0: backward is done."))
        elif span["kind"] == "update":
            text = "Rank 0: all buckets are reduced; the optimizer updates the weights."
            moments.append((start, text))
    return sorted(moments)


def stack(spans: list[Span]) -> tuple[list[str], list[int]]:
    """Return the names of the timeline's rows, and the row of each span. Overlapping spans of a
    lane are in separate rows."""
    ends: dict[tuple[int, str], list[float]] = {}
    places = []
    for span in spans:
        rows = ends.setdefault((span["rank"], span["lane"]), [])
        row = next((at for at, end in enumerate(rows) if end <= span["start"]), len(rows))
        rows[row:] = [span["end"], *rows[row + 1 :]]
        places.append((span["rank"], span["lane"], row))
    rows_of_lanes = [
        (rank, name, row) for (rank, name), rows in ends.items() for row in range(len(rows))
    ]
    names = [
        f"rank {rank} {name}" + (f" {row + 1}" if len(ends[rank, name]) > 1 else "")
        for rank, name, row in rows_of_lanes
    ]
    return names, [rows_of_lanes.index(place) for place in places]


def _rank_line(rank: int, spans: list[Span]) -> str:
    times = dict.fromkeys((kind for kind in _COLORS if kind != "summed"), 0.0)
    for span in spans:
        if span["rank"] == rank:
            times[span["kind"]] += span["end"] - span["start"]
    return f"rank {rank}: " + ", ".join(
        f"{kind} {1000 * seconds:.2f} ms" for kind, seconds in times.items()
    )

"""`paceline explain ddp`: gradient buckets fill during backward and are all-reduced beside it, from
a real step's clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.explain import timeline
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator
    from paceline.explain.run import ExplainOptions

Story = dict[str, Any]

PRELOAD = ("paceline.explain.training", "paceline.parallel.ddp.strategy", "torch._dynamo")
_BUCKET_CAP_MB = 2.1  # two layers
_WARM_UP_STEPS = 3
_COLOURS = {
    "forward": "var(--c3)",
    "backward": "var(--c1)",
    "all-reduce": "var(--c2)",
    "wait": "var(--c4)",
    "update": "var(--c5)",
    "summed": "var(--c6)",
}


def tell(options: ExplainOptions) -> Story:
    """A step of a small training on real ranks.

    Returns: ``topic, ranks, buckets`` (bytes of each, in the order in which backward fills them),
    ``spans`` (forward, backward, all-reduce, wait, update; seconds from the start of the step),
    ``fills`` (when each gradient came), ``overlap`` (share of the all-reduces' time, on rank 0,
    that lay within backward) and ``result_ok`` (the gradients are those of one process).
    """
    found = run_on_ranks(_record_rank, options.ranks)
    begin = min(span["start"] for one in found for span in one["spans"])
    spans = timeline.shifted(
        [{**span, "rank": rank} for rank, one in enumerate(found) for span in one["spans"]], begin
    )
    fills = [
        {**fill, "rank": rank, "time": fill["time"] - begin}
        for rank, one in enumerate(found)
        for fill in one["fills"]
    ]
    mine = [span for span in spans if span["rank"] == 0]
    backward = next(span for span in mine if span["kind"] == "backward")
    reduces = [span for span in mine if span["kind"] == "all-reduce"]
    total = sum(span["end"] - span["start"] for span in reduces)
    inside = sum(max(0.0, min(span["end"], backward["end"]) - span["start"]) for span in reduces)
    return {
        "topic": "ddp",
        "ranks": options.ranks,
        "buckets": found[0]["buckets"],
        "spans": timeline.in_order(spans),
        "fills": fills,
        "overlap": inside / total if total else None,
        "result_ok": all(one["ok"] for one in found),
    }


def _record_rank(world: Communicator) -> dict[str, Any]:
    from paceline.explain import training
    from paceline.parallel.ddp.strategy import DDPStrategy

    watched = _watched(world)
    strategy = DDPStrategy(training.make_config("ddp", _BUCKET_CAP_MB), watched)
    model = training.make_model()
    gradients: list[tuple[Any, float]] = []
    for (
        parameter
        # before the strategy's own hooks, so that the last gradient stands before its all-reduce
    ) in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda one: gradients.append((one, time.perf_counter()))
        )
    strategy.setup(model)
    optimizer = strategy.setup_optimizer(training.build_adamw)
    batch = training.make_batch(world.rank)
    ok = True
    marks: dict[str, float] = {}

    def micro_step(_: int, module: Any) -> Any:
        marks["forward"] = time.perf_counter()
        loss = training.loss_of(module, batch, world.size)
        marks["backward"] = time.perf_counter()
        return loss

    for number in range(_WARM_UP_STEPS + 1):
        world.barrier()
        gradients.clear()
        watched.reduces.clear()
        strategy.forward_backward(micro_step, 1)
        marks["update"] = time.perf_counter()
        if number == 0:
            ok = training.as_reference(
                [one.grad for one in model.parameters() if one.grad is not None], world.size
            )
        else:
            optimizer.step()
        marks["end"] = time.perf_counter()
    world.barrier()
    bucket_of = {
        id(parameter): at
        for at, one in enumerate(strategy.buckets.buckets)
        for parameter in one.parameters
    }
    spans = [training.span("compute", "forward", "forward", marks["forward"], marks["backward"])]
    last = gradients[-1][1]
    spans.append(training.span("compute", "backward", "backward", marks["backward"], last))
    spans.append(training.span("compute", "wait", "wait", last, marks["update"]))
    spans.append(training.span("compute", "update", "update", marks["update"], marks["end"]))
    for bucket, (start, end) in enumerate(watched.reduces):
        spans.append(
            training.span(
                "network",
                "all-reduce",
                f"bucket {bucket}",
                start,
                end or marks["update"],
                bucket=bucket,
            )
        )
    fills = [
        {"bucket": bucket_of[id(one)], "time": when, "bytes": one.numel() * one.element_size()}
        for one, when in gradients
    ]
    sizes = [
        sum(one.numel() * one.element_size() for one in bucket.parameters)
        for bucket in strategy.buckets.buckets
    ]
    return {"spans": spans, "fills": fills, "buckets": sizes, "ok": ok}


def _watched(world: Communicator) -> Any:
    """The same world, which notes when each all-reduce was started and when it had ended."""
    from paceline.distributed.communicator import Communicator

    class Watched(Communicator):
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

    return Watched(world.env, world.device, world.axes, world.group, world.ranks, world.waits)


def title(story: Story) -> str:
    return f"DDP: one step on {counted(story['ranks'], 'rank')}"


def about(story: Story) -> str:
    del story
    return (
        "Distributed data parallel: every rank has the whole model and its own part of the batch."
        " Backward goes from the last layer to the first and fills gradient buckets on its way; a"
        " full bucket is all-reduced at once, while backward goes on with the layers before. What"
        " is left to wait for is the end of the last bucket's all-reduce."
    )


def facts(story: Story) -> list[tuple[str, str]]:
    return [
        ("Ranks", str(story["ranks"])),
        ("Buckets", f"{len(story['buckets'])}, {human_bytes(sum(story['buckets']))} in all"),
        timeline.step_fact(story),
        (
            "All-reduce within backward",
            "unknown" if story["overlap"] is None else f"{100 * story['overlap']:.0f} %",
        ),
        timeline.gradients_fact(story),
    ]


def _moments(story: Story) -> list[tuple[float, str]]:
    """When something changes on rank 0, and what."""
    mine = [span for span in story["spans"] if span["rank"] == 0]
    found = [(0.0, "The step begins.")]
    backward_end = next(span["end"] for span in mine if span["kind"] == "backward")
    for span in mine:
        if span["kind"] == "all-reduce":
            size = human_bytes(story["buckets"][span["bucket"]])
            on = (
                "backward goes on"
                if span["start"] < backward_end and span["bucket"] + 1 < len(story["buckets"])
                else "it was the last"
            )
            found.append(
                (
                    span["start"],
                    (
                        f"Rank 0: bucket {span['bucket']} is full ({size}); its all-reduce starts,"
                        f" {on}."
                    ),
                )
            )
            found.append(
                (span["end"], f"Rank 0: bucket {span['bucket']} holds the sum over all ranks.")
            )
        elif span["kind"] == "forward":
            found.append(
                (span["end"], "Rank 0: forward is done, backward begins with the last layer.")
            )
        elif span["kind"] == "backward":
            found.append((span["end"], "Rank 0: backward is done."))
        elif span["kind"] == "update":
            found.append(
                (span["start"], "Rank 0: every bucket has come; the optimizer updates the weights.")
            )
    return sorted([*found, (timeline.end_of(story), "All ranks have made the same update.")])


def player(story: Story) -> dict[str, Any]:
    lanes, bars = stack(story["spans"])
    buckets, fills = story["buckets"], story["fills"]
    return timeline.player(
        story, _moments(story), lanes, bars, _COLOURS, buckets=buckets, fills=fills
    )


def stack(spans: list[dict[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Names of the lanes of a picture, and the spans with ``lane`` as a number: spans of one name
    that overlap get lanes of their own."""
    ends: dict[tuple[int, str], list[float]] = {}
    placed = []
    for one in spans:
        rows = ends.setdefault((one["rank"], one["lane"]), [])
        row = next((at for at, end in enumerate(rows) if end <= one["start"]), len(rows))
        rows[row:] = [one["end"], *rows[row + 1 :]]
        placed.append((one, (one["rank"], one["lane"], row)))
    order = [(rank, lane, row) for (rank, lane), rows in ends.items() for row in range(len(rows))]
    names = [
        f"rank {rank} {lane}" + (f" {row + 1}" if len(ends[rank, lane]) > 1 else "")
        for rank, lane, row in order
    ]
    return names, [{**one, "lane": order.index(key)} for one, key in placed]


def text(story: Story) -> str:
    lines = [f"{title(story)}, {counted(len(story['buckets']), 'bucket')}", about(story), ""]
    lines += [f"{1000 * when:8.2f} ms  {what}" for when, what in _moments(story)]
    lines.append("")
    for rank in range(story["ranks"]):
        spans = [span for span in story["spans"] if span["rank"] == rank]
        times = {
            kind: sum(span["end"] - span["start"] for span in spans if span["kind"] == kind)
            for kind in _COLOURS
        }
        said = ", ".join(
            f"{kind} {1000 * seconds:.2f} ms" for kind, seconds in times.items() if kind != "summed"
        )
        lines.append(f"rank {rank}: {said}")
    share = "unknown" if story["overlap"] is None else f"{100 * story['overlap']:.0f} %"
    lines.append(f"all-reduce that lay within backward on rank 0: {share}")
    lines.append(timeline.gradients_line(story))
    return "\n".join(lines)

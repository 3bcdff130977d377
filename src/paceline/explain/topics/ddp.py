"""`paceline explain ddp`: the timeline of a real step with gradient buckets and their overlapping
all-reduces."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from paceline.core.files import human_bytes
from paceline.distributed.call_log import CountedCall
from paceline.distributed.traffic import log_calls
from paceline.explain import training
from paceline.explain.rank_topic import RankTopic
from paceline.explain.record import Cell, Check, Collective, DrawnRow, Frame, Span, on_step_clock
from paceline.messages.pages import PageText
from paceline.strategies.ddp.strategy import DDPStrategy

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


class DDPTopic(RankTopic):
    """Record a step of a small training on real ranks.

    The figures: ``ranks, buckets`` (bytes of each, in the order in which backward fills them),
    ``fills`` (when each gradient was ready) and ``overlap`` (share of the all-reduce time on rank 0
    that overlapped with backward).
    """

    about = _ABOUT

    def run(self) -> None:
        world = self.world
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
        marks = training.StepMarks(world)
        for number in range(_WARM_UP_STEPS + 1):
            world.barrier()
            gradients.clear()
            self.counted_bytes = 0
            with self.count_traffic(), log_calls() as calls:
                strategy.forward_backward(marks.micro_step, 1)
            marks.set("update")
            if number == 0:
                self.is_correct = training.has_reference_gradients(
                    dict(model.named_parameters()), world.size
                )
            else:
                optimizer.step()
            marks.set("end")
        world.barrier()
        self.sent_bytes = [call.size_bytes for call in calls]
        self._add_fills([bucket.parameters for bucket in strategy.buckets.buckets], gradients)
        self._add_spans(marks.times_s, gradients[-1][1], calls)
        self.title = PageText(
            "DDP: one step on {ranks:rank}, {buckets:bucket}",
            ranks=world.size,
            buckets=len(self.buckets),
        )

    def _add_fills(
        self,
        buckets: list[list[torch.nn.Parameter]],
        gradients: list[tuple[torch.Tensor, float]],
    ) -> None:
        self.buckets = [sum(parameter.nbytes for parameter in members) for members in buckets]
        bucket_of = {
            id(parameter): number for number, members in enumerate(buckets) for parameter in members
        }
        self.fills = [
            Fill(self.world.rank, bucket_of[id(tensor)], time_s, tensor.nbytes)
            for tensor, time_s in gradients
        ]

    def _add_spans(
        self, times_s: dict[str, float], last_s: float, calls: list[CountedCall]
    ) -> None:
        """Put the spans and fills of all ranks on the clock of the step. ``last_s``: when the last
        gradient was ready."""
        rank, update_s = self.world.rank, times_s["update"]
        bounds = {
            "forward": (times_s["forward"], times_s["backward"]),
            "backward": (times_s["backward"], last_s),
            "wait": (last_s, update_s),
            "update": (update_s, times_s["end"]),
        }
        spans = [Span(rank, "compute", kind, kind, *times) for kind, times in bounds.items()]
        spans += [
            Span(
                rank,
                "network",
                "all-reduce",
                PageText("bucket {number}", number=number),
                call.start_s,
                min(call.end_s, update_s),
                call.size_bytes,
            )
            for number, call in enumerate(calls)
        ]
        self.spans, begin = on_step_clock(self.gather_all(spans))
        self.fills = [
            replace(fill, time_s=fill.time_s - begin) for fill in self.gather_all(self.fills)
        ]

    def frames(self) -> Iterator[Frame]:
        """Return a frame for each change on rank 0."""
        for time_s, text, bucket in sorted(self._moments(), key=lambda moment: moment[0]):
            reduced = () if bucket is None else (self._all_reduce(bucket),)
            rows = tuple(
                (DrawnRow("buckets", self._bucket_cells(rank, time_s)),)
                for rank in range(self.world.size)
            )
            yield Frame(text, rows, collectives=reduced, time_s=time_s)

    def _moments(self) -> list[tuple[float, str, int | None]]:
        """Return the time and caption of each change on rank 0, and the bucket whose all-reduce
        starts then."""
        spans = [span for span in self.spans if span.actor == 0]
        backward_end_s = next(span.end_s for span in spans if span.kind == "backward")
        end_s = max(span.end_s for span in self.spans)
        moments: list[tuple[float, str, int | None]] = [
            (0.0, "The step starts.", None),
            (end_s, "All ranks have applied the same update.", None),
        ]
        number = 0
        for span in spans:
            if span.kind == "all-reduce":
                is_last = span.start_s >= backward_end_s or number + 1 == len(self.buckets)
                rest = "it is the last one" if is_last else "backward continues"
                size = human_bytes(self.buckets[number])
                full = PageText(
                    "Rank 0: bucket {number} is full ({size}); its all-reduce starts, {rest}.",
                    number=number,
                    size=size,
                    rest=rest,
                )
                moments.append((span.start_s, full, number))
                has_sum = "Rank 0: bucket {number} has the sum over all ranks."
                moments.append((span.end_s, PageText(has_sum, number=number), None))
                number += 1
            elif span.kind == "forward":
                text = "Rank 0: forward is done; backward starts with the last layer."
                moments.append((span.end_s, text, None))
            elif span.kind == "backward":
                moments.append((span.end_s, "Rank 0: backward is done.", None))
            elif span.kind == "update":
                text = "Rank 0: all buckets are reduced; the optimizer updates the weights."
                moments.append((span.start_s, text, None))
        return moments

    def _all_reduce(self, bucket: int) -> Collective:
        actors = tuple(range(self.world.size))
        return Collective(
            "all-reduce",
            actors,
            PageText("bucket {number}", number=bucket),
            self.sent_bytes[bucket],
        )

    def _bucket_cells(self, rank: int, time_s: float) -> tuple[Cell, ...]:
        """Return the state of each bucket of a rank at a time."""
        reduces = [span for span in self.spans if span.actor == rank and span.kind == "all-reduce"]
        cells = []
        for bucket, size_bytes in enumerate(self.buckets):
            filled_bytes = sum(
                fill.size_bytes
                for fill in self.fills
                if (fill.rank, fill.bucket) == (rank, bucket) and fill.time_s <= time_s
            )
            share = filled_bytes / size_bytes
            if bucket < len(reduces) and reduces[bucket].end_s <= time_s:
                cells.append(Cell(PageText("{bucket}: summed", bucket=bucket), tone="done"))
            elif bucket < len(reduces) and reduces[bucket].start_s <= time_s:
                cells.append(
                    Cell(PageText("{bucket}: all-reduce", bucket=bucket), fill=share, tone="new")
                )
            else:
                cells.append(Cell(f"{bucket}: {100 * share:.0f} %", fill=share))
        return tuple(cells)

    def checks(self) -> list[Check]:
        return [
            self.check_ranks("gradients equal the gradients of one process", self.is_correct),
        ]

    def facts(self) -> dict[str, str]:
        overlap = self._overlap()
        return {
            "Gradients": PageText(
                "{size} in {buckets:bucket}",
                size=human_bytes(sum(self.buckets)),
                buckets=len(self.buckets),
            ),
            "Step": f"{1000 * max(span.end_s for span in self.spans):.1f} ms",
            "All-reduce during backward on rank 0": (
                "unknown" if overlap is None else f"{100 * overlap:.0f} %"
            ),
        }

    def add_figures(self) -> None:
        self.figures.update(
            buckets=self.buckets,
            fills=[vars(fill) for fill in self.fills],
            overlap=self._overlap(),
        )

    def _overlap(self) -> float | None:
        """Return the share of the all-reduce time on rank 0 that overlapped with backward."""
        spans = [span for span in self.spans if span.actor == 0]
        end_s = next(span.end_s for span in spans if span.kind == "backward")
        reduces = [span for span in spans if span.kind == "all-reduce"]
        total = sum(span.end_s - span.start_s for span in reduces)
        inside = sum(max(0.0, min(span.end_s, end_s) - span.start_s) for span in reduces)
        return inside / total if total else None

"""`paceline explain pipeline`: forward and backward of each micro-batch on each stage, with
measured times and the bubble."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.core.files import human_bytes
from paceline.explain import training
from paceline.explain.rank_topic import RankTopic, make_mesh
from paceline.explain.record import Cell, Check, DrawnMessage, DrawnRow, Frame, Span, on_step_clock
from paceline.messages.pages import PageText
from paceline.parallel.registry import layout
from paceline.strategies.hybrid.strategy import HybridStrategy
from paceline.strategies.pipeline.schedule import DynamicStage

_WARM_UP_STEPS = 2
_ABOUT = {
    "gpipe": "GPipe (Huang et al., 2019): all forwards, then all backwards.",
    "1f1b": (
        "1F1B (Narayanan et al., 2019): a rank alternates forward and backward as soon as it can,"
        " so that it stores the activations of fewer micro-batches."
    ),
    "interleaved_1f1b": (
        "Interleaved 1F1B (Narayanan et al., 2021): each rank has several stages, so that the"
        " pipeline fills in smaller pieces."
    ),
    "zero_bubble": (
        "Zero bubble (Qi et al., 2023): backward is split into the gradient of the input, which the"
        " stage before waits for, and the gradient of the weights, which fills the gaps."
    ),
}
_COMMON = (
    " The layers are divided among the ranks, and the micro-batches pass through them. A rank is"
    " idle while the pipeline fills and drains: this is the bubble. On a machine with fewer cores"
    " than ranks, waiting ranks compete with computing ones."
)
_METHODS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weight gradient",
}


@dataclass(frozen=True)
class Event:
    """A pass of a micro-batch through a stage. ``messages``: (rank, bytes) sent after it."""

    rank: int
    stage: int
    micro_batch: int
    kind: str
    start_s: float
    end_s: float
    messages: tuple[tuple[int, int], ...] = ()


class PassLog:
    """Records the passes of this rank's stages, and what they send.

    Args:
        stages: stages to watch from now on.
    """

    def __init__(self, rank: int, stages: list[DynamicStage]) -> None:
        self.events: list[Event] = []
        self._rank = rank
        self._sends: dict[tuple[str, int, int], tuple[tuple[int, int], ...]] = {}
        for stage in stages:
            for name, kind in _METHODS.items():
                setattr(stage, name, self._timed(kind, stage, getattr(stage, name)))
            for name, kind in (("get_fwd_send_ops", "forward"), ("get_bwd_send_ops", "backward")):
                setattr(stage, name, self._watched(kind, stage, getattr(stage, name)))

    def _timed(self, kind: str, stage: DynamicStage, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(number: int, *args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            result = run(number, *args, **kwargs)
            end_s = time.perf_counter()
            event = Event(self._rank, stage.stage_index, number, kind, start_s, end_s)
            self.events.append(event)
            return result

        return call

    def _watched(
        self, kind: str, stage: DynamicStage, run: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(number: int) -> Any:
            operations = run(number)
            self._sends[kind, stage.stage_index, number] = tuple(
                (each.peer, each.tensor.nbytes) for each in operations
            )
            return operations

        return call

    def events_with_messages(self) -> list[Event]:
        return [
            replace(
                event,
                messages=self._sends.get((event.kind, event.stage, event.micro_batch), ()),
            )
            for event in self.events
        ]


class PipelineTopic(RankTopic):
    """Record a step of a small training on real ranks.

    The figures: ``algorithm, ranks, micro_batches, stages``, ``bubble`` (measured share of idle
    time, mean over the ranks) and ``ideal_bubble`` (of equally long passes with ``gpipe`` or
    ``1f1b``).
    """

    def run(self) -> None:
        world, self.micro_batches = self.world, 2 * self.world.size
        config = training.make_config("pipeline")
        config.parallel.pipeline_schedule = self.options.algorithm  # type: ignore[assignment]
        axes = layout(config.parallel, world.size).axes
        meshed = make_mesh(world, axes)
        strategy = HybridStrategy(config, meshed)
        strategy.setup(training.make_model())
        strategy.setup_optimizer(training.build_adamw)
        batches = [training.make_batch(number) for number in range(self.micro_batches)]
        assert strategy.pipeline is not None

        def micro_step(number: int, module: torch.nn.Module) -> torch.Tensor:
            return training.loss_of(module, batches[number], self.micro_batches)

        for number in range(_WARM_UP_STEPS + 1):
            world.barrier()
            self.counted_bytes = 0
            with self.count_traffic():
                strategy.forward_backward(micro_step, self.micro_batches)
            if number == 0:
                self.is_correct = training.has_reference_gradients(
                    strategy.trained, self.micro_batches
                )
                passes = PassLog(world.rank, strategy.pipeline.stages)
            elif number < _WARM_UP_STEPS:
                passes.events.clear()
        world.barrier()
        self._set_events(self.gather_all(passes.events_with_messages()))
        schedule = self.options.algorithm
        self.title = PageText(
            "Pipeline ({schedule}): {stages:stage} on {ranks:rank}, {count} micro-batches",
            schedule=schedule,
            stages=self.stages,
            ranks=world.size,
            count=self.micro_batches,
        )
        self.about = PageText("{about}{more}", about=_ABOUT[schedule], more=_COMMON)

    def _set_events(self, events: list[Event]) -> None:
        """Keep the events of all ranks, on the clock of the step, in the order of their ends."""
        self.spans, begin = on_step_clock(map(_span, events))
        self.events = [
            replace(event, start_s=event.start_s - begin, end_s=event.end_s - begin)
            for event in sorted(events, key=lambda event: event.end_s)
        ]
        self.stages = 1 + max(event.stage for event in events)
        self.end_s = max(span.end_s for span in self.spans)
        ranks = self.world.size
        busy_s = sum(span.end_s - span.start_s for span in self.spans)
        self.bubble = max(0.0, 1 - busy_s / (ranks * self.end_s))
        self.ideal_bubble = (ranks - 1) / (self.micro_batches + ranks - 1)

    def frames(self) -> Iterator[Frame]:
        done: dict[tuple[int, int], str] = {}
        start = "The step starts: all micro-batches wait at the first stage."
        yield Frame(start, self._rows(done, None), time_s=0.0)
        for event in self.events:
            place = (event.stage, event.micro_batch)
            done[place] = "✓" if event.kind != "forward" else "F"
            sent = tuple(
                DrawnMessage(
                    event.rank,
                    target,
                    PageText("micro-batch {number}", number=event.micro_batch),
                    size_bytes,
                )
                for target, size_bytes in event.messages
            )
            yield Frame(
                PageText(
                    "Rank {rank}, stage {stage}: {kind} of micro-batch {number} is done.",
                    rank=event.rank,
                    stage=event.stage,
                    kind=event.kind,
                    number=event.micro_batch,
                ),
                self._rows(done, place),
                messages=sent,
                time_s=event.end_s,
            )

    def _rows(
        self, done: dict[tuple[int, int], str], now: tuple[int, int] | None
    ) -> tuple[tuple[DrawnRow, ...], ...]:
        """Return the stages of each rank, with a cell for each micro-batch."""

        def cell(stage: int, number: int) -> Cell:
            state = done.get((stage, number), "")
            if (stage, number) == now:
                return Cell(f"{number} {state}", tone="new", fill=0.5 if state == "F" else 1.0)
            if state == "✓":
                return Cell(f"{number} {state}", tone="done")
            return Cell(f"{number} {state}".strip(), fill=0.5 if state else 0.0)

        def row(stage: int) -> DrawnRow:
            cells = tuple(cell(stage, number) for number in range(self.micro_batches))
            return DrawnRow(PageText("stage {number}", number=stage), cells)

        ranks = self.world.size
        return tuple(tuple(map(row, range(rank, self.stages, ranks))) for rank in range(ranks))

    def checks(self) -> list[Check]:
        passes = {(e.stage, e.micro_batch, e.kind) for e in self.events if "weight" not in e.kind}
        return [
            Check.equal(
                "each micro-batch passes each stage once in each direction",
                2 * self.stages * self.micro_batches,
                len(passes),
            ),
            Check.equal("no stage starts before its input is there", [], _too_early(self.events)),
            self.check_ranks("gradients equal the gradients of one process", self.is_correct),
        ]

    def facts(self) -> dict[str, str]:
        return {
            "Step": f"{1000 * self.end_s:.1f} ms",
            "Bubble, measured": f"{100 * self.bubble:.0f} %",
            "Bubble of equal passes with gpipe or 1f1b": f"{100 * self.ideal_bubble:.0f} %",
            "Sent by rank 0": human_bytes(self.counted_bytes),
        }

    def add_figures(self) -> None:
        self.figures.update(
            micro_batches=self.micro_batches,
            stages=self.stages,
            bubble=self.bubble,
            ideal_bubble=self.ideal_bubble,
        )


def _span(event: Event) -> Span:
    label = f"{event.kind[0].upper()}{event.micro_batch}"
    return Span(
        event.rank,
        PageText("stage {number}", number=event.stage),
        event.kind,
        label,
        event.start_s,
        event.end_s,
    )


def _too_early(events: list[Event]) -> list[tuple[str, int, int]]:
    """Return the passes that started before the one that they depend on had ended."""
    ends = {(event.kind, event.stage, event.micro_batch): event.end_s for event in events}
    early = []
    for event in events:
        before = event.stage - 1 if event.kind == "forward" else event.stage + 1
        needed_s = ends.get((event.kind, before, event.micro_batch))
        if event.kind != "weight gradient" and needed_s is not None and event.start_s < needed_s:
            early.append((event.kind, event.stage, event.micro_batch))
    return early

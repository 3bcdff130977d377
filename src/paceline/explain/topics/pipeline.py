"""`paceline explain pipeline`: forward and backward of each micro-batch on each stage, with
measured times and the bubble."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
    Span,
    check_traffic,
    on_step_clock,
)
from paceline.launch.fork_server import OPTIMIZER_MODULE
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    import torch

    from paceline.distributed.communicator import Communicator
    from paceline.strategies.pipeline.schedule import DynamicStage

PRELOAD = (
    "paceline.explain.training",
    "paceline.strategies.hybrid.strategy",
    "paceline.strategies.pipeline.runner",
    OPTIMIZER_MODULE,
)
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
        " stage before waits for, and that of the weights, which fills the gaps."
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


@dataclass(frozen=True)
class RankEvents:
    """The recording of one rank. ``sends``: (kind, stage, micro-batch) → messages."""

    events: list[Event]
    sends: dict[tuple[str, int, int], tuple[tuple[int, int], ...]]
    counted_bytes: int
    is_correct: bool


def record(options: ExplainOptions) -> Recording:
    """Record a step of a small training on real ranks.

    The figures: ``algorithm, ranks, micro_batches, stages``, ``bubble`` (measured share of idle
    time, mean over the ranks) and ``ideal_bubble`` (of equally long passes with ``gpipe`` or
    ``1f1b``).
    """
    ranks, schedule = options.ranks, options.algorithm
    micro_batches = 2 * ranks
    results: list[RankEvents] = run_on_ranks(_record_rank, ranks, schedule, micro_batches)
    events = [
        replace(event, messages=rank.sends.get((event.kind, event.stage, event.micro_batch), ()))
        for rank in results
        for event in rank.events
    ]
    spans, begin = on_step_clock(map(_span, events))
    events = [
        replace(event, start_s=event.start_s - begin, end_s=event.end_s - begin)
        for event in sorted(events, key=lambda event: event.end_s)
    ]
    stages = 1 + max(event.stage for event in events)
    frames = _frames(events, ranks, stages, micro_batches)
    end_s = max(span.end_s for span in spans)
    busy_s = sum(span.end_s - span.start_s for span in spans)
    bubble = max(0.0, 1 - busy_s / (ranks * end_s))
    ideal = (ranks - 1) / (micro_batches + ranks - 1)
    return Recording(
        topic="pipeline",
        title=(
            f"Pipeline ({schedule}): {counted(stages, 'stage')} on {counted(ranks, 'rank')},"
            f" {micro_batches} micro-batches"
        ),
        about=_ABOUT[schedule] + _COMMON,
        actors=tuple(f"rank {rank}" for rank in range(ranks)),
        frames=frames,
        checks=(
            check_traffic(frames, [rank.counted_bytes for rank in results]),
            Check.equal(
                "each micro-batch passes each stage once in each direction",
                2 * stages * micro_batches,
                len({(e.stage, e.micro_batch, e.kind) for e in events if "weight" not in e.kind}),
            ),
            Check.equal("no stage starts before its input is there", [], _too_early(events)),
            Check.equal(
                "gradients equal those of one process",
                [True] * ranks,
                [rank.is_correct for rank in results],
            ),
        ),
        facts=(
            ("Step", f"{1000 * end_s:.1f} ms"),
            ("Bubble, measured", f"{100 * bubble:.0f} %"),
            ("Bubble of equal passes with gpipe or 1f1b", f"{100 * ideal:.0f} %"),
            ("Sent by rank 0", human_bytes(results[0].counted_bytes)),
        ),
        spans=tuple(spans),
        figures={
            "algorithm": schedule,
            "ranks": ranks,
            "micro_batches": micro_batches,
            "stages": stages,
            "bubble": bubble,
            "ideal_bubble": ideal,
        },
    )


def _span(event: Event) -> Span:
    label = f"{event.kind[0].upper()}{event.micro_batch}"
    return Span(event.rank, f"stage {event.stage}", event.kind, label, event.start_s, event.end_s)


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


def _frames(events: list[Event], ranks: int, stages: int, micro_batches: int) -> tuple[Frame, ...]:
    done: dict[tuple[int, int], str] = {}
    frames = [
        Frame(
            "The step starts: all micro-batches wait at the first stage.",
            _rows(done, None, ranks, stages, micro_batches),
            time_s=0.0,
        )
    ]
    for event in events:
        place = (event.stage, event.micro_batch)
        done[place] = "✓" if event.kind != "forward" else "F"
        sent = tuple(
            DrawnMessage(event.rank, target, f"micro-batch {event.micro_batch}", size_bytes)
            for target, size_bytes in event.messages
        )
        text = f"Rank {event.rank}, stage {event.stage}: {event.kind} of micro-batch"
        frames.append(
            Frame(
                f"{text} {event.micro_batch} is done.",
                _rows(done, place, ranks, stages, micro_batches),
                messages=sent,
                time_s=event.end_s,
            )
        )
    return tuple(frames)


def _rows(
    done: dict[tuple[int, int], str],
    now: tuple[int, int] | None,
    ranks: int,
    stages: int,
    micro_batches: int,
) -> tuple[tuple[DrawnRow, ...], ...]:
    """Return the stages of each rank, with a cell for each micro-batch."""

    def cell(stage: int, number: int) -> Cell:
        state = done.get((stage, number), "")
        if (stage, number) == now:
            return Cell(f"{number} {state}", tone="new", fill=0.5 if state == "F" else 1.0)
        if state == "✓":
            return Cell(f"{number} {state}", tone="done")
        return Cell(f"{number} {state}".strip(), fill=0.5 if state else 0.0)

    return tuple(
        tuple(
            DrawnRow(
                f"stage {stage}", tuple(cell(stage, number) for number in range(micro_batches))
            )
            for stage in range(rank, stages, ranks)
        )
        for rank in range(ranks)
    )


def _record_rank(world: Communicator, schedule: str, micro_batches: int) -> RankEvents:

    from paceline.distributed.communicator import Communicator
    from paceline.explain import training
    from paceline.parallel.registry import layout
    from paceline.strategies.hybrid.strategy import HybridStrategy

    config = training.make_config("pipeline")
    config.parallel.pipeline_schedule = schedule  # type: ignore[assignment]
    axes = layout(config.parallel, world.size).axes
    meshed = Communicator(world.env, world.device, axes, world.group, world.ranks, world.waits)
    strategy = HybridStrategy(config, meshed)
    strategy.setup(training.make_model())
    strategy.setup_optimizer(training.build_adamw)
    batches = [training.make_batch(number) for number in range(micro_batches)]
    assert strategy.pipeline is not None

    def micro_step(number: int, module: torch.nn.Module) -> torch.Tensor:
        return training.loss_of(module, batches[number], micro_batches)

    events: list[Event] = []
    sends: dict[tuple[str, int, int], tuple[tuple[int, int], ...]] = {}
    is_correct = True
    for number in range(_WARM_UP_STEPS + 1):
        world.barrier()
        before = world.traffic.total
        strategy.forward_backward(micro_step, micro_batches)
        counted_bytes = world.traffic.total - before
        if number == 0:
            is_correct = _has_reference_gradients(strategy.trained, micro_batches)
            for stage in strategy.pipeline.stages:
                _watch(stage, world.rank, events, sends)
        elif number < _WARM_UP_STEPS:
            events.clear()
    world.barrier()
    return RankEvents(events, sends, counted_bytes, is_correct)


def _watch(
    stage: DynamicStage,
    rank: int,
    events: list[Event],
    sends: dict[tuple[str, int, int], tuple[tuple[int, int], ...]],
) -> None:
    """Record the passes through a stage, and the messages that it sends."""

    def timed(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(number: int, *args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            result = run(number, *args, **kwargs)
            end_s = time.perf_counter()
            events.append(Event(rank, stage.stage_index, number, kind, start_s, end_s))
            return result

        return call

    def watched(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(number: int) -> Any:
            operations = run(number)
            sends[kind, stage.stage_index, number] = tuple(
                (each.peer, each.tensor.nbytes) for each in operations
            )
            return operations

        return call

    for name, kind in _METHODS.items():
        setattr(stage, name, timed(kind, getattr(stage, name)))
    for name, kind in (("get_fwd_send_ops", "forward"), ("get_bwd_send_ops", "backward")):
        setattr(stage, name, watched(kind, getattr(stage, name)))


def _has_reference_gradients(trained: dict[str, torch.nn.Parameter], micro_batches: int) -> bool:
    """Return whether the gradients of this rank's stages equal the gradients of one process."""
    import torch

    from paceline.explain import training

    reference = training.make_model()
    for number in range(micro_batches):
        training.loss_of(reference, training.make_batch(number), micro_batches).backward()
    expected = dict(reference.named_parameters())
    return all(
        parameter.grad is not None
        and torch.allclose(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-7)  # type: ignore[arg-type]
        for name, parameter in trained.items()
    )

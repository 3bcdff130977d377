"""`paceline explain compression`: sparse gradients, and the residual in which the elements that
were not sent wait (error feedback)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.files import human_bytes
from paceline.core.formatting import counted
from paceline.distributed.call_log import CountedCall
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.explain.calls import collectives_of
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import (
    Cell,
    Check,
    DrawnRow,
    Frame,
    Recording,
    cells_of,
    check_traffic,
    number_text,
)
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.strategies.reducers.compression.reducer",)
_ELEMENTS = 8
_RATIO = 0.25
_STEPS = 4
_NAMES = {"topk": "top-k", "randomk": "random-k"}
_ABOUT = {
    "topk": (
        "Top-k: each rank sends only the elements with the largest magnitudes, with their places."
    ),
    "randomk": (
        "Random-k: each rank sends the same randomly drawn elements, so that no places are sent."
    ),
}
_FEEDBACK = (
    " The other elements are added to a residual, and compete again in the next step (error"
    " feedback; Stich et al., 2018): nothing is lost, it is only sent later."
)


@dataclass(frozen=True)
class StepValues:
    """The values of one rank in one step.

    Args:
        waiting: residual of earlier steps plus this step's gradient.
        sent: what was sent of it.
        residual: what is left of it.
        total: sum over the ranks of what was sent.
    """

    gradient: list[float]
    waiting: list[float]
    sent: list[float]
    residual: list[float]
    total: list[float]
    calls: list[CountedCall]


@dataclass(frozen=True)
class RankSteps:
    """The recording of one rank."""

    steps: list[StepValues]
    counted_bytes: int


def record(options: ExplainOptions) -> Recording:
    """Compress the gradients of some steps on real ranks.

    The figures: ``algorithm, ranks, elements, sent_elements`` (of each rank per step),
    ``steps: [[{gradient, waiting, sent, residual, total}]]`` (of each rank) and
    ``uncompressed_bytes`` (that an all-reduce would send).
    """
    results: list[RankSteps] = run_on_ranks(_record_rank, options.ranks, options.algorithm)
    frames = _frames(results)
    plain_bytes = _STEPS * all_reduce_bytes(4 * _ELEMENTS, options.ranks)
    sent_bytes = results[0].counted_bytes
    summed = _column_sums([step.gradient for rank in results for step in rank.steps])
    arrived = _column_sums(
        [step.total for step in results[0].steps] + [rank.steps[-1].residual for rank in results]
    )
    name = _NAMES[options.algorithm]
    return Recording(
        topic="compression",
        title=f"Gradient compression by {name} on {counted(options.ranks, 'rank')}",
        about=_ABOUT[options.algorithm] + _FEEDBACK,
        actors=tuple(f"rank {rank}" for rank in range(options.ranks)),
        frames=frames,
        checks=(
            check_traffic(frames, [rank.counted_bytes for rank in results]),
            Check(
                "what was sent and the residuals add up to all gradients",
                arrived,
                summed,
                all(abs(a - b) < 1e-4 for a, b in zip(arrived, summed, strict=True)),
            ),
            Check.equal(
                "all ranks have the same sums",
                [[step.total for step in rank.steps] for rank in results],
                [[step.total for step in results[0].steps]] * options.ranks,
            ),
        ),
        facts=(
            ("Sent per rank and step", f"{round(_RATIO * _ELEMENTS)} of {_ELEMENTS} elements"),
            ("Bytes of a rank", f"{human_bytes(sent_bytes)} in {_STEPS} steps"),
            ("All-reduce without compression", human_bytes(plain_bytes)),
        ),
        figures={
            "algorithm": options.algorithm,
            "ranks": options.ranks,
            "elements": _ELEMENTS,
            "sent_elements": round(_RATIO * _ELEMENTS),
            "steps": [
                [
                    {
                        name: getattr(step, name)
                        for name in ("gradient", "waiting", "sent", "residual", "total")
                    }
                    for step in rank.steps
                ]
                for rank in results
            ],
            "uncompressed_bytes": plain_bytes,
        },
    )


def _column_sums(rows: list[list[float]]) -> list[float]:
    return [sum(values) for values in zip(*rows, strict=True)]


def _frames(results: list[RankSteps]) -> tuple[Frame, ...]:
    frames = []
    for number in range(_STEPS):
        steps = [rank.steps[number] for rank in results]
        left = "; the residual is empty" if number == 0 else " and adds it to its residual"
        frames.append(
            Frame(
                f"Step {number + 1}: each rank computes a gradient{left}.",
                tuple(_rows(step, is_sent=False) for step in steps),
            )
        )
        frames.append(
            Frame(
                f"Step {number + 1}: the ranks send the chosen elements and sum them. The rest"
                " stays in the residual.",
                tuple(_rows(step, is_sent=True) for step in steps),
                collectives=collectives_of([step.calls for step in steps], "chosen elements"),
                is_key=True,
            )
        )
    return tuple(frames)


def _rows(step: StepValues, is_sent: bool) -> tuple[DrawnRow, ...]:
    empty = tuple(Cell("", tone="idle") for _ in step.gradient)
    waiting = tuple(
        Cell(number_text(value), tone="new" if is_sent and sent else "")
        for value, sent in zip(step.waiting, step.sent, strict=True)
    )
    return (
        DrawnRow("gradient", cells_of(step.gradient)),
        DrawnRow("with residual", waiting),
        DrawnRow("sum over ranks", cells_of(step.total, "done") if is_sent else empty),
        DrawnRow("new residual", cells_of(step.residual) if is_sent else empty),
    )


def _record_rank(world: Communicator, algorithm: str) -> RankSteps:
    import torch

    from paceline.config.schema.compression import Compression
    from paceline.distributed.traffic import log_calls
    from paceline.strategies.reducers.compression.reducer import make_compressor
    from paceline.strategies.reducers.compression.sizes import BucketShape, TensorSlot

    settings = Compression.model_validate({"method": algorithm, "ratio": _RATIO})
    compressor = make_compressor(settings, seed=0)
    bucket = BucketShape(0, _ELEMENTS, (TensorSlot("weight", 0, (_ELEMENTS,)),))
    state = compressor.initial_state(bucket, world.device)
    residual = state.flats["residual"]
    generator = torch.Generator().manual_seed(world.rank)
    steps = []
    before = world.traffic.total
    for number in range(_STEPS):
        gradient = torch.randn(_ELEMENTS, generator=generator).mul_(4).round_().div_(4)
        waiting, total = residual + gradient, gradient.clone()
        with log_calls() as calls:
            compressor.reduce(total, state, world, number)
        sent = waiting - residual
        steps.append(
            StepValues(
                gradient.tolist(),
                waiting.tolist(),
                sent.tolist(),
                residual.tolist(),
                total.tolist(),
                calls,
            )
        )
    return RankSteps(steps, world.traffic.total - before)

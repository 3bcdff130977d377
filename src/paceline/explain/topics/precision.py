"""`paceline explain precision`: rounding in bfloat16 and float16, loss scaling, and an overflow on
one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.formatting import counted
from paceline.distributed.call_log import CountedCall
from paceline.explain.calls import collectives_of
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import (
    Cell,
    Check,
    DrawnRow,
    Frame,
    Recording,
    Tone,
    cells_of,
    check_traffic,
    number_text,
)
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    import torch

    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.parallel.loss_scale",)
_NUMBERS = (1 / 3, 1.001, 70_000.0, 1e-5, 1e-8)
_SMALL_UPDATE = 1e-3
_SMALL_SLOPE = 1e-8  # below the smallest float16, 6e-8
_LARGE_SLOPE = 1.5  # overflows at the initial loss scale of 65,536
_WEIGHTS = 3
_ABOUT = (
    "bfloat16 has the range of float32 and 8 significant bits; float16 has 11 significant bits, but"
    " only values from 6e-8 to 65,504. So weights are stored in float32, and float16 needs loss"
    " scaling (Micikevicius et al., 2018): the loss is multiplied by a scale, so that small"
    " gradients do not become zero, and the gradients are divided by it. If a gradient overflows on"
    " any rank, the all-reduce carries it to all of them: every rank skips the update and halves"
    " the scale."
)


@dataclass(frozen=True)
class ScaledStep:
    """A step in float16 with loss scaling.

    Args:
        scale: loss scale of the step; ``new_scale``: the scale after it.
        local, summed: scaled gradient of this rank, and its sum over the ranks.
        weights: weights after the step.
        is_finite: whether the summed gradient is finite, so that the update is made.
    """

    scale: float
    local: list[float]
    summed: list[float]
    weights: list[float]
    new_scale: float
    is_finite: bool
    calls: list[CountedCall]


@dataclass(frozen=True)
class RankNumbers:
    """The recording of one rank.

    Args:
        rounded: the numbers in each dtype.
        updated: 1 after small updates, in each dtype.
        small_gradients: a small gradient in float16: without and with loss scaling, and unscaled.
    """

    rounded: dict[str, list[float]]
    updated: dict[str, float]
    small_gradients: dict[str, float]
    attempts: list[ScaledStep]
    counted_bytes: int


def record(options: ExplainOptions) -> Recording:
    """Round numbers, and train in float16 on real ranks with Paceline's loss scaler.

    The figures: ``ranks, rounded`` (dtype → numbers), ``updated`` (dtype → 1 after ten updates of
    0.001), ``small_gradients`` and ``attempts: [{scale, new_scale, is_finite, ranks: [{local,
    summed, weights}]}]``. Numbers that are not finite are text.
    """
    results: list[RankNumbers] = run_on_ranks(_record_rank, options.ranks)
    first = results[0]
    frames = _frames(results)
    gradients = first.small_gradients
    scales = [first.attempts[0].scale, *(attempt.new_scale for attempt in first.attempts)]
    skipped = [attempt for attempt in first.attempts if not attempt.is_finite]
    return Recording(
        topic="precision",
        title=f"Mixed precision and loss scaling on {counted(options.ranks, 'rank')}",
        about=_ABOUT,
        actors=tuple(f"rank {rank}" for rank in range(options.ranks)),
        frames=frames,
        checks=(
            check_traffic(frames, [rank.counted_bytes for rank in results]),
            Check.equal("without scaling, the small gradient is zero", 0.0, gradients["unscaled"]),
            Check(
                "with scaling, it is right",
                gradients["restored"],
                _SMALL_SLOPE,
                abs(gradients["restored"] - _SMALL_SLOPE) < 0.01 * _SMALL_SLOPE,
            ),
            Check.equal(
                "all ranks skip the same steps and have the same weights",
                [_decisions(first)] * options.ranks,
                [_decisions(rank) for rank in results],
            ),
        ),
        facts=(
            ("1 + 10 × 0.001 in bfloat16", number_text(first.updated["bfloat16"])),
            ("Loss scale", " → ".join(f"{scale:,.0f}" for scale in dict.fromkeys(scales))),
            ("Skipped steps", f"{len(skipped)} of {len(first.attempts)}"),
        ),
        figures={
            "ranks": options.ranks,
            "rounded": {name: _json(values) for name, values in first.rounded.items()},
            "updated": first.updated,
            "small_gradients": gradients,
            "attempts": [
                {
                    "scale": attempt.scale,
                    "new_scale": attempt.new_scale,
                    "is_finite": attempt.is_finite,
                    "ranks": [
                        {
                            "local": _json(rank.attempts[number].local),
                            "summed": _json(rank.attempts[number].summed),
                            "weights": rank.attempts[number].weights,
                        }
                        for rank in results
                    ],
                }
                for number, attempt in enumerate(first.attempts)
            ],
        },
    )


def _decisions(rank: RankNumbers) -> list[tuple[bool, float, list[float]]]:
    return [(each.is_finite, each.new_scale, each.weights) for each in rank.attempts]


def _json(values: list[float]) -> list[float | str]:
    """Return numbers as JSON has them: those that are not finite are text."""
    return [value if abs(value) < float("inf") else str(value) for value in values]


def _frames(results: list[RankNumbers]) -> tuple[Frame, ...]:
    def rows(name: str, cells: list[tuple[Cell, ...]]) -> tuple[tuple[DrawnRow, ...], ...]:
        return tuple((DrawnRow(name, each),) for each in cells)

    frames = []
    for name, note in (
        ("float32", "numbers in float32, of which 24 bits are significant"),
        ("bfloat16", "in bfloat16: the range of float32, but 1.001 becomes 1"),
        ("float16", "in float16: finer, but 70,000 overflows and 1e-8 becomes zero"),
    ):
        cells = [_number_cells(rank.rounded[name]) for rank in results]
        frames.append(
            Frame(f"{note[0].upper()}{note[1:]}.", rows(name, cells), is_key=name != "float32")
        )
    cells = [
        tuple(Cell(f"{name} {number:.4f}") for name, number in rank.updated.items())
        for rank in results
    ]
    text = "A weight of 1 after ten updates of 0.001: bfloat16 rounds each of them away."
    frames.append(Frame(text, rows("weight", cells)))
    cells = [
        tuple(
            Cell(f"{name} {number_text(value)}", tone="wrong" if value == 0 else "")
            for name, value in rank.small_gradients.items()
        )
        for rank in results
    ]
    slope = number_text(_SMALL_SLOPE)
    text = f"A gradient of {slope} in float16: zero, unless the loss is scaled by 65,536."
    frames.append(Frame(text, rows("gradient", cells), is_key=True))
    for number, attempt in enumerate(results[0].attempts):
        frames.append(_attempt_frame(results, number, attempt))
    return tuple(frames)


def _attempt_frame(results: list[RankNumbers], number: int, attempt: ScaledStep) -> Frame:
    if attempt.is_finite:
        text = "the sum is finite, so it is divided by the scale and the weights are updated."
    else:
        text = (
            "a gradient overflows on the last rank, and its sum on all of them: all skip the update"
            f" and halve the scale to {attempt.new_scale:,.0f}."
        )
    attempts = [rank.attempts[number] for rank in results]
    return Frame(
        f"Step {number + 1}, loss scale {attempt.scale:,.0f}: {text}",
        tuple(
            (
                DrawnRow("scaled gradient", _number_cells(each.local)),
                DrawnRow("sum over ranks", _number_cells(each.summed)),
                DrawnRow("weights", cells_of(each.weights, "done" if each.is_finite else "")),
            )
            for each in attempts
        ),
        collectives=collectives_of([each.calls for each in attempts], "gradient"),
        is_key=number < 2,
    )


def _number_cells(values: list[float]) -> tuple[Cell, ...]:
    cells = []
    for value in values:
        tone: Tone = "wrong" if value == 0 or not abs(value) < float("inf") else ""
        cells.append(Cell(f"{value:.7g}", tone=tone))
    return tuple(cells)


def _record_rank(world: Communicator) -> RankNumbers:
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    numbers = torch.tensor(_NUMBERS)
    rounded = {name: numbers.to(dtype).float().tolist() for name, dtype in dtypes.items()}
    updated = {}
    for name, dtype in dtypes.items():
        weight = torch.ones((), dtype=dtype)
        for _ in range(10):
            weight += _SMALL_UPDATE
        updated[name] = float(weight)
    before = world.traffic.total
    attempts = _train(world)
    return RankNumbers(rounded, updated, _small_gradients(), attempts, world.traffic.total - before)


def _small_gradients() -> dict[str, float]:
    """Return a small gradient that passes through float16, without and with loss scaling."""
    import torch

    from paceline.parallel.loss_scale import LossScaler

    def gradient(scale: torch.Tensor) -> torch.Tensor:
        weight = torch.ones((), requires_grad=True)
        (weight.half().float() * _SMALL_SLOPE * scale).backward()
        assert weight.grad is not None
        return weight.grad

    scaler = LossScaler(torch.device("cpu"))
    scaled = gradient(scaler.scale)
    restored = scaled.clone()
    scaler.unscale([restored])
    unscaled = gradient(torch.ones(()))
    return {
        "unscaled": float(unscaled),
        "scaled": float(scaled),
        "restored": float(restored),
    }


def _train(world: Communicator) -> list[ScaledStep]:
    """Make steps in float16. On the last rank, the gradient of the first one overflows."""
    import torch

    from paceline.distributed.traffic import log_calls
    from paceline.parallel.loss_scale import LossScaler

    scaler = LossScaler(world.device)
    weights = torch.ones(_WEIGHTS, requires_grad=True)
    slope = _LARGE_SLOPE if world.rank == world.size - 1 else 0.5
    slopes = torch.tensor([0.25, 1e-4, slope])
    attempts: list[ScaledStep] = []
    for _ in range(3):
        scale = float(scaler.scale)
        weights.grad = None
        (weights.half().float() * slopes * scaler.scale).sum().backward()
        assert weights.grad is not None
        local, gradient = weights.grad.tolist(), weights.grad.clone()
        with log_calls() as calls:
            world.wait(world.all_reduce(gradient))
        summed: list[float] = gradient.tolist()
        is_finite = gradient.sum().isfinite()
        if bool(is_finite):
            scaler.unscale([gradient])
            with torch.no_grad():
                weights -= 0.1 * gradient / world.size
        scaler.update(is_finite)
        attempts.append(
            ScaledStep(
                scale,
                local,
                summed,
                weights.tolist(),
                float(scaler.scale),
                bool(is_finite),
                calls,
            )
        )
    return attempts

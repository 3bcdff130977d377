"""`paceline explain precision`: rounding in bfloat16 and float16, loss scaling, and an overflow on
one rank."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.distributed.call_log import CountedCall
from paceline.distributed.traffic import log_calls
from paceline.explain.rank_topic import RankFrame, RankTopic, numbers_of
from paceline.explain.record import Cell, Check, DrawnRow, Tone, cells_of, number_text
from paceline.messages.pages import PageText
from paceline.parallel.loss_scale import LossScaler

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


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NOTES = {
    "float32": "Numbers in float32, of which 24 bits are significant.",
    "bfloat16": "In bfloat16: the range of float32, but 1.001 becomes 1.",
    "float16": "In float16: finer, but 70,000 overflows and 1e-8 becomes zero.",
}


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


class PrecisionTopic(RankTopic):
    """Round numbers, and train in float16 on real ranks with Paceline's loss scaler.

    The figures: ``ranks, rounded`` (dtype → numbers), ``updated`` (dtype → 1 after ten updates of
    0.001), ``small_gradients`` and ``attempts: [{scale, new_scale, is_finite, ranks: [{local,
    summed, weights}]}]``. Numbers that are not finite are text.
    """

    about = _ABOUT

    def run(self) -> None:
        numbers = torch.tensor(_NUMBERS)
        self.rounded = {
            name: numbers_of(numbers.to(dtype).float()) for name, dtype in _DTYPES.items()
        }
        self.updated = {name: _updated(dtype) for name, dtype in _DTYPES.items()}
        self.small_gradients = _small_gradients()
        with self.count_traffic():
            self.attempts = self._train()
        self.all_attempts = self.gather(self.attempts)
        self.title = PageText(
            "Mixed precision and loss scaling on {ranks:rank}", ranks=self.world.size
        )

    def _train(self) -> list[ScaledStep]:
        """Make steps in float16. On the last rank, the gradient of the first one overflows."""
        world, scaler = self.world, LossScaler(self.world.device)
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
            new_scale, updated = float(scaler.scale), numbers_of(weights)
            attempts.append(
                ScaledStep(scale, local, summed, updated, new_scale, bool(is_finite), calls)
            )
        return attempts

    def rank_frames(self) -> Iterator[RankFrame]:
        for name, note in _NOTES.items():
            row = DrawnRow(name, _number_cells(self.rounded[name]))
            yield RankFrame(note, (row,), is_key=name != "float32")
        weights = tuple(Cell(f"{name} {number:.4f}") for name, number in self.updated.items())
        yield RankFrame(
            "A weight of 1 after ten updates of 0.001: bfloat16 rounds each of them away.",
            (DrawnRow("weight", weights),),
        )
        gradients = tuple(
            Cell(
                PageText("{name} {value}", name=name, value=number_text(value)),
                tone="wrong" if value == 0 else "",
            )
            for name, value in self.small_gradients.items()
        )
        yield RankFrame(
            PageText(
                "A gradient of {slope} in float16: zero, unless the loss is scaled by 65,536.",
                slope=number_text(_SMALL_SLOPE),
            ),
            (DrawnRow("gradient", gradients),),
            is_key=True,
        )
        for number, attempt in enumerate(self.attempts):
            yield _attempt_frame(number, attempt)

    def checks(self) -> list[Check]:
        restored = self.small_gradients["restored"]
        return [
            Check.equal(
                "without scaling, the small gradient is zero",
                0.0,
                self.small_gradients["unscaled"],
            ),
            Check(
                "with scaling, it is right",
                restored,
                _SMALL_SLOPE,
                abs(restored - _SMALL_SLOPE) < 0.01 * _SMALL_SLOPE,
            ),
            Check.equal(
                "all ranks skip the same steps and have the same weights",
                [_decisions(self.attempts)] * self.world.size,
                [_decisions(attempts) for attempts in self.all_attempts],
            ),
        ]

    def facts(self) -> dict[str, str]:
        scales = [self.attempts[0].scale, *(attempt.new_scale for attempt in self.attempts)]
        num_skipped = sum(not attempt.is_finite for attempt in self.attempts)
        return {
            "1 + 10 × 0.001 in bfloat16": number_text(self.updated["bfloat16"]),
            "Loss scale": " → ".join(f"{scale:,.0f}" for scale in dict.fromkeys(scales)),
            "Skipped steps": PageText(
                "{count} of {total}", count=num_skipped, total=len(self.attempts)
            ),
        }

    def add_figures(self) -> None:
        self.figures.update(
            rounded={name: _json(values) for name, values in self.rounded.items()},
            updated=self.updated,
            small_gradients=self.small_gradients,
            attempts=[
                {
                    "scale": attempts[0].scale,
                    "new_scale": attempts[0].new_scale,
                    "is_finite": attempts[0].is_finite,
                    "ranks": [
                        {
                            "local": _json(attempt.local),
                            "summed": _json(attempt.summed),
                            "weights": attempt.weights,
                        }
                        for attempt in attempts
                    ],
                }
                for attempts in zip(*self.all_attempts, strict=True)
            ],
        )


def _decisions(attempts: list[ScaledStep]) -> list[tuple[bool, float, list[float]]]:
    return [(each.is_finite, each.new_scale, each.weights) for each in attempts]


def _json(values: list[float]) -> list[float | str]:
    """Return numbers as JSON has them: those that are not finite are text."""
    return [value if abs(value) < float("inf") else str(value) for value in values]


def _attempt_frame(number: int, attempt: ScaledStep) -> RankFrame:
    if attempt.is_finite:
        text = "the sum is finite, so it is divided by the scale and the weights are updated."
    else:
        text = PageText(
            "a gradient overflows on the last rank, and its sum on all of them: all skip the"
            " update and halve the scale to {scale}.",
            scale=f"{attempt.new_scale:,.0f}",
        )
    return RankFrame(
        PageText(
            "Step {number}, loss scale {scale}: {text}",
            number=number + 1,
            scale=f"{attempt.scale:,.0f}",
            text=text,
        ),
        (
            DrawnRow("scaled gradient", _number_cells(attempt.local)),
            DrawnRow("sum over ranks", _number_cells(attempt.summed)),
            DrawnRow("weights", cells_of(attempt.weights, "done" if attempt.is_finite else "")),
        ),
        attempt.calls,
        "gradient",
        is_key=number < 2,
    )


def _number_cells(values: list[float]) -> tuple[Cell, ...]:
    cells = []
    for value in values:
        tone: Tone = "wrong" if value == 0 or not abs(value) < float("inf") else ""
        cells.append(Cell(f"{value:.7g}", tone=tone))
    return tuple(cells)


def _updated(dtype: torch.dtype) -> float:
    """Return a weight of 1 after ten small updates."""
    weight = torch.ones((), dtype=dtype)
    for _ in range(10):
        weight += _SMALL_UPDATE
    return float(weight)


def _small_gradients() -> dict[str, float]:
    """Return a small gradient that passes through float16, without and with loss scaling."""

    def gradient(scale: torch.Tensor) -> torch.Tensor:
        weight = torch.ones((), requires_grad=True)
        (weight.half().float() * _SMALL_SLOPE * scale).backward()
        assert weight.grad is not None
        return weight.grad

    scaler = LossScaler(torch.device("cpu"))
    scaled = gradient(scaler.scale)
    restored = scaled.clone()
    scaler.unscale([restored])
    return {
        "unscaled": float(gradient(torch.ones(()))),
        "scaled": float(scaled),
        "restored": float(restored),
    }

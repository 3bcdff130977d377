"""`paceline explain compression`: sparse gradients, and the residual in which the elements that
were not sent wait (error feedback)."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from paceline.config.schema.compression import Compression
from paceline.core.files import human_bytes
from paceline.distributed.call_log import CountedCall
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.traffic import log_calls
from paceline.explain.rank_topic import RankFrame, RankTopic
from paceline.explain.record import (
    Cell,
    Check,
    DrawnRow,
    cells_of,
    idle_cells,
    number_text,
)
from paceline.messages.pages import PageText
from paceline.strategies.reducers.compression.reducer import make_compressor
from paceline.strategies.reducers.compression.sizes import BucketShape, TensorSlot

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


class CompressionTopic(RankTopic):
    """Compress the gradients of some steps on real ranks.

    The figures: ``algorithm, ranks, elements, sent_elements`` (of each rank per step),
    ``steps: [[{gradient, waiting, sent, residual, total}]]`` (of each rank) and
    ``uncompressed_bytes`` (that an all-reduce would send).
    """

    def run(self) -> None:
        settings = Compression.model_validate({"method": self.options.algorithm, "ratio": _RATIO})
        compressor = make_compressor(settings, seed=0)
        bucket = BucketShape(0, _ELEMENTS, (TensorSlot("weight", 0, (_ELEMENTS,)),))
        state = compressor.initial_state(bucket, self.world.device)
        residual = state.flats["residual"]
        generator = torch.Generator().manual_seed(self.world.rank)
        self.steps: list[StepValues] = []
        self.calls: list[list[CountedCall]] = []
        for number in range(_STEPS):
            gradient = torch.randn(_ELEMENTS, generator=generator).mul_(4).round_().div_(4)
            waiting, total = residual + gradient, gradient.clone()
            with self.count_traffic(), log_calls() as calls:
                compressor.reduce(total, state, self.world, number)
            values = (gradient, waiting, waiting - residual, residual, total)
            self.steps.append(StepValues(*(tensor.tolist() for tensor in values)))
            self.calls.append(calls)
        self.steps_by_rank = self.gather(self.steps)
        self.title = PageText(
            "Gradient compression by {method} on {ranks:rank}",
            method=_NAMES[self.options.algorithm],
            ranks=self.world.size,
        )
        about = _ABOUT[self.options.algorithm]
        self.about = PageText("{about}{more}", about=about, more=_FEEDBACK)

    def rank_frames(self) -> Iterator[RankFrame]:
        for number, (step, calls) in enumerate(zip(self.steps, self.calls, strict=True), 1):
            left = "; the residual is empty" if number == 1 else " and adds it to its residual"
            yield RankFrame(
                PageText(
                    "Step {number}: each rank computes a gradient{left}.", number=number, left=left
                ),
                _rows(step, is_sent=False),
            )
            yield RankFrame(
                PageText(
                    "Step {number}: the ranks send the chosen elements and sum them. The rest"
                    " stays in the residual.",
                    number=number,
                ),
                _rows(step, is_sent=True),
                calls,
                "chosen elements",
                is_key=True,
            )

    def checks(self) -> list[Check]:
        ranks = self.steps_by_rank
        summed = _column_sums([step.gradient for steps in ranks for step in steps])
        arrived = _column_sums(
            [step.total for step in self.steps] + [steps[-1].residual for steps in ranks]
        )
        return [
            Check(
                "what was sent and the residuals add up to all gradients",
                arrived,
                summed,
                all(abs(a - b) < 1e-4 for a, b in zip(arrived, summed, strict=True)),
            ),
            Check.equal(
                "all ranks have the same sums",
                [[step.total for step in steps] for steps in ranks],
                [[step.total for step in self.steps]] * self.world.size,
            ),
        ]

    def facts(self) -> dict[str, str]:
        return {
            "Sent per rank and step": PageText(
                "{sent} of {total} elements", sent=round(_RATIO * _ELEMENTS), total=_ELEMENTS
            ),
            "Bytes of a rank": PageText(
                "{size} in {steps} steps", size=human_bytes(self.counted_bytes), steps=_STEPS
            ),
            "All-reduce without compression": human_bytes(self._plain_bytes()),
        }

    def add_figures(self) -> None:
        self.figures.update(
            elements=_ELEMENTS,
            sent_elements=round(_RATIO * _ELEMENTS),
            steps=[[asdict(step) for step in steps] for steps in self.steps_by_rank],
            uncompressed_bytes=self._plain_bytes(),
        )

    def _plain_bytes(self) -> int:
        return _STEPS * all_reduce_bytes(4 * _ELEMENTS, self.world.size)


def _column_sums(rows: list[list[float]]) -> list[float]:
    return [sum(values) for values in zip(*rows, strict=True)]


def _rows(step: StepValues, is_sent: bool) -> tuple[DrawnRow, ...]:
    empty = idle_cells(_ELEMENTS)
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

"""`paceline explain accumulation`: why the loss is divided by the global number of tokens, with
gradients of micro-batches of unequal size."""

from collections.abc import Iterator

import torch
from torch import nn

from paceline.distributed.traffic import log_calls
from paceline.explain import training
from paceline.explain.rank_topic import RankFrame, RankTopic, numbers_of
from paceline.explain.record import (
    Cell,
    Check,
    DrawnRow,
    Tone,
    cells_of,
    idle_cells,
    number_text,
)
from paceline.messages.pages import PageText
from paceline.strategies.ddp.strategy import DDPStrategy

_MICRO_BATCHES = 2
_FEATURES = 4
_TOLERANCE = 1e-5
_ABOUT = (
    "A step consists of several micro-batches on several ranks, and their numbers of tokens differ."
    " The gradient of the whole batch is the sum over all tokens divided by the number of all"
    " tokens. If each micro-batch computes its own mean and the means are averaged, tokens of short"
    " micro-batches count more, and the result depends on the number of ranks and micro-batches."
    " Paceline's tasks return sums, and the trainer divides by the global count."
)


class AccumulationTopic(RankTopic):
    """Compute the gradient of a linear model on real ranks in both ways.

    The figures: ``ranks, tokens`` (of each micro-batch of each rank), ``total_tokens, gradients:
    {reference, right, wrong}`` and ``wrong_error`` (relative to the reference).
    """

    about = _ABOUT

    def run(self) -> None:
        world, batches = self.world, _make_batches(self.world.rank)
        self.tokens = tokens = [len(inputs) for inputs, _ in batches]
        self.num_means = _MICRO_BATCHES * world.size
        model = _make_linear()
        strategy = DDPStrategy(training.make_config("ddp"), world)
        strategy.setup(model)
        strategy.setup_optimizer(training.build_adamw)

        def mean_of_means(number: int, module: nn.Module) -> torch.Tensor:
            return _loss_sum(module, batches[number]) / tokens[number] / self.num_means

        def share_of_sum(number: int, module: nn.Module) -> torch.Tensor:
            return _loss_sum(module, batches[number]) / self.total

        strategy.forward_backward(mean_of_means, _MICRO_BATCHES)
        self.wrong = numbers_of(model.weight.grad)
        with self.count_traffic():
            with log_calls() as self.count_calls:
                self.total = int(world.sum(float(sum(tokens)))[0])
            with log_calls() as self.calls:
                strategy.forward_backward(share_of_sum, _MICRO_BATCHES)
        self.right = numbers_of(model.weight.grad)
        alone = _make_linear()
        shares = [share_of_sum(number, alone) for number in range(_MICRO_BATCHES)]
        self.losses = [float(each.detach()) * self.total for each in shares]
        (local,) = torch.autograd.grad(sum(shares, torch.zeros(())), list(alone.parameters()))
        self.local = numbers_of(local)
        for rank in range(world.size):
            for batch in _make_batches(rank):
                (_loss_sum(alone, batch) / self.total).backward()
        self.reference = numbers_of(alone.weight.grad)
        self.title = PageText(
            "Gradient accumulation: {count} micro-batches on each of {ranks:rank}",
            count=_MICRO_BATCHES,
            ranks=world.size,
        )

    def rank_frames(self) -> Iterator[RankFrame]:
        counts: list[str] = [PageText("{tokens} tokens", tokens=tokens) for tokens in self.tokens]
        sums: list[str] = [
            PageText("Σ loss {loss}", loss=number_text(loss)) for loss in self.losses
        ]
        means: list[str] = [
            PageText("mean {mean} / {count}", mean=number_text(loss / tokens), count=self.num_means)
            for loss, tokens in zip(self.losses, self.tokens, strict=True)
        ]
        shares = [f"{number_text(loss)} / {self.total}" for loss in self.losses]
        yield RankFrame(
            "Each rank has two micro-batches. A cell is as wide as its number of tokens.",
            self._rows(counts),
        )
        yield RankFrame("Forward: each micro-batch sums the loss of its tokens.", self._rows(sums))
        yield RankFrame(
            PageText(
                "Wrong: each micro-batch uses its own mean, and the {count} means are averaged."
                " The gradient is off by {percent} %.",
                count=self.num_means,
                percent=f"{100 * self._error(self.wrong):.0f}",
            ),
            self._rows(means, self.wrong, "wrong"),
            is_key=True,
        )
        yield RankFrame(
            PageText(
                "Right: the ranks sum their numbers of tokens: {total} in total.", total=self.total
            ),
            self._rows(counts),
            self.count_calls,
            "tokens",
            is_key=True,
        )
        yield RankFrame(
            "Each loss sum is divided by the global number; backward adds up the gradients of the"
            " rank's micro-batches.",
            self._rows(shares, self.local, "new"),
            is_key=True,
        )
        yield RankFrame(
            "The all-reduce adds up the ranks' gradients: every token counts the same. The bucket"
            " is padded, so it is larger than the gradient.",
            self._rows(shares, self.right, "done"),
            self.calls,
            "gradient",
            is_key=True,
        )
        yield RankFrame(
            "For comparison: the gradient of all tokens in one process.",
            self._rows(counts, self.reference),
        )

    def _rows(
        self, texts: list[str], gradient: list[float] | None = None, tone: Tone = ""
    ) -> tuple[DrawnRow, ...]:
        micro_batches = tuple(
            Cell(text, weight=float(tokens))
            for text, tokens in zip(texts, self.tokens, strict=True)
        )
        cells = idle_cells(_FEATURES) if gradient is None else cells_of(gradient, tone)
        return DrawnRow("micro-batches", micro_batches), DrawnRow("gradient", cells)

    def checks(self) -> list[Check]:
        are_right = self.gather(self._error(self.right) < _TOLERANCE)
        are_wrong = self.gather(self._error(self.wrong) > 0.01)
        return [
            Check(
                "sums divided by the global count equal the gradient of one process",
                self.right,
                self.reference,
                all(are_right),
            ),
            Check(
                "the mean of means differs from the gradient of one process",
                self.wrong,
                self.reference,
                all(are_wrong),
            ),
        ]

    def facts(self) -> dict[str, str]:
        error = PageText(
            "{percent} % of the gradient", percent=f"{100 * self._error(self.wrong):.0f}"
        )
        return {"Tokens": str(self.total), "Error of the mean of means": error}

    def add_figures(self) -> None:
        self.figures.update(
            tokens=self.gather(self.tokens),
            total_tokens=self.total,
            gradients={
                "reference": self.reference,
                "right": self.right,
                "wrong": self.wrong,
            },
            wrong_error=self._error(self.wrong),
        )

    def _error(self, values: list[float]) -> float:
        """Return the norm of the difference from the reference, relative to its norm."""
        pairs = zip(values, self.reference, strict=True)
        difference = sum((value - expected) ** 2 for value, expected in pairs)
        return float((difference / sum(each * each for each in self.reference)) ** 0.5)


def _make_batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    # Short micro-batches have larger targets, so that their weight matters.
    return [
        (
            torch.randn(tokens, _FEATURES, generator=generator),
            torch.full((tokens, 1), 4.0 / tokens),
        )
        for tokens in (8 - rank % 3, 3 + rank % 2)
    ]


def _loss_sum(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor = (module(batch[0]) - batch[1]).square().sum()
    return total


def _make_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(_FEATURES, 1, bias=False)

"""`paceline explain accumulation`: why the loss is divided by the global number of tokens, with
gradients of micro-batches of unequal size."""

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

PRELOAD = ("paceline.explain.training", "paceline.strategies.ddp.strategy")
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


@dataclass(frozen=True)
class RankGradients:
    """The recording of one rank.

    Args:
        tokens: number of tokens of each micro-batch.
        loss_sums: sum of the loss of each micro-batch.
        total: number of tokens of all ranks.
        count_calls, calls: collectives that summed the count and the gradient.
        local: this rank's contribution to the gradient, before it is summed.
        right, wrong: gradient if the loss is divided by the global count, and the mean of means.
        reference: gradient of all tokens in one process.
        counted_bytes: bytes sent for the count and the right gradient, by the traffic counter.
    """

    tokens: list[int]
    loss_sums: list[float]
    total: int
    count_calls: list[CountedCall]
    calls: list[CountedCall]
    local: list[float]
    right: list[float]
    wrong: list[float]
    reference: list[float]
    counted_bytes: int


def record(options: ExplainOptions) -> Recording:
    """Compute the gradient of a linear model on real ranks in both ways.

    The figures: ``ranks, tokens`` (of each micro-batch of each rank), ``total_tokens, gradients:
    {reference, right, wrong}`` and ``wrong_error`` (relative to the reference).
    """
    results: list[RankGradients] = run_on_ranks(_record_rank, options.ranks)
    first = results[0]
    frames = _frames(results)
    error = _error(first.wrong, first.reference)
    return Recording(
        topic="accumulation",
        title=(
            f"Gradient accumulation: {_MICRO_BATCHES} micro-batches on each of"
            f" {counted(options.ranks, 'rank')}"
        ),
        about=_ABOUT,
        actors=tuple(f"rank {rank}" for rank in range(options.ranks)),
        frames=frames,
        checks=(
            check_traffic(frames, [rank.counted_bytes for rank in results]),
            Check(
                "sums divided by the global count equal the gradient of one process",
                first.right,
                first.reference,
                all(_error(rank.right, rank.reference) < _TOLERANCE for rank in results),
            ),
            Check(
                "the mean of means differs from the gradient of one process",
                first.wrong,
                first.reference,
                all(_error(rank.wrong, rank.reference) > 0.01 for rank in results),
            ),
        ),
        facts=(
            ("Tokens", str(first.total)),
            ("Error of the mean of means", f"{100 * error:.0f} % of the gradient"),
        ),
        figures={
            "ranks": options.ranks,
            "tokens": [rank.tokens for rank in results],
            "total_tokens": first.total,
            "gradients": {
                "reference": first.reference,
                "right": first.right,
                "wrong": first.wrong,
            },
            "wrong_error": error,
        },
    )


def _error(values: list[float], reference: list[float]) -> float:
    """Return the norm of the difference, relative to the norm of the reference."""
    difference = sum((a - b) ** 2 for a, b in zip(values, reference, strict=True))
    return float((difference / sum(b * b for b in reference)) ** 0.5)


def _frames(results: list[RankGradients]) -> tuple[Frame, ...]:
    first = results[0]
    counts = [[f"{tokens} tokens" for tokens in rank.tokens] for rank in results]
    sums = [[f"Σ loss {number_text(loss)}" for loss in rank.loss_sums] for rank in results]
    means = [
        [
            f"mean {number_text(loss / tokens)}"
            for loss, tokens in zip(rank.loss_sums, rank.tokens, strict=True)
        ]
        for rank in results
    ]
    shares = [
        [f"{number_text(loss)} / {first.total}" for loss in rank.loss_sums] for rank in results
    ]
    naive = _MICRO_BATCHES * len(results)
    wrong_shares = [[f"{text} / {naive}" for text in texts] for texts in means]
    local = [rank.local for rank in results]
    every = len(results)
    return (
        Frame(
            "Each rank has two micro-batches. A cell is as wide as its number of tokens.",
            _rows(results, counts, None),
        ),
        Frame("Forward: each micro-batch sums the loss of its tokens.", _rows(results, sums, None)),
        Frame(
            f"Wrong: each micro-batch uses its own mean, and the {naive} means are averaged. The"
            f" gradient is off by {100 * _error(first.wrong, first.reference):.0f} %.",
            _rows(results, wrong_shares, [first.wrong] * every, "wrong"),
            is_key=True,
        ),
        Frame(
            f"Right: the ranks sum their numbers of tokens: {first.total} in total.",
            _rows(results, counts, None),
            collectives=collectives_of([rank.count_calls for rank in results], "tokens"),
            is_key=True,
        ),
        Frame(
            "Each loss sum is divided by the global number; backward adds up the gradients of the"
            " rank's micro-batches.",
            _rows(results, shares, local, "new"),
            is_key=True,
        ),
        Frame(
            "The all-reduce adds up the ranks' gradients: every token counts the same. The bucket"
            " is padded, so it is larger than the gradient.",
            _rows(results, shares, [first.right] * every, "done"),
            collectives=collectives_of([rank.calls for rank in results], "gradient"),
            is_key=True,
        ),
        Frame(
            "For comparison: the gradient of all tokens in one process.",
            _rows(results, counts, [first.reference] * every),
        ),
    )


def _rows(
    results: list[RankGradients],
    texts: list[list[str]],
    gradients: list[list[float]] | None,
    tone: Tone = "",
) -> tuple[tuple[DrawnRow, ...], ...]:
    empty = tuple(Cell("", tone="idle") for _ in range(_FEATURES))
    return tuple(
        (
            DrawnRow(
                "micro-batches",
                tuple(
                    Cell(text, weight=float(tokens))
                    for text, tokens in zip(texts[rank], result.tokens, strict=True)
                ),
            ),
            DrawnRow("gradient", empty if gradients is None else cells_of(gradients[rank], tone)),
        )
        for rank, result in enumerate(results)
    )


def _record_rank(world: Communicator) -> RankGradients:
    import torch
    from torch import nn

    from paceline.distributed.traffic import log_calls
    from paceline.explain import training
    from paceline.strategies.ddp.strategy import DDPStrategy

    def batches_of(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(rank)
        # Short micro-batches have larger targets, so that their weight matters.
        return [
            (
                torch.randn(tokens, _FEATURES, generator=generator),
                torch.full((tokens, 1), 4.0 / tokens),
            )
            for tokens in (8 - rank % 3, 3 + rank % 2)
        ]

    def loss_sum(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor = (module(batch[0]) - batch[1]).square().sum()
        return total

    def make_linear() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(_FEATURES, 1, bias=False)

    model = make_linear()
    (weight,) = model.parameters()
    strategy = DDPStrategy(training.make_config("ddp"), world)
    strategy.setup(model)
    strategy.setup_optimizer(training.build_adamw)
    batches = batches_of(world.rank)
    tokens = [len(inputs) for inputs, _ in batches]

    def gradient() -> list[float]:
        assert weight.grad is not None
        values: list[float] = weight.grad.reshape(-1).tolist()
        return values

    def mean_of_means(number: int, module: nn.Module) -> torch.Tensor:
        return loss_sum(module, batches[number]) / tokens[number] / (_MICRO_BATCHES * world.size)

    strategy.forward_backward(mean_of_means, _MICRO_BATCHES)
    wrong = gradient()
    before = world.traffic.total
    with log_calls() as count_calls:
        total = world.sum(float(sum(tokens)))[0]
    with log_calls() as calls:
        strategy.forward_backward(
            lambda number, module: loss_sum(module, batches[number]) / total, _MICRO_BATCHES
        )
    counted_bytes = world.traffic.total - before
    right = gradient()
    alone = make_linear()
    sums = [loss_sum(alone, batch) / total for batch in batches]
    (local,) = torch.autograd.grad(sum(sums, torch.zeros(())), list(alone.parameters()))
    alone = make_linear()
    for rank in range(world.size):
        for batch in batches_of(rank):
            (loss_sum(alone, batch) / total).backward()
    (reference,) = [each.grad for each in alone.parameters() if each.grad is not None]
    return RankGradients(
        tokens,
        [float(each.detach()) * total for each in sums],
        int(total),
        count_calls,
        calls,
        local.reshape(-1).tolist(),
        right,
        wrong,
        reference.reshape(-1).tolist(),
        counted_bytes,
    )

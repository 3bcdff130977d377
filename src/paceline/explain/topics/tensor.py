"""`paceline explain tensor`: a column-parallel and a row-parallel layer, with the all-reduces of
forward and backward."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.config.schema.parallel import Parallel
from paceline.distributed.traffic import log_calls
from paceline.explain.rank_topic import RankFrame, RankTopic, numbers_of
from paceline.explain.record import Cell, Check, DrawnRow, Tone, cells_of, idle_cells
from paceline.messages.pages import PageText
from paceline.strategies.tensor.shard import TensorParallelizer

_FEATURES = 3
_UNITS = 2  # hidden units per rank
_TOLERANCE = 1e-5
_ABOUT = (
    "Tensor parallelism after Megatron-LM (Shoeybi et al., 2019): the first layer is split by"
    " columns, so each rank computes its own hidden units from the full input, without"
    " communication. The second layer is split by rows: each rank has a partial sum of every"
    " output, and one all-reduce adds them up. In backward, one all-reduce adds up the gradients of"
    " the input. So two layers need two all-reduces of activations, in each micro-batch."
)


class TensorTopic(RankTopic):
    """Run forward and backward of two layers on real ranks.

    The figures: ``ranks``, ``values`` (of each rank: inputs, hidden, partial, output, partial_grad,
    input_grad) and ``weights_bytes`` (of a rank, and of the full layers).

    Attributes:
        values: ``hidden``: this rank's hidden units; ``partial``, ``output``: this rank's sum of
            the output, and the sum over the ranks; ``partial_grad``, ``input_grad``: this rank's
            gradient of the input, and the sum over the ranks.
        references: output and input gradient of the full model on one rank.
    """

    about = _ABOUT

    def run(self) -> None:
        full, full_input = _make_layers(self.world.size), _make_input()
        full_output = full(full_input)
        full_output.square().sum().backward()
        model = _make_layers(self.world.size)
        TensorParallelizer(model, self.world, Parallel(mode="tensor"))
        # The same layers without collectives give this rank's parts.
        up, down = (nn.Linear(1, 1, bias=False) for _ in range(2))
        up.weight, down.weight = (
            nn.Parameter(each.detach().clone()) for each in model.parameters()
        )
        inputs, local_input = _make_input(), _make_input()
        with self.count_traffic():
            with log_calls() as self.forward_calls:
                output = model(inputs)
            with log_calls() as self.backward_calls:
                output.square().sum().backward()
        hidden = up(local_input).tanh()
        partial = down(hidden)
        partial.backward(2 * output.detach())
        self.weights_bytes = [
            sum(each.nbytes for each in layers.parameters()) for layers in (model, full)
        ]
        self.values = {
            "inputs": numbers_of(inputs),
            "hidden": numbers_of(hidden),
            "partial": numbers_of(partial),
            "output": numbers_of(output),
            "partial_grad": numbers_of(local_input.grad),
            "input_grad": numbers_of(inputs.grad),
        }
        self.references = {
            "output": numbers_of(full_output),
            "input_grad": numbers_of(full_input.grad),
        }
        self.all_values = self.gather(self.values)
        self.title = PageText(
            "Tensor parallelism: two layers on {ranks:rank}", ranks=self.world.size
        )

    def rank_frames(self) -> Iterator[RankFrame]:
        values, rank, others = self.values, self.world.rank, self.world.size - 1
        hidden = (idle_cells(_UNITS * rank), idle_cells(_UNITS * (others - rank)))

        def draw_hidden(tone: Tone) -> tuple[Cell, ...]:
            return hidden[0] + cells_of(values["hidden"], tone) + hidden[1]

        rows = {
            "input": cells_of(values["inputs"]),
            "hidden units": idle_cells(_UNITS * self.world.size),
            "output": idle_cells(_FEATURES),
            "input gradient": idle_cells(_FEATURES),
        }

        def frame(caption: str, changes: dict[str, tuple[Cell, ...]], **settings: Any) -> RankFrame:
            rows.update(changes)
            drawn = tuple(DrawnRow(name, cells) for name, cells in rows.items())
            return RankFrame(caption, drawn, **settings)

        yield frame(
            "Every rank has the full input, and its part of the weights: some columns of the first"
            " layer's matrix, and the same rows of the second's.",
            {},
        )
        yield frame(
            "Column-parallel layer: each rank computes its hidden units, without communication.",
            {"hidden units": draw_hidden("new")},
            phase="forward",
        )
        yield frame(
            "Row-parallel layer: each rank has a partial sum of every output.",
            {"hidden units": draw_hidden(""), "output": cells_of(values["partial"], "new")},
            phase="forward",
            is_key=True,
        )
        yield frame(
            "One all-reduce adds up the partial sums: every rank has the output of the full model.",
            {"output": cells_of(values["output"], "done")},
            calls=self.forward_calls,
            label="output",
            phase="forward",
            is_key=True,
        )
        yield frame(
            "Backward: the gradients of the weights stay on their rank. The gradient of the input"
            " is partial, because each rank has only its hidden units.",
            {
                "output": cells_of(values["output"]),
                "input gradient": cells_of(values["partial_grad"], "new"),
            },
            phase="backward",
            is_key=True,
        )
        yield frame(
            "One all-reduce adds up the gradients of the input, for the layers before.",
            {"input gradient": cells_of(values["input_grad"], "done")},
            calls=self.backward_calls,
            label="gradient",
            phase="backward",
            is_key=True,
        )

    def checks(self) -> list[Check]:
        return [
            self._check_reference("output equals that of one rank", "output"),
            self._check_reference("input gradient equals that of one rank", "input_grad"),
            self._check_sum("partial outputs add up to the output", "partial", "output"),
            self._check_sum(
                "partial gradients add up to the gradient", "partial_grad", "input_grad"
            ),
        ]

    def _check_reference(self, name: str, key: str) -> Check:
        values = [each[key] for each in self.all_values]
        expected = self.gather(self.references[key])
        return Check(name, values, expected, all(map(_are_close, values, expected)))

    def _check_sum(self, name: str, part: str, total: str) -> Check:
        parts = zip(*(each[part] for each in self.all_values), strict=True)
        sums, expected = [sum(values) for values in parts], self.values[total]
        return Check(name, sums, expected, _are_close(sums, expected))

    def facts(self) -> dict[str, str]:
        local_bytes, full_bytes = self.weights_bytes
        return {
            "Hidden units per rank": PageText(
                "{count} of {total}", count=_UNITS, total=_UNITS * self.world.size
            ),
            "Weights per rank": PageText(
                "{count} of {total} B", count=local_bytes, total=full_bytes
            ),
            "All-reduces": "1 in forward, 1 in backward",
        }

    def add_figures(self) -> None:
        self.figures.update(values=self.all_values, weights_bytes=self.weights_bytes)


def _are_close(values: list[float], expected: list[float]) -> bool:
    return all(
        abs(value - other) <= _TOLERANCE * (1 + abs(other))
        for value, other in zip(values, expected, strict=True)
    )


def _make_layers(ranks: int) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(_FEATURES, _UNITS * ranks, bias=False)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(first.out_features, _FEATURES, bias=False))


def _make_input() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, _FEATURES, generator=generator).requires_grad_()

"""`paceline explain tensor`: a column-parallel and a row-parallel layer, with the all-reduces of
forward and backward."""

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
)
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from paceline.distributed.communicator import Communicator

PRELOAD = ("paceline.explain.training", "paceline.strategies.tensor.shard")
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


@dataclass(frozen=True)
class RankLayers:
    """The values of one rank.

    Args:
        hidden: values of this rank's hidden units.
        partial, output: this rank's sum of the output, and the sum over the ranks.
        partial_grad, input_grad: this rank's gradient of the input, and the sum over the ranks.
        weight_grads: gradients of this rank's parts of both weights, of its first hidden unit.
        reference_output, reference_grad: values of the full model on one rank.
        weights_bytes: bytes of this rank's parts of the weights, and of the full weights.
        forward_calls, backward_calls: collectives.
        counted_bytes: bytes sent, by the traffic counter.
    """

    inputs: list[float]
    hidden: list[float]
    partial: list[float]
    output: list[float]
    partial_grad: list[float]
    input_grad: list[float]
    weight_grads: list[float]
    reference_output: list[float]
    reference_grad: list[float]
    weights_bytes: tuple[int, int]
    forward_calls: list[CountedCall]
    backward_calls: list[CountedCall]
    counted_bytes: int


def record(options: ExplainOptions) -> Recording:
    """Run forward and backward of two layers on real ranks.

    The figures: ``ranks``, ``values`` (of each rank: inputs, hidden, partial, output, partial_grad,
    input_grad) and ``weights_bytes`` (of a rank, and of the full layers).
    """
    results: list[RankLayers] = run_on_ranks(_record_rank, options.ranks)
    first, ranks = results[0], options.ranks
    frames = _frames(results)
    return Recording(
        topic="tensor",
        title=f"Tensor parallelism: two layers on {counted(ranks, 'rank')}",
        about=_ABOUT,
        actors=tuple(f"rank {rank}" for rank in range(ranks)),
        frames=frames,
        checks=(
            check_traffic(frames, [rank.counted_bytes for rank in results]),
            _close("output equals that of one rank", results, "output", "reference_output"),
            _close(
                "input gradient equals that of one rank", results, "input_grad", "reference_grad"
            ),
            _sum_check("partial outputs add up to the output", results, "partial", "output"),
            _sum_check(
                "partial gradients add up to the gradient", results, "partial_grad", "input_grad"
            ),
        ),
        facts=(
            ("Hidden units per rank", f"{_UNITS} of {_UNITS * ranks}"),
            ("Weights per rank", f"{first.weights_bytes[0]} of {first.weights_bytes[1]} B"),
            ("All-reduces", "1 in forward, 1 in backward"),
        ),
        figures={
            "ranks": ranks,
            "values": [{name: getattr(rank, name) for name in _VALUES} for rank in results],
            "weights_bytes": first.weights_bytes,
        },
    )


_VALUES = ("inputs", "hidden", "partial", "output", "partial_grad", "input_grad")


def _are_close(values: list[float], expected: list[float]) -> bool:
    return all(
        abs(value - other) <= _TOLERANCE * (1 + abs(other))
        for value, other in zip(values, expected, strict=True)
    )


def _close(name: str, results: list[RankLayers], shown: str, reference: str) -> Check:
    values = [getattr(rank, shown) for rank in results]
    expected = [getattr(rank, reference) for rank in results]
    return Check(name, values, expected, all(map(_are_close, values, expected)))


def _sum_check(name: str, results: list[RankLayers], part: str, total: str) -> Check:
    sums = [sum(values) for values in zip(*(getattr(rank, part) for rank in results), strict=True)]
    expected: list[float] = getattr(results[0], total)
    return Check(name, sums, expected, _are_close(sums, expected))


def _frames(results: list[RankLayers]) -> tuple[Frame, ...]:
    shown: dict[str, Tone] = {"input": ""}
    frames = [
        Frame(
            "Every rank has the full input, and its part of the weights: some columns of the first"
            " layer's matrix, and the same rows of the second's.",
            _rows(results, shown),
        )
    ]
    shown["hidden"] = "new"
    text = "Column-parallel layer: each rank computes its hidden units, without communication."
    frames.append(Frame(text, _rows(results, shown), phase="forward"))
    shown |= {"hidden": "", "output": "new"}
    text = "Row-parallel layer: each rank has a partial sum of every output."
    frames.append(Frame(text, _rows(results, shown), phase="forward", is_key=True))
    shown["output"] = "done"
    frames.append(
        Frame(
            "One all-reduce adds up the partial sums: every rank has the output of the full model.",
            _rows(results, shown, is_summed=True),
            phase="forward",
            collectives=collectives_of([rank.forward_calls for rank in results], "output"),
            is_key=True,
        )
    )
    shown |= {"output": "", "input gradient": "new"}
    frames.append(
        Frame(
            "Backward: the gradients of the weights stay on their rank. The gradient of the input"
            " is partial, because each rank has only its hidden units.",
            _rows(results, shown, is_summed=True),
            phase="backward",
            is_key=True,
        )
    )
    shown["input gradient"] = "done"
    frames.append(
        Frame(
            "One all-reduce adds up the gradients of the input, for the layers before.",
            _rows(results, shown, is_summed=True, has_gradient=True),
            phase="backward",
            collectives=collectives_of([rank.backward_calls for rank in results], "gradient"),
            is_key=True,
        )
    )
    return tuple(frames)


def _rows(
    results: list[RankLayers],
    shown: dict[str, Tone],
    is_summed: bool = False,
    has_gradient: bool = False,
) -> tuple[tuple[DrawnRow, ...], ...]:
    units = _UNITS * len(results)
    rows = []
    for rank, result in enumerate(results):
        hidden = [Cell("", tone="idle") for _ in range(units)]
        if "hidden" in shown:
            local = cells_of(result.hidden, shown["hidden"])
            hidden[_UNITS * rank : _UNITS * (rank + 1)] = local
        values = {
            "input": result.inputs,
            "output": result.output if is_summed else result.partial,
            "input gradient": result.input_grad if has_gradient else result.partial_grad,
        }
        empty = tuple(Cell("", tone="idle") for _ in range(_FEATURES))
        cells = {
            name: cells_of(numbers, shown[name]) if name in shown else empty
            for name, numbers in values.items()
        }
        rows.append(
            (
                DrawnRow("input", cells["input"]),
                DrawnRow("hidden units", tuple(hidden)),
                DrawnRow("output", cells["output"]),
                DrawnRow("input gradient", cells["input gradient"]),
            )
        )
    return tuple(rows)


def _record_rank(world: Communicator) -> RankLayers:
    import torch
    from torch import nn

    from paceline.distributed.traffic import log_calls
    from paceline.explain import training
    from paceline.strategies.tensor.shard import TensorParallelizer

    def make_layers() -> nn.Sequential:
        torch.manual_seed(0)
        first = nn.Linear(_FEATURES, _UNITS * world.size, bias=False)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(first.out_features, _FEATURES, bias=False))

    def values(tensor: torch.Tensor | None) -> list[float]:
        assert tensor is not None
        numbers: list[float] = tensor.detach().reshape(-1).tolist()
        return numbers

    def make_input() -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(1, _FEATURES, generator=generator).requires_grad_()

    full, full_input = make_layers(), make_input()
    full_output = full(full_input)
    full_output.square().sum().backward()
    model = make_layers()
    TensorParallelizer(model, world, training.make_config("tensor").parallel)
    # The same layers without collectives give this rank's parts.
    up, down = (nn.Linear(1, 1, bias=False) for _ in range(2))
    up.weight, down.weight = (nn.Parameter(each.detach().clone()) for each in model.parameters())
    inputs, local_input = make_input(), make_input()
    before = world.traffic.total
    with log_calls() as forward_calls:
        output = model(inputs)
    with log_calls() as backward_calls:
        output.square().sum().backward()
    counted_bytes = world.traffic.total - before
    hidden = up(local_input).tanh()
    partial = down(hidden)
    partial.backward(2 * output.detach())
    sizes = [sum(each.nbytes for each in layers.parameters()) for layers in (model, full)]
    return RankLayers(
        values(inputs),
        values(hidden),
        values(partial),
        values(output),
        values(local_input.grad),
        values(inputs.grad),
        values(up.weight.grad)[:_FEATURES],
        values(full_output),
        values(full_input.grad),
        (sizes[0], sizes[1]),
        forward_calls,
        backward_calls,
        counted_bytes,
    )

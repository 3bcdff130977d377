"""Divide the experts of a model among the ranks of a group, on plain tensors in place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.models.blocks import base_model, wrap_forward
from paceline.models.experts.layers import ExpertLayer, find_expert_layers, has_expert_plan
from paceline.models.tensor_plan.style import RowRange
from paceline.models.weights.load import final_dtype
from paceline.strategies.expert.exchange import ExchangedRows, compute_divided_experts
from paceline.strategies.tensor.shard import TensorSlice


class ExpertParallelizer:
    """Divides the experts of ``model`` among the ranks of ``group``: each gets consecutive experts
    of each layer, with the rows and columns of their adapters.

    The parameters stay plain tensors, so the code that shards or reduces them afterwards is
    independent of expert parallelism.

    Args:
        model: the full model, with the same values on every rank; on the CPU or the rank's device.
        group: the ranks that divide the experts.
        copies: the ranks that hold the same experts.

    Raises:
        ConfigError: as :func:`check_experts`.

    Attributes:
        modules: the modules whose parameters are divided, one per layer.
        cuts: name of each divided parameter → this rank's part.
        rows: what this rank has exchanged.
    """

    def __init__(self, model: nn.Module, group: Communicator, copies: Communicator) -> None:
        self.group, self.copies = group, copies
        self.modules: list[nn.Module] = []
        self.rows = ExchangedRows()
        slices: dict[int, TensorSlice] = {}
        for layer in check_experts(model, group.size):
            outer = base_model(model).get_submodule(layer.name)
            self.modules.append(outer)
            for module in _wrapped(outer):
                self._divide(module, layer.num_experts, slices)
            forward = partial(self._compute, layer.num_experts // group.size)
            wrap_forward(layer.module, forward)
        self.cuts = {
            name: slices[id(parameter)]
            for name, parameter in model.named_parameters()
            if id(parameter) in slices
        }

    def _divide(self, module: Any, num_experts: int, slices: dict[int, TensorSlice]) -> None:
        """Divide the parameters of the experts, or of an adapter around them."""
        num_local = num_experts // self.group.size
        first = num_local * self.group.rank
        module.num_experts = num_local
        for key, parameter in list(module.named_parameters(recurse=False)):
            self._cut(module, key, 0, (RowRange(first, num_local),), slices, parameter)
        for down in getattr(module, "lora_A", {}).values():
            rank = down.weight.shape[0] // num_experts
            rows = (RowRange(first * rank, num_local * rank),)
            self._cut(down, "weight", 0, rows, slices, down.weight)
        for up in getattr(module, "lora_B", {}).values():
            # The columns of an expert are apart from each other: [rank, experts].
            rank = up.weight.shape[1] // num_experts
            columns = tuple(RowRange(each * num_experts + first, num_local) for each in range(rank))
            self._cut(up, "weight", 1, columns, slices, up.weight)

    def _cut(
        self,
        module: nn.Module,
        key: str,
        dim: int,
        ranges: tuple[RowRange, ...],
        slices: dict[int, TensorSlice],
        full: nn.Parameter,
    ) -> None:
        parts = [full.detach().narrow(dim, rows.start, rows.length) for rows in ranges]
        # torch.cat copies, also a single part
        values = torch.cat(parts, dim).to(final_dtype(full))
        parameter = nn.Parameter(values, requires_grad=full.requires_grad)
        slices[id(parameter)] = TensorSlice(dim, ranges, tuple(full.shape))
        setattr(module, key, parameter)

    def _compute(
        self, num_local: int, inner: Any, hidden: torch.Tensor, *args: Any, **inputs: Any
    ) -> torch.Tensor:
        indices, weights = (*args, *inputs.values())
        return compute_divided_experts(
            inner, self.group, num_local, self.rows, hidden, indices, weights
        )


def _wrapped(outer: nn.Module) -> Iterator[nn.Module]:
    """Return the adapters around a module, and the module."""
    module: nn.Module | None = outer
    while module is not None:
        yield module
        module = getattr(module, "base_layer", None)


def check_experts(model: nn.Module, num_ranks: int) -> list[ExpertLayer]:
    """Return the layers of experts of a model that ranks can divide.

    Raises:
        ConfigError: the model has no experts, its experts do not get tokens by their numbers, or
            the number of ranks does not divide the number of experts.
    """
    base: Any = base_model(model)
    kind, layers = type(base).__name__, find_expert_layers(model)
    if not layers:
        raise ConfigError(
            "`parallel.expert: {num_ranks}` is not supported with {kind}: Paceline finds no experts"
            " in it",
            code="expert-without-experts",
            allowed="mixtures of experts such as Mixtral, Qwen3-MoE, gpt-oss and DeepSeek-V3",
            fix="leave `parallel.expert` out",
            num_ranks=num_ranks,
            kind=kind,
        )
    if not has_expert_plan(model):
        import transformers

        raise ConfigError(
            "`parallel.expert: {num_ranks}` is not supported with {kind}: transformers {version}"
            " has no plan that divides its experts",
            code="expert-without-plan",
            allowed="models with a `base_model_ep_plan` in transformers 5.23 or newer, such as"
            " Mixtral, Qwen3-MoE, gpt-oss and DeepSeek-V3",
            fix="leave `parallel.expert` out, or set `parallel.mode: zero3`",
            num_ranks=num_ranks,
            kind=kind,
            version=transformers.__version__,
        )
    for layer in layers:
        if layer.num_experts % num_ranks:
            divisors = [
                str(each)
                for each in range(1, layer.num_experts + 1)
                if layer.num_experts % each == 0
            ]
            raise ConfigError(
                "`parallel.expert: {num_ranks}` does not divide the {num_experts} experts of"
                " `{layer}`",
                code="expert-does-not-divide-experts",
                allowed="divisors of {num_experts}: {divisors}",
                fix="set `parallel.expert` to one of them",
                num_ranks=num_ranks,
                num_experts=layer.num_experts,
                layer=layer.name,
                divisors=", ".join(divisors),
            )
    return layers

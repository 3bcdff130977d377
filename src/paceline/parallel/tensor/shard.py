"""Tensor parallelism on plain tensors: each linear layer of the plan is cut in place, with the
collectives around its forward.

After Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (2019), section 3. The parameters stay ordinary ones, so whatever shards or reduces
them afterwards needs to know nothing of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.models.blocks import base_model, wrap_forward
from paceline.models.tensor_plan.families import family_plan
from paceline.models.tensor_plan.plan import check_sizes, find_tensor_plan, refuse_sizes
from paceline.models.tensor_plan.style import (
    COLUMN,
    COLUMN_GATHERED,
    EXPERTS,
    LATENT,
    MULTI_QUERY_COLUMN,
    ROW,
    ROW_SPLIT,
    SUMMED,
    Range,
    cut_axis,
    kind_of,
    needed_divisor,
    parse_style,
    ranges,
)
from paceline.parallel.tensor.heads import divide_heads
from paceline.parallel.tensor.ops import (
    gather_features,
    low_precision,
    scatter_tokens,
    split_features,
    sum_gradient,
    sum_parts,
)
from paceline.parallel.tensor.sequence import SequenceParallelizer

#: nn.MultiheadAttention uses the weights of this one without calling it.
_NEVER_CUT = nn.modules.linear.NonDynamicallyQuantizableLinear


@dataclass(frozen=True)
class TensorSlice:
    """Where this rank's part of a parameter lies: its ``ranges`` of dimension ``dim`` of the whole,
    of ``shape``, one after another."""

    dim: int
    ranges: tuple[Range, ...]
    shape: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.ranges[0].start

    def pieces(self, begin: int, length: int) -> list[tuple[int, int, Range]]:
        """(first, length, range) of each piece of the rows [begin, begin + length) of this rank's
        part that lies in one range; ``first`` counts from ``begin``. The range is that of the
        piece, in the whole."""
        result, local = [], 0
        for piece in self.ranges:
            first, last = max(begin, local), min(begin + length, local + piece.length)
            if first < last:
                result.append(
                    (
                        first - begin,
                        last - first,
                        replace(piece, start=piece.start + first - local, length=last - first),
                    )
                )
            local += piece.length
        return result


class TensorParallelizer:
    """Cuts the layers of ``model`` that the plan names into parts, one for each rank of ``group``,
    in place.

    Args:
        model: whole, of the same values on every rank of the group; on the CPU or the rank's
            device.
        group: the ranks along the axis "tensor".
        settings: ``tensor_plan``, ``sequence_parallel``.
        plan: module → style, where it is known already (a stage of a pipeline has no plan of its
            own).

    What is not cut is held by every rank of the group, and its gradient comes out the same on each,
    except for :attr:`partial`.

    Raises:
        ConfigError: no plan, or sizes that do not divide; says which would fit.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Communicator,
        settings: Parallel,
        plan: Mapping[str, str] | None = None,
    ) -> None:
        self.group = group
        self.notices: list[tuple[str, str]] = []
        result = dict(plan) if plan is not None else find_tensor_plan(model, settings.tensor_plan)
        modules = dict(model.named_modules())
        # Of layers that belong to other stages of a pipeline the weights are gone.
        self.plan = {name: style for name, style in result.items() if _is_here(name, modules)}
        self._sequence = settings.sequence_parallel
        self._shared = _SharedInput(group)
        self._where: dict[int, TensorSlice] = {}
        self._tied = _tied_parameters(model)
        check_plan_sizes(model, self.plan, group.size)
        keeps_numbers = bool(settings.tensor_plan) or bool(family_plan(_config(model)))
        divide_heads(self.plan, modules, group, keeps_numbers)
        self._say_dropout(modules)
        # Before anything is cut: it looks at what stands where.
        tokens = SequenceParallelizer(model, group, self.plan) if self._sequence else None
        for name, style in self.plan.items():
            if name in modules:
                self._cut_module(name, modules[name], style)
            else:
                owner, _, leaf = name.rpartition(".")
                self._cut_parameter(owner, modules[owner], leaf, style)
        self.cuts = {
            name: self._where[id(parameter)]
            for name, parameter in model.named_parameters()
            if id(parameter) in self._where
        }
        summed = [
            parameter
            for name, style in self.plan.items()
            if kind_of(style) == SUMMED
            for parameter in modules[name].parameters()
        ]
        inside = tokens.partial(set(self._where), self._row_biases(modules)) if tokens else []
        #: Trained parameters that are held whole, of whose gradient each rank has a part: to be
        #: summed over the group.
        self.partial = [
            parameter
            for parameter in {id(tensor): tensor for tensor in [*summed, *inside]}.values()
            if parameter.requires_grad
        ]

    # -- cutting
    def _cut_module(self, name: str, module: Any, style: str) -> None:
        kind = kind_of(style)
        if kind == SUMMED:
            return
        if kind == EXPERTS:
            wrap_forward(module, self._experts)
            return
        if kind == LATENT:
            wrap_forward(module, partial(self._latent, parse_style(style).number))
            return
        linear, adapters = _unwrap(name, module)
        if kind in (COLUMN, COLUMN_GATHERED):
            self._cut_column(name, linear, style, shared=True)
            for _, up in adapters:
                self._cut_column(f"{name}.lora_B", up, style.partition("/")[0], shared=False)
        else:
            self._cut_row(name, linear, style)
            for down, _ in adapters:
                self._cut_row(f"{name}.lora_A", down, style.partition("/")[0])
            if kind != ROW_SPLIT:
                self._cut_dropout(module)

    def _cut_column(self, name: str, linear: Any, style: str, shared: bool) -> None:
        self._cut_parameter(name, linear, "weight", style)
        if linear.bias is not None:
            self._cut_parameter(name, linear, "bias", style)
        _set_features(linear, style)
        wrap_forward(linear, partial(self._column, kind_of(style) == COLUMN_GATHERED, shared))

    def _cut_row(self, name: str, linear: Any, style: str) -> None:
        self._cut_parameter(name, linear, "weight", style)
        _set_features(linear, style)
        wrap_forward(linear, partial(self._row, linear, kind_of(style) == ROW_SPLIT))

    def _cut_parameter(self, name: str, module: nn.Module, key: str, style: str) -> None:
        whole = getattr(module, key)
        if id(whole) in self._tied:
            raise ConfigError(
                f"`parallel.tensor`: `{name}.{key}` is used under several names and cannot be cut: "
                + ", ".join(self._tied[id(whole)]),
                fix=(
                    "leave this module out of `parallel.tensor_plan`: it then stays whole on each"
                    " rank"
                ),
            )
        dim = cut_axis(style, whole.dim())
        assert dim is not None
        held = ranges(style, whole.shape[dim], self.group.size, self.group.rank)
        values = torch.cat(
            [whole.detach().narrow(dim, piece.start, piece.length) for piece in held], dim
        )
        mine = nn.Parameter(
            values.clone() if len(held) == 1 else values, requires_grad=whole.requires_grad
        )
        self._where[id(mine)] = TensorSlice(dim, held, tuple(whole.shape))
        setattr(module, key, mine)

    def _cut_dropout(self, module: nn.Module) -> None:
        """LoRA's dropout before a row layer sees a part of the features: it draws the whole mask
        and takes its part, so that the mask is the one that a single rank would draw."""
        for key, layer in getattr(module, "lora_dropout", nn.ModuleDict()).items():
            if isinstance(layer, nn.Dropout) and layer.p > 0:
                module.lora_dropout[key] = ShardedDropout(layer.p, self.group)  # type: ignore[index, operator, assignment]

    # -- forward
    def _column(
        self, gathered: bool, shared: bool, inner: Any, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        # else the layers' parent has gathered the tokens
        if not self._sequence and torch.is_grad_enabled():
            x = self._shared.entered(x) if shared else sum_gradient(low_precision(x), self.group)
        result = inner(x, *args, **kwargs)
        return gather_features(result, self.group) if gathered else result

    def _experts(
        self,
        inner: Any,
        x: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        self._shared.forget()
        if torch.is_grad_enabled():
            x, top_k_weights = (
                sum_gradient(low_precision(x), self.group),
                sum_gradient(top_k_weights, self.group),
            )
        return sum_parts(inner(x, top_k_index, top_k_weights, *args, **kwargs), self.group)

    def _latent(
        self, features: int, inner: Any, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """What passes a column layer later has its gradient summed there; the last features are
        summed here."""
        result = inner(x, *args, **kwargs)
        if not torch.is_grad_enabled():
            return result  # type: ignore[no-any-return]
        first, last = result.split([result.shape[-1] - features, features], dim=-1)
        return torch.cat([first, sum_gradient(last.contiguous(), self.group)], dim=-1)

    def _row(
        self, linear: nn.Linear, split: bool, inner: Any, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._shared.forget()
        if split:
            x = split_features(x, self.group)
        add_up = scatter_tokens if self._sequence else sum_parts
        result = add_up(inner(x, *args, **kwargs), self.group)
        if linear.bias is not None:
            # Each rank has added the bias. Taking the surplus off without gradient leaves the bias
            # its whole gradient, once.
            result = result - (self.group.size - 1) * linear.bias.detach().to(result.dtype)
        return result

    # -- checks
    def _say_dropout(self, modules: Mapping[str, nn.Module]) -> None:
        for parent in {name.rpartition(".")[0] for name in self.plan if name.rpartition(".")[0]}:
            rate = getattr(modules[parent], "attention_dropout", 0.0)
            layers = [
                module.p
                for name, module in modules[parent].named_modules()
                if isinstance(module, nn.Dropout) and "lora_" not in name
            ]
            if any(
                isinstance(probability, float) and probability > 0
                for probability in (rate, *layers)
            ):
                self.notices.append(
                    (
                        "warning",
                        (
                            f"tensor: {parent} has dropout. Each rank draws the masks of its own"
                            " part of the layer, so the loss is not that of one rank to the last"
                            " digits"
                        ),
                    )
                )
                return

    def _row_biases(self, modules: Mapping[str, nn.Module]) -> set[int]:
        rows = [
            _unwrap(name, modules[name])[0]
            for name, style in self.plan.items()
            if kind_of(style) in (ROW, ROW_SPLIT) and name in modules
        ]
        return {id(layer.bias) for layer in rows if layer.bias is not None}

    # -- after backward
    def sum_over_copies(self, gradients: list[tuple[torch.Tensor, int]]) -> None:
        """Sum each gradient, in place, over the ranks that hold the same weights: all of the group,
        or neighbors, so many as the number beside it says. One all-reduce, in which each group of
        neighbors has a place of its own."""
        if not gradients:
            return
        pieces = []
        for gradient, copies in gradients:
            shape = (self.group.size // copies, gradient.numel())
            places = gradient.new_zeros(shape, dtype=torch.float32)
            places[self.group.rank // copies] = gradient.reshape(-1)
            pieces.append(places.view(-1))
        flat = torch.cat(pieces)
        self.group.wait(self.group.all_reduce(flat))
        sums = flat.split([len(piece) for piece in pieces])
        for (gradient, copies), total in zip(gradients, sums, strict=True):
            places = total.view(self.group.size // copies, -1)
            gradient.copy_(places[self.group.rank // copies].view(gradient.shape))


def check_plan_sizes(model: nn.Module, plan: Mapping[str, str], size: int) -> None:
    """Raise ConfigError where the layers of the plan, or the heads that the model's config tells
    of, do not divide."""
    config = _config(model)
    if hasattr(config, "to_dict"):
        check_sizes(config.to_dict(), size)
    modules = dict(model.named_modules())
    sizes: dict[str, int] = {}
    for name, style in plan.items():
        kind = kind_of(style)
        if kind not in (COLUMN, COLUMN_GATHERED, ROW, ROW_SPLIT) or not _is_here(name, modules):
            continue
        weight: Any = (
            _unwrap(name, modules[name])[0].weight if name in modules else _parameter(name, modules)
        )
        dim = cut_axis(style, weight.dim())
        assert dim is not None
        what = "rows" if kind in (COLUMN, COLUMN_GATHERED) else "columns"
        if parse_style(style).name == MULTI_QUERY_COLUMN:
            what = "query heads"
        sizes[f"{what} of {name}"] = needed_divisor(style, weight.shape[dim])
    wrong = {name: number for name, number in sizes.items() if number % size}
    if wrong:
        first = next(iter(wrong))
        # of several layers with one size the last
        distinct = {
            number: name for name, number in sizes.items() if number not in (wrong[first], 0)
        }
        others = {name: number for number, name in distinct.items()}
        refuse_sizes({first: wrong[first], **others}, size)


def _config(model: Any) -> Any:
    return getattr(base_model(model), "config", None)


def _is_here(name: str, modules: Mapping[str, nn.Module]) -> bool:
    if name in modules:
        return any(True for _ in modules[name].parameters())
    return _parameter(name, modules) is not None


def _parameter(name: str, modules: Mapping[str, nn.Module]) -> Any:
    owner, _, leaf = name.rpartition(".")
    return dict(modules[owner].named_parameters(recurse=False, remove_duplicate=False)).get(leaf)


def _set_features(linear: Any, style: str) -> None:
    """The sizes that a layer keeps beside its weight."""
    outputs, inputs = linear.weight.shape
    if parse_style(style).transposed:
        linear.nx, linear.nf = outputs, inputs
    else:
        linear.out_features, linear.in_features = outputs, inputs


class _SharedInput:
    """Column layers that are given the same tensor (query, key, value; gate, up) share one sum of
    its gradient."""

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._given: torch.Tensor | None = None
        self._found: torch.Tensor | None = None
        self._version = -1

    def entered(self, x: torch.Tensor) -> torch.Tensor:
        if (
            x is not self._given
            or torch_compat.tensor_version(x) != self._version
            or self._found is None
        ):
            self._given, self._version = x, torch_compat.tensor_version(x)
            self._found = sum_gradient(low_precision(x), self.group)
        return self._found

    def forget(self) -> None:
        """Keep no tensor alive longer than the layers that share it."""
        self._given = self._found = None
        self._version = -1


class ShardedDropout(nn.Module):
    """Dropout of this rank's part of the features, with the mask of the whole."""

    def __init__(self, p: float, group: Communicator) -> None:
        super().__init__()
        self.p = p
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        whole = functional.dropout(
            x.new_ones((*x.shape[:-1], x.shape[-1] * self.group.size)), self.p
        )
        return x * whole.chunk(self.group.size, -1)[self.group.rank]


def _tied_parameters(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: result for key, result in names.items() if len(result) > 1}


def _unwrap(name: str, module: nn.Module) -> tuple[nn.Linear, list[tuple[nn.Linear, nn.Linear]]]:
    """The linear layer of a module of the plan and its LoRA pairs (A, B).

    Raises:
        ConfigError: it is no linear layer, or its adapter is of a kind that cannot be cut.
    """
    linear: Any = getattr(module, "base_layer", module)
    adapters = list(_adapters(name, module)) if linear is not module else []
    is_linear = isinstance(linear, nn.Linear) or type(linear).__name__ == "Conv1D"
    if not is_linear or not linear.weight.is_floating_point() or isinstance(module, _NEVER_CUT):
        raise ConfigError(
            f"`parallel.tensor`: `{name}` is a {type(linear).__name__}, and only torch's Linear"
            " layers and transformers' Conv1D are cut",
            fix=(
                "leave it out of `parallel.tensor_plan` and of `lora.modules_to_save`, or set"
                " `parallel.mode: zero3`"
            ),
        )
    return linear, adapters


def _adapters(name: str, module: Any) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    for key in getattr(module, "lora_A", {}):
        down, up = module.lora_A[key], module.lora_B[key]
        if (
            getattr(module, "lora_variant", {}).get(key) is not None
            or up.bias is not None
            or not isinstance(down, nn.Linear)
        ):
            raise ConfigError(
                f"`parallel.tensor`: the adapter of `{name}` is not plain LoRA, or has a bias, and"
                " cannot be cut",
                fix="train it with `parallel.mode: zero3`, or with a plain adapter",
            )
        yield down, up

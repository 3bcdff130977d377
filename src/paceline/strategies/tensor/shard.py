"""Tensor parallelism on plain tensors: each linear layer of the plan is split in place, with
collectives around its forward.

After Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (2019), section 3. The parameters stay plain tensors, so the code that shards or
reduces them afterwards is independent of tensor parallelism.
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
from paceline.core.texts import UserText
from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.models.blocks import base_model, wrap_forward
from paceline.models.tensor_plan.families import family_plan
from paceline.models.tensor_plan.plan import check_divisible, check_sizes, find_tensor_plan
from paceline.models.tensor_plan.sequence import splits_tokens
from paceline.models.tensor_plan.style import (
    COLUMN,
    COLUMN_GATHERED,
    EMBEDDING,
    EXPERTS,
    LATENT,
    MULTI_QUERY_COLUMN,
    ROW,
    ROW_SPLIT,
    SUMMED,
    VOCABULARY,
    RowRange,
    cut_axis,
    kind_of,
    needed_divisor,
    parse_style,
    ranges,
    uses_sequence_parallel,
)
from paceline.models.weights.load import final_dtype
from paceline.strategies.tensor.heads import divide_heads
from paceline.strategies.tensor.ops import (
    gather_features,
    low_precision,
    scatter_tokens,
    split_features,
    sum_gradient,
    sum_parts,
)
from paceline.strategies.tensor.sequence import SequenceParallelizer
from paceline.strategies.tensor.vocabulary import split_embedding, split_head

_SEQUENCE_PARALLEL = UserText(
    "tensor: activations between the split layers are divided along the tokens"
    " (`parallel.sequence_parallel: auto`)",
    code="sequence-parallel-on",
)
#: nn.MultiheadAttention uses the weights of this layer without calling it.
_NEVER_SPLIT = nn.modules.linear.NonDynamicallyQuantizableLinear


@dataclass(frozen=True)
class TensorSlice:
    """This rank's part of a parameter: the concatenated ``ranges`` along dimension ``dim`` of the
    full parameter, whose shape is ``shape``."""

    dim: int
    ranges: tuple[RowRange, ...]
    shape: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.ranges[0].start

    def pieces(self, begin: int, length: int) -> list[tuple[int, int, RowRange]]:
        """Split the rows [begin, begin + length) of this rank's part by range.

        Returns:
            (first, length, range) of each piece: ``first`` counts from ``begin``, and the range is
            the rows of the piece in the full parameter.
        """
        pieces, local = [], 0
        for rows in self.ranges:
            first, beyond = max(begin, local), min(begin + length, local + rows.length)
            if first < beyond:
                count = beyond - first
                piece = replace(rows, start=rows.start + first - local, length=count)
                pieces.append((first - begin, count, piece))
            local += rows.length
        return pieces


class TensorParallelizer:
    """Splits the layers of ``model`` that the plan names into parts, one per rank of ``group``, in
    place.

    Every rank of the group holds the other parameters, and their gradients are the same on each,
    except for :attr:`partial`.

    Args:
        model: the full model, with the same values on every rank of the group; on the CPU or the
            rank's device.
        group: communicator along the axis "tensor".
        settings: parallel settings; only ``tensor_plan`` and ``sequence_parallel`` are used.
        plan: style of each module, if already known. It cannot be derived from a pipeline stage.

    Raises:
        ConfigError: if there is no plan, or if the layers cannot be divided evenly by the number of
            ranks. The message lists sizes that fit.
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
        if plan is None:
            plan = find_tensor_plan(model, settings.tensor_plan)
        modules = dict(model.named_modules())
        # The weights of other pipeline stages have been freed.
        self.plan = {name: style for name, style in plan.items() if _has_weights(name, modules)}
        self._sequence = uses_sequence_parallel(
            settings.sequence_parallel,
            group.size,
            group.axes.pipeline,
            splits_tokens(model, self.plan),
        )
        if self._sequence and settings.sequence_parallel == "auto":
            self.notices.append(("info", _SEQUENCE_PARALLEL))
        self._shared = _SharedInput(group)
        self._slices: dict[int, TensorSlice] = {}
        self._parts: dict[int, nn.Parameter] = {}  # by the id of the full parameter
        self._tied = _tied_parameters(model)
        check_plan_sizes(model, self.plan, group.size)
        keeps_numbers = bool(settings.tensor_plan) or bool(family_plan(_config(model)))
        divide_heads(self.plan, modules, group, keeps_numbers)
        in_blocks = {name: style for name, style in self.plan.items() if style not in VOCABULARY}
        self._add_dropout_notice(modules, in_blocks)
        # Checks the structure of the model, so it comes before the layers are split.
        tokens = SequenceParallelizer(model, group, in_blocks) if self._sequence else None
        for name, style in self.plan.items():
            if name in modules:
                self._split_module(name, modules[name], style)
            else:
                owner, _, leaf = name.rpartition(".")
                self._split_parameter(owner, modules[owner], leaf, style)
        self.cuts = {
            name: self._slices[id(parameter)]
            for name, parameter in model.named_parameters()
            if id(parameter) in self._slices
        }
        partial = [
            parameter
            for name, style in self.plan.items()
            if kind_of(style) == SUMMED
            for parameter in modules[name].parameters()
        ]
        if tokens is not None:
            row_layers = [
                _unwrap(name, modules[name])[0]
                for name, style in self.plan.items()
                if kind_of(style) in (ROW, ROW_SPLIT) and name in modules
            ]
            row_biases = {id(layer.bias) for layer in row_layers}
            partial += tokens.partial(row_biases.union(self._slices))
        #: Trained parameters that are not split but whose gradients are partial on each rank and
        #: must be summed over the group.
        self.partial = [
            parameter
            for parameter in {id(tensor): tensor for tensor in partial}.values()
            if parameter.requires_grad
        ]

    # -- splitting
    def _split_module(self, name: str, module: Any, style: str) -> None:
        kind = kind_of(style)
        if kind == SUMMED:
            return
        if kind == EXPERTS:
            wrap_forward(module, self._experts)
            return
        if kind == LATENT:
            wrap_forward(module, partial(self._latent, parse_style(style).number))
            return
        if kind in VOCABULARY:
            self._split_vocabulary(name, module, style)
            return
        linear, adapters = _unwrap(name, module)
        adapter_style = style.partition("/")[0]  # LoRA's matrices are not transposed
        if kind in (COLUMN, COLUMN_GATHERED):
            self._split_column(name, linear, style, shared=True)
            for _, up in adapters:
                self._split_column(f"{name}.lora_B", up, adapter_style, shared=False)
        else:
            self._split_row(name, linear, style)
            for down, _ in adapters:
                self._split_row(f"{name}.lora_A", down, adapter_style)
            if kind != ROW_SPLIT:
                self._split_dropout(module)

    def _split_vocabulary(self, name: str, module: Any, style: str) -> None:
        size = module.weight.shape[0]
        (rows,) = ranges(style, size, self.group.size, self.group.rank)
        for key in dict(module.named_parameters(recurse=False)):
            self._split_parameter(name, module, key, style)
        if style == EMBEDDING:
            split_embedding(module, rows, self.group)
        else:
            split_head(module, rows, size, self.group)

    def _split_column(self, name: str, linear: Any, style: str, shared: bool) -> None:
        self._split_parameter(name, linear, "weight", style)
        if linear.bias is not None:
            self._split_parameter(name, linear, "bias", style)
        _set_features(linear, style)
        wrap_forward(linear, partial(self._column, kind_of(style) == COLUMN_GATHERED, shared))

    def _split_row(self, name: str, linear: Any, style: str) -> None:
        self._split_parameter(name, linear, "weight", style)
        _set_features(linear, style)
        wrap_forward(linear, partial(self._row, linear, kind_of(style) == ROW_SPLIT))

    def _split_parameter(self, name: str, module: nn.Module, key: str, style: str) -> None:
        full = getattr(module, key)
        if style in VOCABULARY and id(full) in self._parts:  # the embedding and the head share it
            setattr(module, key, self._parts[id(full)])
            return
        if id(full) in self._tied and style not in VOCABULARY:
            raise ConfigError(
                "`parallel.tensor` is not supported with `{name}.{key}`: it is used under several"
                " names: {tied}",
                code="tensor-with-tied-weights",
                fix="leave this module out of `parallel.tensor_plan`: it is then not split",
                name=name,
                key=key,
                tied=", ".join(self._tied[id(full)]),
            )
        dim = cut_axis(style, full.dim())
        assert dim is not None
        local = ranges(style, full.shape[dim], self.group.size, self.group.rank)
        # torch.cat copies, also a single part
        values = torch.cat(
            [full.detach().narrow(dim, rows.start, rows.length) for rows in local], dim
        ).to(final_dtype(full))
        parameter = nn.Parameter(values, requires_grad=full.requires_grad)
        self._parts[id(full)] = parameter
        self._slices[id(parameter)] = TensorSlice(dim, local, tuple(full.shape))
        setattr(module, key, parameter)

    def _split_dropout(self, module: nn.Module) -> None:
        """Make LoRA's dropout before a row layer draw the mask of all features and apply its part,
        so that the masks are the same as in training on a single rank."""
        for key, layer in getattr(module, "lora_dropout", nn.ModuleDict()).items():
            if isinstance(layer, nn.Dropout) and layer.p > 0:
                module.lora_dropout[key] = ShardedDropout(layer.p, self.group)  # type: ignore[index, operator, assignment]

    # -- forward
    def _column(
        self, gathered: bool, shared: bool, inner: Any, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        # with sequence parallelism, the layers' parent has gathered the tokens
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
            x = sum_gradient(low_precision(x), self.group)
            top_k_weights = sum_gradient(top_k_weights, self.group)
        return sum_parts(inner(x, top_k_index, top_k_weights, *args, **kwargs), self.group)

    def _latent(
        self, features: int, inner: Any, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Sum the gradient of the last features; a later column layer sums the rest."""
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
        reduce = scatter_tokens if self._sequence else sum_parts
        result = reduce(inner(x, *args, **kwargs), self.group)
        if linear.bias is not None:
            # Each rank has added the bias. Subtracting the surplus without gradient leaves the
            # gradient of the bias unchanged.
            result = result - (self.group.size - 1) * linear.bias.detach().to(result.dtype)
        return result

    # -- checks
    def _add_dropout_notice(
        self, modules: Mapping[str, nn.Module], plan: Mapping[str, str]
    ) -> None:
        for parent in {name.rpartition(".")[0] for name in plan if name.rpartition(".")[0]}:
            rates = [getattr(modules[parent], "attention_dropout", 0.0)]
            rates += [
                module.p
                for name, module in modules[parent].named_modules()
                if isinstance(module, nn.Dropout) and "lora_" not in name
            ]
            if any(isinstance(rate, float) and rate > 0 for rate in rates):
                text = UserText(
                    "tensor: {parent} has dropout, and each rank draws the masks of its part"
                    " of the layer, so losses differ slightly from a run on one rank",
                    code="dropout-differs-with-tensor",
                    parent=parent,
                )
                self.notices.append(("warning", text))
                return

    # -- after backward
    def sum_over_copies(self, gradients: list[tuple[torch.Tensor, int]]) -> None:
        """Sum each gradient, in place, over the ranks that hold the same weights.

        It is one all-reduce, in which each set of ranks has a separate range.

        Args:
            gradients: each with the number of adjacent ranks that hold its weights.
        """
        if not gradients:
            return
        padded = []
        for gradient, copies in gradients:
            shape = (self.group.size // copies, gradient.numel())
            rows = gradient.new_zeros(shape, dtype=torch.float32)
            rows[self.group.rank // copies] = gradient.reshape(-1)
            padded.append(rows.view(-1))
        flat = torch.cat(padded)
        self.group.wait(self.group.all_reduce(flat))
        sums = flat.split([len(rows) for rows in padded])
        for (gradient, copies), total in zip(gradients, sums, strict=True):
            rows = total.view(self.group.size // copies, -1)
            gradient.copy_(rows[self.group.rank // copies].view(gradient.shape))


def check_plan_sizes(model: nn.Module, plan: Mapping[str, str], size: int) -> None:
    """Raise ConfigError if ``size`` ranks do not divide the layers of the plan, or the heads in the
    model's config."""
    config = _config(model)
    if hasattr(config, "to_dict"):
        check_sizes(config.to_dict(), size)
    modules = dict(model.named_modules())
    sizes: dict[str, int] = {}
    for name, style in plan.items():
        kind = kind_of(style)
        if kind not in (COLUMN, COLUMN_GATHERED, ROW, ROW_SPLIT) or not _has_weights(name, modules):
            continue
        weight: Any = (
            _unwrap(name, modules[name])[0].weight if name in modules else _parameter(name, modules)
        )
        dim = cut_axis(style, weight.dim())
        assert dim is not None
        unit = "rows" if kind in (COLUMN, COLUMN_GATHERED) else "columns"
        if parse_style(style).name == MULTI_QUERY_COLUMN:
            unit = "query heads"
        sizes[f"{unit} of {name}"] = needed_divisor(style, weight.shape[dim])
    wrong = [name for name, number in sizes.items() if number % size]
    if wrong:
        number = sizes[wrong[0]]
        # the last of several layers with the same size
        distinct = {other: name for name, other in sizes.items() if other not in (number, 0)}
        others = {name: other for other, name in distinct.items()}
        check_divisible({wrong[0]: number, **others}, size)


def _config(model: Any) -> Any:
    return getattr(base_model(model), "config", None)


def _has_weights(name: str, modules: Mapping[str, nn.Module]) -> bool:
    if name in modules:
        return any(True for _ in modules[name].parameters())
    return _parameter(name, modules) is not None


def _parameter(name: str, modules: Mapping[str, nn.Module]) -> Any:
    owner, _, leaf = name.rpartition(".")
    return dict(modules[owner].named_parameters(recurse=False, remove_duplicate=False)).get(leaf)


def _set_features(linear: Any, style: str) -> None:
    """Set the size attributes of a layer from its weight."""
    outputs, inputs = linear.weight.shape
    if parse_style(style).transposed:
        linear.nx, linear.nf = outputs, inputs
    else:
        linear.out_features, linear.in_features = outputs, inputs


class _SharedInput:
    """Sums the gradient of a tensor once for all column layers that use it (query, key, value;
    gate, up)."""

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._version = -1

    def entered(self, x: torch.Tensor) -> torch.Tensor:
        version = torch_compat.tensor_version(x)
        if x is not self._input or version != self._version or self._output is None:
            self._input, self._version = x, version
            self._output = sum_gradient(low_precision(x), self.group)
        return self._output

    def forget(self) -> None:
        """Free the tensor, so that it does not outlive the layers that share it."""
        self._input = self._output = None


class ShardedDropout(nn.Module):
    """Applies dropout to this rank's part of the features, using its part of the full mask."""

    def __init__(self, p: float, group: Communicator) -> None:
        super().__init__()
        self.p = p
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        mask = functional.dropout(
            x.new_ones((*x.shape[:-1], x.shape[-1] * self.group.size)), self.p
        )
        # A copy of the part, because a view would keep the full mask until backward.
        return x * mask.chunk(self.group.size, -1)[self.group.rank].contiguous()


def _tied_parameters(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: tied for key, tied in names.items() if len(tied) > 1}


def _unwrap(name: str, module: nn.Module) -> tuple[nn.Linear, list[tuple[nn.Linear, nn.Linear]]]:
    """Return the linear layer of a module of the plan and its LoRA pairs (A, B).

    Raises:
        ConfigError: it is not a linear layer, or its adapter cannot be split.
    """
    linear: Any = getattr(module, "base_layer", module)
    adapters = list(_adapters(name, module)) if linear is not module else []
    is_linear = isinstance(linear, nn.Linear) or type(linear).__name__ == "Conv1D"
    if not is_linear or not linear.weight.is_floating_point() or isinstance(module, _NEVER_SPLIT):
        raise ConfigError(
            "`parallel.tensor` is not supported with `{name}`: it is a {kind}, and only torch's"
            " Linear and transformers' Conv1D layers can be split",
            code="tensor-with-layer",
            fix="leave it out of `parallel.tensor_plan` and of `lora.modules_to_save`, or set"
            " `parallel.mode: zero3`",
            name=name,
            kind=type(linear).__name__,
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
                "`parallel.tensor` is not supported with the adapter of `{name}`: it is not plain"
                " LoRA, or has a bias",
                code="tensor-with-adapter",
                fix="set `parallel.mode: zero3`, or use a plain LoRA adapter",
                name=name,
            )
        yield down, up

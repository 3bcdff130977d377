"""Trace how a forward pass uses the layers that tensor parallelism splits: how often, which of them
share an input, and whether backward needs the gradient of their input and their output again."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from paceline.distributed import torch_compat
from paceline.models import attention
from paceline.models.blocks import base_model, find_blocks
from paceline.models.shape.record import LayerUse
from paceline.models.shape.trace import TRACE_ERRORS, made_up_inputs, runs_on_its_device
from paceline.models.tensor_plan.style import COLUMN, COLUMN_GATHERED, LATENT, SUMMED, kind_of


def trace_layer_uses(
    model: nn.Module, plan: Mapping[str, str]
) -> dict[str, tuple[LayerUse, ...]] | None:
    """Run a model on the meta device forward with gradients, over made-up tokens.

    Args:
        plan: module → its tensor-parallel style.

    Returns:
        The uses of each linear layer and module of the plan, and of the second matrices of LoRA
        beside column layers and the first ones beside row layers, by the name of their module; None
        if the model cannot run on the meta device.
    """
    inputs = made_up_inputs(model)
    if inputs is None:
        return None
    recorder = _UseRecorder()
    was_training = model.training
    try:
        with (
            ExitStack() as stack,
            runs_on_its_device(model),
            attention.without_packing(base_model(model)),
            torch.autograd.graph.saved_tensors_hooks(recorder.saved, lambda tensor: tensor),
        ):
            for handle in recorder.attach(model.train(), plan):
                stack.callback(handle.remove)
            model(**inputs)
    except TRACE_ERRORS:
        return None
    finally:
        model.train(was_training)
    return {name: tuple(uses) for name, uses in recorder.uses.items()}


class _UseRecorder:
    """Records the uses of layers in hooks of their modules."""

    def __init__(self) -> None:
        self.uses: dict[str, list[LayerUse]] = {}
        # Uses whose output no operation of the block has needed for its backward so far.
        self._pending: list[tuple[str, int]] = []
        self._input: torch.Tensor | None = None
        self._version = -1

    def attach(self, model: nn.Module, plan: Mapping[str, str]) -> Iterator[Any]:
        """Yield the handles of the hooks."""
        modules = dict(model.named_modules())
        for name, style in plan.items():
            module, kind = modules.get(name), kind_of(style)
            if module is None or kind == SUMMED:  # it has no collective
                continue
            is_column = kind in (COLUMN, COLUMN_GATHERED)
            for layer_name, layer in _split_layers(name, module, is_column):
                is_shared = is_column and layer_name == name
                yield from self._attach(layer_name, layer, kind, is_shared, is_column)
        for _, block in find_blocks(model):
            yield block.register_forward_hook(lambda *_: self._pending.clear())

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that an operation keeps a tensor for backward: a recomputation of the block runs up
        to the last such operation."""
        for name, number in self._pending:
            self.uses[name][number] = self.uses[name][number]._replace(is_repeated=True)
        self._pending.clear()
        return tensor

    def _attach(
        self, name: str, module: nn.Module, kind: str, is_shared: bool, is_column: bool
    ) -> Iterator[Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter((*args, *kwargs.values())))
            shares_input = is_shared and self._is_last(x)
            if not is_column:
                self._input = None
            self._add(name, x.requires_grad, shares_input)

        def leave(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            if kind == LATENT:
                self._add(name, output.requires_grad)
            self._pending.append((name, len(self.uses[name]) - 1))

        if kind != LATENT:
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave)

    def _is_last(self, x: torch.Tensor) -> bool:
        """Return whether a tensor is the input of the column layer before, unchanged."""
        version = torch_compat.tensor_version(x)
        is_last = x is self._input and version == self._version
        self._input, self._version = x, version
        return is_last

    def _add(self, name: str, needs_gradient: bool, shares_input: bool = False) -> None:
        self.uses.setdefault(name, []).append(LayerUse(needs_gradient, shares_input, False))


def _split_layers(name: str, module: Any, is_column: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a layer that are split: the layer, and a matrix of each adapter."""
    yield name, getattr(module, "base_layer", module)
    matrix = "lora_B" if is_column else "lora_A"
    for key, layer in getattr(module, matrix, {}).items():
        yield f"{name}.{matrix}.{key}", layer

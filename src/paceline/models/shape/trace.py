"""Trace a forward pass to find out when a model uses its parameters: before, inside or after its
blocks."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.errors import first_line
from paceline.data.collate import find_tensors
from paceline.distributed import torch_compat
from paceline.distributed.torch_compat import TorchDispatchMode
from paceline.models import attention
from paceline.models.blocks import base_model, evaluation_mode, find_blocks

BEFORE, INSIDE, BETWEEN, AFTER = "before", "inside", "between", "after"
TRACE_ERRORS = (
    TypeError,
    ValueError,
    RuntimeError,
    KeyError,
    IndexError,
    AttributeError,
    NotImplementedError,
    AssertionError,
)


@dataclass
class Trace:
    """The result of a traced forward pass.

    Args:
        phases: parameter outside the blocks → when it was used. A tied weight is listed under the
            name in the module that used it.
        order: indices of the blocks, in the order in which they ran.
        outputs: index of a block → length of the tuple that it returned; 0 for a tensor.
        altered: indices of the blocks whose input was not the output of the previous block.
        bypassing: indices of the blocks after the first, in or after which the model used a value
            that it had computed from parameters before its blocks, other than by the hidden states
            that pass through the blocks.
        written: parameters that the forward pass changed in place.
        error: why the forward pass failed, or None.
    """

    phases: dict[str, set[str]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    outputs: dict[int, int] = field(default_factory=dict)
    altered: list[int] = field(default_factory=list)
    bypassing: list[int] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    error: str | None = None


def trace(model: nn.Module, run: Callable[[nn.Module], object]) -> Trace:
    """Call ``run(model)`` once, in evaluation mode and without gradients, and record when it uses
    which parameters. The model may be on the meta device."""
    recorder = _Recorder(model)
    with (
        evaluation_mode(model),
        recorder.hooks(),
        torch.no_grad(),
        runs_on_its_device(model),
        recorder,
    ):
        try:
            run(model)
        except TRACE_ERRORS as error:
            recorder.trace.error = f"{type(error).__name__}: {first_line(error)}"
    return recorder.trace


@contextmanager
def runs_on_its_device(model: nn.Module) -> Iterator[None]:
    """On the meta device, let the model run as far as possible within the block: with the
    implementation of experts that has no data-dependent shapes and takes every dtype there."""
    base = base_model(model)
    experts = None
    if not on_meta(model):
        yield
        return
    if hasattr(base, "set_experts_implementation"):
        experts = base.get_experts_implementation()
        base.set_experts_implementation("batched_mm")
    try:
        with torch_compat.runs_on_meta(), _MetaNumbers():  # type: ignore[no-untyped-call]
            yield
    finally:
        if experts is not None:
            base.set_experts_implementation(experts)


class _MetaNumbers(TorchDispatchMode):
    """Answers when a model reads a number from a tensor on the meta device: as if nothing is padded
    or packed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch_compat.is_item_op(func) and args[0].device.type == "meta":
            return args[0].dtype.is_floating_point or args[0].dtype == torch.bool
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Records every operation, and therefore every use of a parameter, even if its module is not
    called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.blocks = [block for _, block in find_blocks(model)]
        inside = {id(module) for block in self.blocks for module in block.modules()}
        self.owners = {
            name: module
            for name, module in model.named_modules()
            if id(module) not in inside and any(True for _ in module.parameters(recurse=False))
        }
        self.names: dict[int, dict[int, str]] = {}  # parameter → {its module: name}
        for prefix, module in self.owners.items():
            for name, parameter in module.named_parameters(
                prefix, recurse=False, remove_duplicate=False
            ):
                self.names.setdefault(id(parameter), {})[id(module)] = name
        self.all_names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._active: list[int] = []  # modules outside the blocks that are running
        self._depth = 0
        self._last: object = None
        # Values before the blocks that depend on parameters, such as embeddings.
        self._early: dict[int, torch.Tensor] = {}

    @property
    def _phase(self) -> str:
        if self._depth:
            return INSIDE
        if not self.trace.order:
            return BEFORE
        return AFTER if len(self.trace.order) == len(self.blocks) else BETWEEN

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = list(find_tensors((args, kwargs)))
        for tensor in tensors:
            names = self.names.get(id(tensor))
            if names is not None:
                users = [names[module] for module in self._active if module in names]
                self.trace.phases.setdefault(
                    users[-1] if users else next(iter(names.values())), set()
                ).add(self._phase)
        if args and id(args[0]) in self.all_names and torch_compat.is_mutable_op(func):
            self.trace.written.append(self.all_names[id(args[0])])
        result = func(*args, **(kwargs or {}))
        self._follow_early(tensors, result)
        return result

    def _follow_early(self, tensors: list[torch.Tensor], result: object) -> None:
        """Follow the values that were computed from parameters before the blocks."""
        depends = any(id(tensor) in self._early for tensor in tensors)
        if depends and len(self.trace.order) > 1:
            number = self.trace.order[-1] + (0 if self._depth else 1)
            if number not in self.trace.bypassing:
                self.trace.bypassing.append(number)
        is_before = not self.trace.order
        if depends or (is_before and any(id(tensor) in self.all_names for tensor in tensors)):
            self._early |= {id(tensor): tensor for tensor in find_tensors((result,))}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                enter, leave = partial(self._enter, number), partial(self._leave, number)
                stack.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
                stack.enter_context(block.register_forward_hook(leave))
            for module in self.owners.values():
                stack.enter_context(
                    module.register_forward_pre_hook(lambda user, _: self._active.append(id(user)))
                )
                stack.enter_context(
                    module.register_forward_hook(lambda *_: self._active.pop() and None)
                )
            yield

    def _enter(
        self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        hidden = next(
            (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None
        )
        if self.trace.order and hidden is not self._last:
            self.trace.altered.append(number)
        self.trace.order.append(number)
        self._depth += 1

    def _leave(self, number: int, block: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        is_tuple = isinstance(out, tuple | list)
        self._last = out[0] if is_tuple else out
        self.trace.outputs[number] = len(out) if is_tuple else 0
        self._depth -= 1
        if isinstance(self._last, torch.Tensor):
            self._early.pop(id(self._last), None)  # the next block may use it


def made_up_inputs(model: nn.Module) -> dict[str, object] | None:
    """Return a few tokens or one image as inputs for a Hugging Face model, or None for other
    models, whose inputs are unknown."""
    config = getattr(model, "config", None)
    first = next(model.parameters(), None)
    base = base_model(model)
    if config is None or first is None:
        return None
    arguments = inspect.signature(base.forward).parameters
    if "input_ids" in arguments and "decoder_input_ids" not in arguments:
        inputs: dict[str, object] = {
            "input_ids": torch.zeros((1, 2), dtype=torch.int64, device=first.device)
        }
        return inputs | ({"use_cache": False} if "use_cache" in arguments else {})
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if "pixel_values" in arguments and isinstance(size, int):
        return {
            "pixel_values": torch.zeros(
                (1, channels, size, size), device=first.device, dtype=first.dtype
            )
        }
    return None


def trace_model(model: nn.Module, run: Callable[[nn.Module], object] | None = None) -> Trace | None:
    """Trace a forward pass over made-up inputs or, if the inputs are unknown or the forward pass
    fails, trace ``run``. Return None if neither is possible."""
    inputs = made_up_inputs(model)
    # Attention for packed rows requires the lengths of the samples, for divided rows other ranks.
    with attention.without_packing(base_model(model)):
        result = None if inputs is None else trace(model, lambda module: module(**inputs))
    if run is not None and (result is None or result.error is not None) and not on_meta(model):
        return trace(model, run)
    return result


def on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())

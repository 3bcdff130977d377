"""Partition a model in place. Every stage runs the model's own forward, in which blocks of other
stages pass their input through.

On every stage but the first, earlier values are placeholders: tensors of the right shape that
contain NaN and take no memory. The block before the first one of the stage returns the received
tensor. On every stage but the last, calling the block after the last one of the stage ends the
forward. So masks, positions, packing and the loss are computed by the model and the task as usual.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.errors import RunError
from paceline.data.collate import find_tensors, map_tensors
from paceline.distributed import torch_compat
from paceline.models.blocks import wrap_forward
from paceline.models.weights.load import final_dtype
from paceline.strategies.pipeline.stages import StagePlan


class StageBoundary(BaseException):
    """Ends a forward with the hidden states that the next stage continues from.

    It is not an Exception, so that a task's ``except Exception`` does not catch it.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class PartitionedModel:
    """Patches a model and runs its stages.

    Args:
        blocks: all blocks in order.
        forms: for each block, a function that brings a tensor into the form of the block's output.
        division: the stages of the model.
        local_stages: the stages of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[tuple[str, nn.Module]],
        forms: list[Callable[[torch.Tensor], Any]],
        division: StagePlan,
        local_stages: list[int],
    ) -> None:
        self.model, self.division, self.forms = model, division, forms
        local = {number for stage in local_stages for number in range(*division.blocks[stage])}
        self.foreign = [block for number, (_, block) in enumerate(blocks) if number not in local]
        self._active = self._probing = False
        self._first = self._beyond = self._position = 0
        self._received: torch.Tensor | None = None
        self._last_output: torch.Tensor | None = None
        # shapes and dtypes of the model's inputs → the first block's input, on the meta device
        self._probed: dict[tuple[Any, ...], torch.Tensor] = {}
        self._inputs: tuple[Any, ...] | None = None  # of the model, while it is probed
        model.register_forward_pre_hook(self._enter_model, with_kwargs=True)
        for number, (_, block) in enumerate(blocks):
            wrap_forward(block, partial(self._block, number))
            block.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True)
        for name, region in division.regions.items():
            if region in ("before", "both"):
                self._patch_outer(name, is_held=region == "both" or 0 in local_stages)

    # -- patching
    def _patch_outer(self, name: str, is_held: bool) -> None:
        """Make a module before the blocks compute only shapes on later stages and in probes."""
        parent_name, _, leaf = name.rpartition(".")
        parent = self.model.get_submodule(parent_name)
        module = getattr(parent, leaf)
        if isinstance(module, nn.Module):
            memo: dict[int, torch.Tensor] = {
                id(parameter): nn.Parameter(_meta(parameter), requires_grad=False)
                for parameter in module.parameters()
            }
            memo |= {id(buffer): _meta(buffer) for buffer in module.buffers()}
            wrap_forward(module, partial(self._before, copy.deepcopy(module, memo)))
        elif not is_held:  # a parameter of a module that contains the blocks
            _replace_by_placeholder(parent, leaf, module)

    def _before(
        self, ghost: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not self._active or self._first == 0 or self._position > 0:  # used after the blocks too
            return original(*args, **kwargs)
        device = next(
            (tensor.device for tensor in find_tensors((args, kwargs))), torch.device("cpu")
        )
        with torch.no_grad():
            out = ghost(*map_tensors(args, _meta), **map_tensors(kwargs, _meta))
        return map_tensors(out, partial(placeholder, device=device))

    def _enter_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End a probe whose result is known because the model's inputs have known shapes."""
        if not (self._active and self._probing):
            return
        self._inputs = _describe_inputs(args, kwargs)
        known = None if self._inputs is None else self._probed.get(self._inputs)
        if known is not None:
            raise StageBoundary(known)

    def _enter(
        self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._active:
            return  # recomputed in backward
        if number != self._position:
            raise partition_error(f"block {number} ran instead of block {self._position}")
        self._position += 1
        if self._probing:
            raise StageBoundary(_hidden(*args, *kwargs.values()))
        if number == self._beyond:
            hidden = _hidden(*args, *kwargs.values())
            if hidden is not self._last_output:
                raise partition_error(
                    f"the model changes the output of block {number - 1} before block {number}"
                )
            raise StageBoundary(hidden)

    def _block(self, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._active:
            return original(*args, **kwargs)
        if number >= self._first:
            out = original(*args, **kwargs)
            if number == self._beyond - 1:
                self._last_output = out[0] if isinstance(out, tuple | list) else out
            return out
        passed = self._received
        if number != self._first - 1:
            passed = placeholder(_hidden(*args, *kwargs.values()))
        assert passed is not None
        return self.forms[number](passed)

    # -- running
    def probe(self, call: Callable[[], object]) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of the first block's input, by a forward that ends there, or where
        the model is called with inputs of shapes and dtypes that it was called with before.

        It is the same on every rank of the pipeline.
        """
        self._first, self._beyond = self.division.blocks[-1]
        self._inputs = None  # a task that calls parts of the model is probed each time
        hidden = self._run(call, None, probing=True)
        if not isinstance(hidden, torch.Tensor):
            raise partition_error("the forward runs no block")
        if self._inputs is not None:
            self._probed[self._inputs] = _meta(hidden)
        return tuple(hidden.shape), hidden.dtype

    def run(self, stage: int, call: Callable[[], Any], received: torch.Tensor | None) -> Any:
        """Return the hidden states after ``stage``, or the result of ``call`` on the last stage.

        Raises:
            RunError: if the blocks do not run in order, or if the input of a block is not the
                output of the previous one.
        """
        self._first, self._beyond = self.division.blocks[stage]
        return self._run(
            call, received, probing=False, is_last=stage == self.division.num_stages - 1
        )

    def _run(
        self,
        call: Callable[[], Any],
        received: torch.Tensor | None,
        probing: bool,
        is_last: bool = False,
    ) -> Any:
        for block in self.foreign:
            if getattr(block, "gradient_checkpointing", False):
                vars(block)["gradient_checkpointing"] = False  # nothing to recompute
        self._received, self._probing, self._position, self._active = received, probing, 0, True
        try:
            value = call()
            if not is_last or self._position != self._beyond:
                raise partition_error(f"the forward ended at block {self._position}")
            return value
        except StageBoundary as end:
            return end.hidden
        finally:
            self._active = False
            self._received = self._last_output = None


def _describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return shape and dtype of each tensor among the inputs of a model, or None if the inputs
    contain objects that may contain further tensors."""
    leaves = torch_compat.tree_leaves((args, kwargs))
    if not all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in leaves):
        return None
    return tuple(
        (tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)
    )


def partition_error(reason: str) -> RunError:
    """Return the error for a model whose blocks do not run as in a pipeline."""
    return RunError(
        "`parallel.pipeline` is not supported with this model: {reason}",
        code="not-a-pipeline-at-run-time",
        allowed="blocks that run in order, each once, whose only trained input is the output of"
        " the block before",
        fix="use a mode that does not partition the model, such as `parallel.mode: zero3`",
        reason=reason,
    )


def placeholder(like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor with the shape of ``like`` that takes no memory. It contains NaN, so that
    results computed from it are detected, or zeros for integer dtypes."""
    value = float("nan") if like.is_floating_point() else 0
    return torch.full((), value, dtype=final_dtype(like), device=device or like.device).expand(
        like.shape
    )


def _replace_by_placeholder(module: nn.Module, leaf: str, parameter: torch.Tensor) -> None:
    delattr(module, leaf)
    setattr(module, leaf, placeholder(parameter))


def drop(model: nn.Module, division: StagePlan, local_stages: list[int]) -> None:
    """Free the parameters and buffers of stages on other ranks.

    Parameters are replaced by placeholders that take no memory, because some models read the device
    or dtype of their embedding. Buffers are replaced by None.
    """
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""

        def is_foreign(leaf: str, prefix: str = prefix) -> bool:
            return not set(division.stages.get(prefix + leaf, local_stages)) & set(local_stages)

        for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if is_foreign(leaf):
                _replace_by_placeholder(module, leaf, parameter)
        for leaf, _ in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if is_foreign(leaf):
                setattr(module, leaf, None)


def _hidden(*inputs: object) -> torch.Tensor:
    """Return the hidden states among the inputs of a block."""
    for value in inputs:
        if isinstance(value, torch.Tensor):
            return value
    raise partition_error("a block has no tensor among its inputs")


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, dtype=final_dtype(tensor), device="meta")

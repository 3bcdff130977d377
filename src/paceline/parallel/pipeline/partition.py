"""A model cut in place: its own forward runs on every stage, and the blocks of other stages let
pass what they are given.

On a stage that is not the first, what comes before it is a stand-in: a tensor of the right shape
that holds NaN and takes no memory. The block before the stage's first gives out what was received.
On a stage that is not the last, the call of the block behind its last ends the forward. So masks,
positions, packing and the loss are the model's and the task's own.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.errors import RunError
from paceline.data.collate import find_tensors, map_tensors
from paceline.models.blocks import wrap_forward
from paceline.parallel.pipeline.stages import StagePlan

_UNFIT = (
    "blocks that run one after another, each once, on what the one before it gave out, and on"
    " nothing else that is trained"
)
_FIX = "use a mode that keeps the model whole, such as `parallel.mode: zero3`"


class StageBoundary(
    BaseException
):  # not an Exception: a task's `except Exception` must not hold it up
    """Leaves a forward with the hidden states that the next stage goes on from."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class PartitionedModel:
    """The patched model, and the run of a stage through it.

    Args:
        blocks: all blocks in order.
        forms: for each block a function that brings a tensor into the form of the block's output.
        division: of the blocks to stages.
        mine: stages of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[tuple[str, nn.Module]],
        forms: list[Callable[[torch.Tensor], Any]],
        division: StagePlan,
        mine: list[int],
    ) -> None:
        self.model, self.division, self.forms = model, division, forms
        held = {number for stage in mine for number in range(*division.blocks[stage])}
        self.foreign = [block for number, (_, block) in enumerate(blocks) if number not in held]
        self._active = self._probing = False
        self._first = self._beyond = self._position = 0
        self._received: torch.Tensor | None = None
        self._last_output: torch.Tensor | None = None
        for number, (_, block) in enumerate(blocks):
            wrap_forward(block, partial(self._block, number))
            block.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True)
        for name, region in division.regions.items():
            if region in ("before", "both") and any(stage > 0 for stage in mine):
                self._stand_in(name, region == "both" or any(stage == 0 for stage in mine))

    # -- patching
    def _stand_in(self, name: str, holds_first: bool) -> None:
        """Let a module before the blocks give out shapes alone on the later stages."""
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
        elif not holds_first:  # a parameter of a module that holds the blocks
            _replace_by_stand_in(parent, leaf, module)

    def _before(
        self, ghost: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        # used again after the blocks
        if not self._active or self._first == 0 or self._position > 0:
            return original(*args, **kwargs)
        device = next(
            (tensor.device for tensor in find_tensors((args, kwargs))), torch.device("cpu")
        )
        with torch.no_grad():
            out = ghost(*map_tensors(args, _meta), **map_tensors(kwargs, _meta))
        return map_tensors(out, partial(stand_in, device=device))

    def _enter(
        self, number: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._active:
            return  # recomputed in backward
        if number != self._position:
            raise unfit(f"block {number} ran where block {self._position} was due")
        self._position += 1
        if self._probing:
            raise StageBoundary(_hidden(*args, *kwargs.values()))
        if number == self._beyond:
            hidden = _hidden(*args, *kwargs.values())
            if hidden is not self._last_output:
                raise unfit(
                    f"something is done to the output of block {number - 1} before block {number}"
                    " takes it"
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
            passed = stand_in(_hidden(*args, *kwargs.values()))
        assert passed is not None
        return self.forms[number](passed)

    # -- running
    def probe(self, call: Callable[[], object]) -> tuple[int, ...]:
        """Shape of what ``call`` hands to the first block, by a forward that ends there. The same
        on every rank of the pipeline."""
        self._first, self._beyond = self.division.blocks[-1]
        result = self._run(call, None, probing=True)
        if not isinstance(result, torch.Tensor):
            raise unfit("the forward came to no block")
        return tuple(result.shape)

    def run(self, stage: int, call: Callable[[], Any], received: torch.Tensor | None) -> Any:
        """Hidden states behind ``stage``; of the last stage, what ``call`` returns.

        Raises:
            RunError: the blocks do not run as a pipeline's must.
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
                raise unfit(f"the forward ended at block {self._position}")
            return value
        except StageBoundary as end:
            return end.hidden
        finally:
            self._active = False
            self._received = self._last_output = None


def unfit(why: str) -> RunError:
    return RunError(
        f"this model cannot be cut into pipeline stages: {why}", allowed=_UNFIT, fix=_FIX
    )


def stand_in(like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor of that shape without memory of its own: NaN, so that what is computed from it
    shows; zero where integer."""
    value = float("nan") if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=device or like.device).expand(like.shape)


def _replace_by_stand_in(module: nn.Module, leaf: str, parameter: torch.Tensor) -> None:
    delattr(module, leaf)
    setattr(module, leaf, stand_in(parameter.detach()))


def drop(model: nn.Module, division: StagePlan, mine: list[int]) -> None:
    """Let go of the parameters and buffers of other ranks' stages. A parameter leaves a stand-in
    without memory: some models ask their embedding for its device or type. A buffer's place holds
    None."""
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""

        def is_elsewhere(leaf: str, prefix: str = prefix) -> bool:
            return not set(division.stages.get(prefix + leaf, mine)) & set(mine)

        for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if is_elsewhere(leaf):
                _replace_by_stand_in(module, leaf, parameter)
        for leaf, _ in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if is_elsewhere(leaf):
                setattr(module, leaf, None)


def _hidden(*inputs: object) -> torch.Tensor:
    """The hidden states among the inputs of a block."""
    for value in inputs:
        if isinstance(value, torch.Tensor):
            return value
    raise unfit("a block takes no tensor")


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")

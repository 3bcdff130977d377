"""Sequence parallelism: between the cut layers activations are kept in parts too, cut along the
tokens.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4.2.2. From the first block's input to the last block's output a rank holds its part of the
tokens; attention and the feed-forward layers gather them and scatter their sum. What is whole in a
block (norms) sees a part of the tokens, so its gradient is a part, to be summed over the ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError, RunError
from paceline.distributed.communicator import Communicator
from paceline.models.blocks import find_blocks
from paceline.models.tensor_plan.style import COLUMN, ROW, SUMMED, kind_of
from paceline.parallel.tensor.ops import enter_tokens, gather_tokens, leave_tokens, low_precision

_MARK = "_paceline_tokens"  # on a block's output: tokens of the whole row


class SequenceParallelizer:
    """Hangs the cutting and gathering of tokens on the blocks of ``model`` and on the modules in
    them that hold cut layers.

    Raises:
        ConfigError: the model is not made of blocks of which this can be said to be right.
    """

    def __init__(self, model: nn.Module, group: Communicator, plan: Mapping[str, str]) -> None:
        self.group = group
        self._tokens = 0  # of the row that the block at work was given
        modules = dict(model.named_modules())
        parents = sorted({name.rpartition(".")[0] for name in plan})
        blocks = [
            (name, block)
            for name, block in find_blocks(model)
            if any(_inside(parent, name) for parent in parents)
        ]
        self.blocks = [block for _, block in blocks]
        _check_blocks(modules, plan, parents, blocks)
        for parent in parents:
            modules[parent].register_forward_pre_hook(self._before_parent, with_kwargs=True)
        for number, (_, block) in enumerate(blocks):
            block.register_forward_pre_hook(
                self._before_first if number == 0 else self._before_block, with_kwargs=True
            )
            block.register_forward_hook(
                self._after_last if number == len(blocks) - 1 else self._after_block
            )

    def partial(self, cut: set[int], row_biases: set[int]) -> list[nn.Parameter]:
        """Parameters of the blocks of whose gradient each rank has a part: all but cut ones and
        biases of row layers."""
        result = [parameter for block in self.blocks for parameter in block.parameters()]
        return [
            parameter
            for parameter in result
            if id(parameter) not in cut and id(parameter) not in row_biases
        ]

    # -- hooks
    def _before_first(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        hidden = _hidden(args, kwargs)
        self._tokens = hidden.shape[1]
        return _replaced(args, kwargs, enter_tokens(hidden, self.group))

    def _before_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        # Not remembered from the last block: activation checkpointing runs blocks again, out of
        # order.
        hidden = _hidden(args, kwargs)
        told = [_told_tokens(kwargs), getattr(hidden, _MARK, None)]
        fitting = [
            count
            for count in told
            if count is not None and -(-count // self.group.size) == hidden.shape[1]
        ]
        if not fitting:
            raise RunError(
                "sequence_parallel: a block was not told how many tokens the row has",
                fix="set `parallel.sequence_parallel: false`",
            )
        self._tokens = fitting[0]

    def _before_parent(self, parent: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _replaced(
            args,
            kwargs,
            gather_tokens(low_precision(_hidden(args, kwargs)), self._tokens, self.group),
        )

    def _after_block(self, block: nn.Module, args: Any, output: Any) -> None:
        setattr(output[0] if isinstance(output, tuple) else output, _MARK, self._tokens)

    def _after_last(self, block: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (leave_tokens(output[0], self._tokens, self.group), *output[1:])
        return leave_tokens(output, self._tokens, self.group)


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]  # type: ignore[no-any-return]


def _replaced(args: Any, kwargs: Any, hidden: torch.Tensor) -> tuple[Any, Any]:
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def _told_tokens(kwargs: Any) -> int | None:
    """Tokens of the whole row, from what the model gives each of its blocks beside the
    activations."""
    positions = kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor):
        return int(positions.shape[-1])
    turned = kwargs.get("position_embeddings")
    if (
        isinstance(turned, tuple)
        and turned
        and isinstance(turned[0], torch.Tensor)
        and turned[0].dim() == 3
    ):
        return int(turned[0].shape[1])
    return None


def _inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")


def _check_blocks(
    modules: Mapping[str, nn.Module],
    plan: Mapping[str, str],
    parents: list[str],
    blocks: list[tuple[str, nn.Module]],
) -> None:
    """What is shown: every cut layer lies in a module of a block that has column layers and then a
    row layer, and what is whole beside these modules is a norm, which treats each token alone."""
    for parent in parents:
        styles = {
            kind_of(style) for name, style in plan.items() if name.rpartition(".")[0] == parent
        }
        if not any(_inside(parent, name) for name, _ in blocks):
            raise _refused(
                f"`{parent or 'the model itself'}` holds cut layers itself and is not a module"
                " inside a block"
            )
        if not {COLUMN, ROW} <= styles <= {COLUMN, ROW, SUMMED}:
            raise _refused(
                f"the layers of `{parent}` are cut as {', '.join(sorted(styles))}, not as colwise"
                " and rowwise"
            )
    for name, block in blocks:
        inside = [parent for parent in parents if _inside(parent, name)]
        for path, module in block.named_modules():
            full = f"{name}.{path}" if path else name
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            if any(full == layer or _inside(full, layer) for layer in plan):
                continue
            if "norm" not in type(module).__name__.lower() or any(
                _inside(full, parent) for parent in inside
            ):
                raise _refused(
                    f"`{full}` ({type(module).__name__}) is kept whole and is no norm between the"
                    " cut layers"
                )


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"`parallel.sequence_parallel: true`: {why}",
        allowed=(
            "models of blocks, each of modules with colwise and rowwise layers and norms between"
            " them"
        ),
        fix="set `parallel.sequence_parallel: false`: tensor parallelism alone works",
    )

"""Sequence parallelism: activations between tensor-parallel layers are split along the tokens.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4.2.2. From the first block's input to the last block's output a rank holds its part of the
tokens; attention and the feed-forward layers gather them and scatter their sum. The norms of a
block see a part of the tokens, so their gradients are parts, to be summed over the ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError, RunError
from paceline.distributed.communicator import Communicator
from paceline.models.tensor_plan.sequence import blocks_reason, split_blocks
from paceline.strategies.tensor.ops import enter_tokens, gather_tokens, leave_tokens, low_precision

_TOKENS_ATTRIBUTE = "_paceline_tokens"  # of a block's output: tokens of the full row


class SequenceParallelizer:
    """Adds hooks that split and gather tokens to the blocks of ``model`` and to the modules in them
    that contain tensor-parallel layers.

    Raises:
        ConfigError: the structure of the model is not supported.
    """

    def __init__(self, model: nn.Module, group: Communicator, plan: Mapping[str, str]) -> None:
        self.group = group
        self._tokens = 0  # of the full row that the running block processes
        modules = dict(model.named_modules())
        parents = sorted({name.rpartition(".")[0] for name in plan})
        blocks = split_blocks(model, parents)
        self.blocks = [block for _, block in blocks]
        reason = blocks_reason(model, plan)
        if reason is not None:
            raise _unsupported(reason)
        for parent in parents:
            modules[parent].register_forward_pre_hook(self._before_parent, with_kwargs=True)
        for number, (_, block) in enumerate(blocks):
            block.register_forward_pre_hook(
                self._before_first if number == 0 else self._before_block, with_kwargs=True
            )
            block.register_forward_hook(
                self._after_last if number == len(blocks) - 1 else self._after_block
            )

    def partial(self, excluded: set[int]) -> list[nn.Parameter]:
        """Return the parameters of the blocks of whose gradient each rank computes a part.

        Args:
            excluded: ids of the split parameters and of the biases of row layers.
        """
        return [
            parameter
            for block in self.blocks
            for parameter in block.parameters()
            if id(parameter) not in excluded
        ]

    # -- hooks
    def _before_first(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        hidden = _hidden(args, kwargs)
        self._tokens = hidden.shape[1]
        return _replaced(args, kwargs, enter_tokens(hidden, self.group))

    def _before_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        # Activation checkpointing runs blocks again, in another order, on tensors without the
        # attribute: then it is the number of the last forward pass.
        hidden = _hidden(args, kwargs)
        counts = (_row_tokens(kwargs), getattr(hidden, _TOKENS_ATTRIBUTE, None), self._tokens)
        for count in counts:
            if count is not None and -(-count // self.group.size) == hidden.shape[1]:
                self._tokens = count
                return
        raise RunError(
            "`parallel.sequence_parallel: true` is not supported with this model: the inputs of a"
            " block do not tell the number of tokens of the row",
            code="sequence-parallel-input",
            fix="set `parallel.sequence_parallel: false`",
        )

    def _before_parent(self, parent: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _replaced(
            args,
            kwargs,
            gather_tokens(low_precision(_hidden(args, kwargs)), self._tokens, self.group),
        )

    def _after_block(self, block: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple | list) else output
        setattr(hidden, _TOKENS_ATTRIBUTE, self._tokens)

    def _after_last(self, block: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return type(output)((leave_tokens(output[0], self._tokens, self.group), *output[1:]))
        return leave_tokens(output, self._tokens, self.group)


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]  # type: ignore[no-any-return]


def _replaced(args: Any, kwargs: Any, hidden: torch.Tensor) -> tuple[Any, Any]:
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def _row_tokens(kwargs: Any) -> int | None:
    """Return the number of tokens of the full row, from the keyword arguments of a block; None if
    they do not tell it."""
    positions = kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor):
        return int(positions.shape[-1])
    match kwargs.get("position_embeddings"):
        case (torch.Tensor() as rotary, *_) if rotary.dim() == 3:
            return int(rotary.shape[1])
    return None


def _unsupported(reason: str) -> ConfigError:
    return ConfigError(
        "`parallel.sequence_parallel: true` is not supported with this model: {reason}",
        code="sequence-parallel-not-supported",
        allowed="models of blocks that consist of modules with colwise and rowwise layers, and"
        " norms between them",
        fix="set `parallel.sequence_parallel: false`: tensor parallelism works without it",
        reason=reason,
    )

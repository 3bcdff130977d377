"""Activation checkpointing: backward recomputes the activations of blocks instead of storing
them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, TypedDict

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from paceline.core.errors import ConfigError
from paceline.models.blocks import base_model, wrap_forward
from paceline.models.packed_row import kept_for_backward

#: Matrix products → the position of the right matrix among their arguments.
_MATRIX_PRODUCTS = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}
#: A product is recomputed if its inner dimension is smaller than its output width by this factor,
#: as in a low-rank adapter: it takes few operations for each number that it would store.
_CHEAP_RATIO = 8


class _CheckpointArguments(TypedDict, total=False):
    """Arguments of ``torch.utils.checkpoint.checkpoint``."""

    use_reentrant: bool
    context_fn: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint_activations(model: nn.Module, setting: str | int) -> None:
    """Recompute the activations of blocks in backward. Losses and gradients do not change.

    Blocks are the ``GradientCheckpointingLayer`` modules of a transformers model, else the children
    of every ModuleList and Sequential. A model of another kind may define
    ``gradient_checkpointing_enable(gradient_checkpointing_kwargs)``.

    Args:
        setting: value of ``train_args.gradient_checkpointing``: ``none``; ``full``; ``selective``,
            which stores the results of large matrix products and of attention and recomputes the
            rest; or a number N, which recomputes every N-th block.

    Raises:
        ConfigError: if the model has no blocks, or does not support the setting.
    """
    if setting == "none":
        return
    keywords: _CheckpointArguments = {"use_reentrant": False}
    if setting == "selective":
        keywords["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    every = setting if isinstance(setting, int) else 1
    blocks = recomputable_blocks(model)
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if not blocks and callable(enable) and every == 1:
        _enable(enable, keywords, model, setting)
        return
    if not blocks:
        raise ConfigError(
            "`gradient_checkpointing: {setting}` is not supported with {kind}: it has no"
            " ModuleList or Sequential to recompute",
            code="no-blocks",
            fix="set `train_args.gradient_checkpointing: none`, or give the model a method"
            " gradient_checkpointing_enable(gradient_checkpointing_kwargs)",
            setting=setting,
            kind=type(model).__name__,
        )
    for block in blocks[::every]:
        wrap_forward(block, partial(_run, keywords))


def _run(
    keywords: _CheckpointArguments, forward: Callable[..., Any], *args: Any, **inputs: Any
) -> Any:
    return checkpoint(kept_for_backward(forward), *args, **keywords, **inputs)


def _policy(
    context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Store the results of attention and of matrix products, unless the product is cheap."""
    right = _MATRIX_PRODUCTS.get(operation)
    is_stored = _is_attention(operation) or _is_quantized_product(operation)
    if right is not None:
        inner, width = args[right].shape
        is_stored = inner * _CHEAP_RATIO >= width
    return CheckpointPolicy.MUST_SAVE if is_stored else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_attention(operation: Any) -> bool:
    """Return whether this is a fused attention, of torch or of the flash-attn package."""
    return any(part in str(operation) for part in ("attention", "attn"))


def recomputable_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks to recompute, in the model's order."""
    base = base_model(model)
    if hasattr(base, "supports_gradient_checkpointing"):  # a transformers model
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [each for each in base.modules() if isinstance(each, GradientCheckpointingLayer)]
    if callable(getattr(model, "gradient_checkpointing_enable", None)):
        return []
    return [
        child
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for child in module
        if not isinstance(child, nn.ModuleList | nn.Sequential)
        and any(True for _ in child.parameters())
    ]


def _enable(
    enable: Callable[..., object],
    keywords: _CheckpointArguments,
    model: nn.Module,
    setting: str | int,
) -> None:
    try:
        enable(gradient_checkpointing_kwargs=keywords)
    except ValueError as error:  # raised by transformers
        raise ConfigError(
            "`gradient_checkpointing: {setting}` is not supported with {kind}: {reason}",
            code="checkpointing-not-supported",
            fix="set `train_args.gradient_checkpointing: none`",
            setting=setting,
            kind=type(model).__name__,
            reason=error,
        ) from error


@cache
def _is_quantized_product(operation: Any) -> bool:
    """Return whether this is bitsandbytes' product with 4-bit weights."""
    return "bitsandbytes.gemm_4bit" in str(operation)

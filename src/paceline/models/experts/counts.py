"""Count the tokens that each expert gets in training, on the device.

The numbers of a token's experts are read where the experts get them, whatever the router computes.
They are counted while a thread computes the loss of a micro-batch, and not when backward repeats a
forward pass, which happens later or in another thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.core.texts import UserText
from paceline.models.experts.layers import ExpertLayer, find_expert_layers

logger = logging.getLogger(__name__)

#: ``batch``: the micro-batch whose loss this thread computes.
_thread = threading.local()


@dataclass(frozen=True)
class _CountedBatch:
    """A micro-batch whose tokens are counted.

    Args:
        mask: 1 for each token and 0 for padding, [tokens]; None without padding.
    """

    counter: ExpertCounter
    mask: torch.Tensor | None


@dataclass(frozen=True)
class ExpertCounter:
    """The tokens that the experts got in a step on this rank.

    Args:
        layers: the layers of the full model. This rank may compute only some of them.
        tokens: number of tokens of each expert, [layers, experts].
        aux_loss: this rank's part of the auxiliary loss, without its coefficient.
        unmasked: number of tokens, over all layers, among which padding is counted, because the
            experts got another number of tokens than the batch has.
    """

    layers: Sequence[ExpertLayer]
    tokens: torch.Tensor
    aux_loss: torch.Tensor
    unmasked: torch.Tensor
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _reported: set[str] = field(default_factory=set)

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """Count the tokens of a micro-batch while this thread computes its loss.

        Args:
            batch: the collated batch; its ``attention_mask``, if it has one, tells which tokens
                are padding.
        """
        mask = batch.get("attention_mask") if isinstance(batch, dict) else None
        flat = mask.reshape(-1) if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
        _thread.batch = _CountedBatch(self, flat)
        try:
            yield
        finally:
            _thread.batch = None

    def clear(self) -> None:
        """Start a new step."""
        self.tokens.zero_()
        self.aux_loss.zero_()
        self.unmasked.zero_()

    def add(self, row: torch.Tensor, indices: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Count tokens.

        Args:
            row: the row of the layer in :attr:`tokens`.
            indices: experts of each token [tokens, experts of a token].
            mask: as for a batch.
        """
        num_chosen = indices.shape[-1]
        flat = indices.reshape(-1).to(row.device, torch.int64)
        ones = torch.ones_like(flat)
        if mask is not None and mask.numel() * num_chosen == flat.numel():
            ones = mask.to(row.device, torch.int64).repeat_interleave(num_chosen)
        elif mask is not None:
            self._count_unmasked(flat.numel() // num_chosen, mask)
        with self._lock:  # `dp` computes micro-batches in several threads
            row.scatter_add_(0, flat, ones)

    def _count_unmasked(self, num_tokens: int, mask: torch.Tensor) -> None:
        """Count tokens that may be padding, and say so once."""
        has_padding = (mask == 0).any().to(self.unmasked.device)
        with self._lock:
            self.unmasked.add_(has_padding * num_tokens)
            is_new = not self._reported
            self._reported.add("unmasked")
        if is_new:
            text = UserText(
                "experts: a layer got {num_tokens:token} of a micro-batch with {num_rows:token},"
                " so the tokens of its experts include padding, if there is any",
                code="experts-count-padding",
                num_tokens=num_tokens,
                num_rows=mask.numel(),
            )
            logger.warning(text)


def count_experts(model: nn.Module, device: torch.device) -> ExpertCounter | None:
    """Let the experts of a model count their tokens. Called before the model is distributed.

    Args:
        device: the device of the counts.

    Returns:
        The counter; None for a model without experts.
    """
    layers = find_expert_layers(model)
    if not layers:
        return None
    width = max(layer.num_experts for layer in layers)
    tokens = torch.zeros(len(layers), width, dtype=torch.int64, device=device)
    for layer, row in zip(layers, tokens.unbind(), strict=True):
        if layer.position is None:
            layer.module.register_forward_hook(_router_hook(row))
        else:
            hook = _experts_hook(row, layer.position, layer.argument)
            layer.module.register_forward_pre_hook(hook, with_kwargs=True)
    unmasked = torch.zeros((), dtype=torch.int64, device=device)
    return ExpertCounter(layers, tokens, torch.zeros((), device=device), unmasked)


def record_aux_loss(part: torch.Tensor) -> None:
    """Add a part of the auxiliary loss, without its coefficient, to the step of this thread's
    micro-batch."""
    batch: _CountedBatch | None = getattr(_thread, "batch", None)
    if batch is not None:
        batch.counter.aux_loss.add_(part.detach().to(batch.counter.aux_loss.device))


@torch.library.custom_op("paceline::count_expert_tokens", mutates_args=("row",))
def _count_tokens(row: torch.Tensor, indices: torch.Tensor) -> None:
    """Count the tokens of a layer if this thread computes the loss of a micro-batch: an operation,
    so that compiled blocks contain it."""
    batch: _CountedBatch | None = getattr(_thread, "batch", None)
    if batch is not None:
        batch.counter.add(row, indices, batch.mask)


@_count_tokens.register_fake
def _(row: torch.Tensor, indices: torch.Tensor) -> None:
    return None


# The hooks are functions, because `dp` copies the model, and its copies have the same counter.
def _experts_hook(row: torch.Tensor, position: int, argument: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, torch.Tensor]) -> None:
        if _may_count(module):
            indices = inputs[argument] if argument in inputs else args[position]
            _count_tokens(row, indices)

    return hook


def _router_hook(row: torch.Tensor) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], result: Any) -> None:
        if _may_count(module):
            _count_tokens(row, result[-1].detach().topk(module.top_k, dim=-1).indices)

    return hook


def _may_count(module: nn.Module) -> bool:
    """Return whether tokens may have to be counted. A compiled block decides when it runs."""
    if not module.training or not torch.is_grad_enabled():
        return False
    return torch.compiler.is_compiling() or getattr(_thread, "batch", None) is not None

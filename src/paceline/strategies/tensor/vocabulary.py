"""Vocabulary parallelism: the token embedding and the output head are split by the rows of the
vocabulary.

After Shoeybi et al., "Megatron-LM" (2019), section 3. The embedding looks up the tokens of its
rows, and the results are summed over the ranks. The loss is computed from the parts of the logits
(:mod:`paceline.models.head.split_vocabulary`); other code that calls the head receives all logits.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.texts import UserText
from paceline.distributed.communicator import Communicator
from paceline.models.blocks import base_model, wrap_forward
from paceline.models.head.split_vocabulary import SplitVocabulary, mark_split
from paceline.models.tensor_plan.style import VOCABULARY, RowRange
from paceline.models.tensor_plan.vocabulary import vocabulary_layers
from paceline.strategies.tensor.ops import (
    gather_rows,
    low_precision,
    sum_gradient,
    sum_parts,
)


def vocabulary_notices(model: nn.Module, plan: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a notice for the embedding and the head of a language model, if a plan does not split
    them."""
    planned = [name for name, style in plan.items() if style not in VOCABULARY]
    notices: list[tuple[str, str]] = []
    if not callable(getattr(base_model(model), "can_generate", None)):
        return notices
    for layer in vocabulary_layers(model, planned):
        if layer.reason is not None:
            text = UserText(
                "tensor: every rank holds `{name}` in full: {reason}",
                code="vocabulary-not-split",
                name=layer.name,
                reason=layer.reason,
            )
            notices.append(("warning", text))
    return notices


def split_embedding(embedding: Any, rows: RowRange, group: Communicator) -> None:
    """Make an embedding with this rank's ``rows`` of the weight return what the full one does."""
    padding = embedding.padding_idx
    if padding is not None:
        is_local = rows.start <= padding < rows.start + rows.length
        embedding.padding_idx = padding - rows.start if is_local else None
    wrap_forward(embedding, partial(_look_up, rows, group))


def split_head(head: nn.Module, rows: RowRange, size: int, group: Communicator) -> None:
    """Make a head with this rank's ``rows`` of the weight gather all logits, except in the loss in
    chunks.

    Args:
        size: number of rows of the full weight.
    """
    forward: Any = head.forward
    mark_split(head, SplitVocabulary(group, rows.start, rows.length, size, forward))
    wrap_forward(head, partial(_gathered_logits, size, group))


def _look_up(
    rows: RowRange, group: Communicator, inner: Any, ids: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    local = ids - rows.start
    is_elsewhere = (local < 0) | (local >= rows.length)
    embedded: torch.Tensor = inner(local.masked_fill(is_elsewhere, 0), *args, **kwargs)
    if embedded.stride(-1) == 0:
        return embedded  # the placeholder of a pipeline stage that does not look up tokens
    return sum_parts(embedded.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), group)


def _gathered_logits(
    size: int, group: Communicator, inner: Any, hidden: torch.Tensor
) -> torch.Tensor:
    if torch.is_grad_enabled():
        hidden = sum_gradient(low_precision(hidden), group)
    return gather_rows(inner(hidden), size, group)

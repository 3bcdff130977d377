"""Attention with all keys and values of the row on each rank, for its own queries."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from paceline.data.context.rows import Piece, RowDivision
from paceline.distributed.communicator import Communicator
from paceline.models.context.blocks import Window
from paceline.models.context.exchange import gather_rows, in_row_order
from paceline.models.context.kernels import cumulative, take, visible_keys
from paceline.models.kernels.fused_attention import (
    SampleEnds,
    States,
    fused_attention,
    usable_kernel,
)


@dataclass(frozen=True)
class LayerAttention:
    """What an attention layer passes with its queries, keys and values.

    Args:
        module: the layer.
        kernel: name of the fused kernel for devices that have it.
        scaling: factor of the scores; None: by the head size.
        window: number of tokens that a token attends to, including itself.
        softcap: bound of the scores.
        sinks: the layer's scores without a key.
    """

    module: torch.nn.Module
    kernel: str
    dropout: float = 0.0
    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


#: Returns the attention [1, queries, heads, head_size] of a piece.
_Attend = Callable[[States, torch.Tensor | None], torch.Tensor]


def gather_attention(
    states: States, division: RowDivision, group: Communicator, layer: LayerAttention
) -> torch.Tensor:
    """Compute the attention of this rank's queries.

    Args:
        states: queries, keys and values [tokens of this rank, heads, head_size].

    Returns:
        [tokens of this rank, heads, head_size of the values].
    """
    query, key, value = states
    sent = torch.cat((key, value), dim=-1)
    row = in_row_order(gather_rows(group, sent.flatten(1), division), division)
    row = row.unflatten(-1, sent.shape[1:])
    keys, values = row.split((key.shape[-1], value.shape[-1]), dim=-1)
    pieces = division.pieces[group.rank]
    if not pieces:
        # The sum of no elements depends on all of them for autograd, so backward returns their
        # gradients to the other ranks as on every rank.
        nothing = query[:0].sum() + row[:0].sum()
        empty: torch.Tensor = query.new_zeros(0, query.shape[1], value.shape[-1]) + nothing
        return empty
    visible = [(_first_key(piece, layer.window), piece.stop) for piece in pieces]
    fused = usable_kernel(layer.kernel, query, value, layer.dropout)
    if fused is not None and layer.sinks is None and (layer.softcap is None or fused.has_softcap):
        return _in_one_call((query, keys, values), pieces, visible, layer)
    attend = _own_attention(layer) if _needs_own(layer) else _sdpa(layer)
    outputs = []
    for piece, (first, stop) in zip(pieces, visible, strict=True):
        queries = slice(piece.offset, piece.offset + piece.length)
        part = query[queries], keys[first:stop], values[first:stop]
        mask = _mask(piece.length, stop - first, layer.window, query)
        outputs.append(attend(part, mask).squeeze(0))
    return torch.cat(outputs)


def _first_key(piece: Piece, window: int | None) -> int:
    """Return the position of the first token to which a token of the piece attends."""
    return piece.segment if window is None else max(piece.segment, piece.start - window + 1)


def _mask(
    num_queries: int, num_keys: int, window: int | None, like: torch.Tensor
) -> torch.Tensor | None:
    """Return a mask that is True where a query attends to a key, or None if there is as much as in
    plain causal attention, or a single query that attends to all keys."""
    is_limited = window is not None and num_keys > window
    if num_queries == 1 or (num_queries == num_keys and not is_limited):
        return None
    left = window - 1 if window is not None else -1
    return visible_keys(num_queries, num_keys, Window(left, 0), like)


def _needs_own(layer: LayerAttention) -> bool:
    return layer.softcap is not None or layer.sinks is not None


def _in_one_call(
    states: States,
    pieces: Sequence[Piece],
    visible: Sequence[tuple[int, int]],
    layer: LayerAttention,
) -> torch.Tensor:
    """Compute all pieces by one call of a fused kernel, which aligns the last query of each with
    its last key."""
    query, keys, values = states
    num_queries = tuple(piece.length for piece in pieces)
    num_keys = tuple(stop - first for first, stop in visible)
    parts = [query, take(keys, visible), take(values, visible)]
    output = fused_attention(
        layer.kernel,
        _as_rows(*parts),
        SampleEnds(cumulative(num_queries, query), max(num_queries)),
        SampleEnds(cumulative(num_keys, query), max(num_keys)),
        layer.scaling,
        layer.dropout,
        layer.window,
        layer.softcap,
    )
    return output.squeeze(0)


def _as_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> States:
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    return query, key, value


def _sdpa(layer: LayerAttention) -> _Attend:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(states: States, mask: torch.Tensor | None) -> torch.Tensor:
        query, key, _ = states
        output: torch.Tensor
        output, _ = sdpa_attention_forward(
            grouped_heads(query.shape[1], key.shape[1]),
            *_as_rows(*states),
            None if mask is None else mask.view(1, 1, *mask.shape),
            dropout=layer.dropout,
            scaling=layer.scaling,
            is_causal=mask is None,
        )
        return output

    return attend


def grouped_heads(heads: int, key_heads: int) -> Any:
    """Return what transformers' attention reads of a layer: how many query heads share a key
    head."""
    return SimpleNamespace(num_key_value_groups=heads // key_heads, is_causal=True)


def _own_attention(layer: LayerAttention) -> _Attend:
    """Return the attention that the model's own code computes without a kernel."""
    compute = _find_eager(layer.module)

    def attend(states: States, mask: torch.Tensor | None) -> torch.Tensor:
        query, key, value = _as_rows(*states)
        hidden = mask
        if hidden is None:
            hidden = visible_keys(query.shape[2], key.shape[2], Window(-1, 0), query)
        added = query.new_zeros(1, 1, *hidden.shape)
        added.masked_fill_(~hidden, torch.finfo(query.dtype).min)
        inputs = {} if layer.softcap is None else {"softcap": layer.softcap}
        scaling = query.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling
        output: torch.Tensor
        output, _ = compute(
            layer.module, query, key, value, added, dropout=layer.dropout, scaling=scaling, **inputs
        )
        return output

    return attend


def _find_eager(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the attention function of the file that defines a layer.

    Raises:
        NotImplementedError: there is none.
    """
    for kind in type(module).__mro__:
        compute = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if callable(compute):
            return compute  # type: ignore[no-any-return]
    raise NotImplementedError(
        f"the file of {type(module).__name__} has no eager_attention_forward, which computes its"
        " attention with soft-capped scores or sinks"
    )

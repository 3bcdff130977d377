"""Parse the styles of a tensor-parallel plan, and compute the rows or columns of each rank. Imports
no torch.

A style is a string, as in the plans of transformers: a name, for some styles a number after a
colon, and ``/transposed`` for a weight that is stored as [inputs, outputs] (transformers' Conv1D).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

COLUMN, ROW = "colwise", "rowwise"
#: Column-parallel with a gathered output; row-parallel with an input that every rank has in full.
COLUMN_GATHERED, ROW_SPLIT = "colwise_gather_output", "rowwise_split_input"
#: A module that is not split and processes a split activation (a norm over each head): its gradient
#: is summed over the ranks.
SUMMED = "replicated_with_grad_allreduce"
#: Several concatenated weights (gate and up; query, key and value with ``:3``), each split.
PACKED_COLUMN, PACKED_ROW = "packed_colwise", "packed_rowwise"
#: Keys or values of the given number of heads (``:1``). With fewer heads than ranks, several ranks
#: hold the same head.
KV_COLUMN = "kv_colwise"
#: Queries of the given number of heads (``:8``), followed by one key head and one value head, which
#: all ranks hold.
MULTI_QUERY_COLUMN = "multi_query_colwise"
#: Experts with split weights: their output, and the gradient of their input, are summed over the
#: ranks. ``:2`` is the number of experts that process a token.
EXPERTS = "moe_tp_experts"
#: A projection that is not split. The last features of its output (``:64``) go to all heads
#: directly, not through a column layer.
LATENT = "mla_kv_a_proj"
#: The token embedding and the output head, whose weights are split by rows, one for each token of
#: the vocabulary. If the ranks do not divide their number, the first ranks hold a row more.
EMBEDDING, HEAD = "vocabulary_embedding", "vocabulary_head"
VOCABULARY = (EMBEDDING, HEAD)

_KINDS = {
    COLUMN: COLUMN,
    ROW: ROW,
    COLUMN_GATHERED: COLUMN_GATHERED,
    ROW_SPLIT: ROW_SPLIT,
    SUMMED: SUMMED,
    PACKED_COLUMN: COLUMN,
    PACKED_ROW: ROW,
    KV_COLUMN: COLUMN,
    MULTI_QUERY_COLUMN: COLUMN,
    EXPERTS: EXPERTS,
    LATENT: LATENT,
    EMBEDDING: EMBEDDING,
    HEAD: HEAD,
}
#: The styles that a plan in the config may have.
STYLES = tuple(style for style in _KINDS if style not in VOCABULARY)
_DEFAULT_NUMBER = {PACKED_COLUMN: 2, PACKED_ROW: 2}


@dataclass(frozen=True)
class Style:
    """A parsed style. ``kind`` is the style without packing, which determines the collectives."""

    name: str
    kind: str
    number: int
    transposed: bool


@dataclass(frozen=True)
class RowRange:
    """A range of ``length`` rows (or columns) of a full weight that begins at ``start``. ``copies``
    ranks hold it, and one of them owns it."""

    start: int
    length: int
    copies: int = 1
    owned: bool = True


@lru_cache(maxsize=1024)
def parse_style(text: str) -> Style:
    """Parse a style. Raises KeyError for an unknown one, ValueError for an invalid number."""
    body, _, suffix = text.partition("/")
    name, _, number = body.partition(":")
    if suffix not in ("", "transposed"):
        raise KeyError(text)
    return Style(
        name,
        _KINDS[name],
        int(number) if number else _DEFAULT_NUMBER.get(name, 1),
        suffix == "transposed",
    )


def kind_of(text: str) -> str:
    return parse_style(text).kind


def cut_axis(text: str, dims: int) -> int | None:
    """Return the dimension along which a weight with ``dims`` dimensions (1 for a bias) is split,
    or None if it is not split."""
    style = parse_style(text)
    if style.kind in (COLUMN, COLUMN_GATHERED):
        return 0 if dims == 1 else dims - 1 if style.transposed else dims - 2
    if style.kind in (ROW, ROW_SPLIT):
        return None if dims == 1 else dims - 2 if style.transposed else dims - 1
    return 0 if style.kind in VOCABULARY else None


def needed_divisor(text: str, length: int) -> int:
    """Return the number that the tensor-parallel size must divide, for a dimension of ``length``; 0
    for key and value layers with a single head."""
    style = parse_style(text)
    if style.name in (PACKED_COLUMN, PACKED_ROW):
        return length // style.number
    if style.name == MULTI_QUERY_COLUMN:
        return style.number
    return 0 if style.name == KV_COLUMN and style.number == 1 else length


def ranges(text: str, length: int, size: int, rank: int) -> tuple[RowRange, ...]:
    """Return the ranges of a dimension of ``length`` that ``rank`` of ``size`` ranks holds, in the
    order of its local weight."""
    style = parse_style(text)
    if style.name in (PACKED_COLUMN, PACKED_ROW):
        block = length // style.number
        share = block // size
        return tuple(
            RowRange(number * block + rank * share, share) for number in range(style.number)
        )
    if style.name == KV_COLUMN and style.number % size:
        head, copies = length // style.number, size // style.number
        return (RowRange(rank // copies * head, head, copies, rank % copies == 0),)
    if style.name == MULTI_QUERY_COLUMN:
        head = length // (style.number + 2)
        share = style.number // size * head
        return RowRange(rank * share, share), RowRange(
            style.number * head, 2 * head, size, rank == 0
        )
    share, rest = divmod(length, size)  # there is a rest only in a vocabulary
    return (RowRange(rank * share + min(rank, rest), share + (rank < rest)),)


def cut_dim(parameter: str, dims: int, plan: Mapping[str, str]) -> int | None:
    """Return the dimension along which a parameter is split, or None if it is not split.

    A column layer splits the rows of its weight, its bias, and lora_B of its adapter. A row layer
    splits the columns of its weight, and lora_A of its adapter.
    """
    return _cut_dim(*_style_of(parameter, plan), dims)


@lru_cache(maxsize=1 << 10)
def _cut_dim(style: str, matrix: str, dims: int) -> int | None:
    if not style:
        return None
    kind = kind_of(style)
    if not matrix:
        return cut_axis(style, dims)
    if dims >= 2 and matrix == "lora_B" and kind in (COLUMN, COLUMN_GATHERED):
        return 0
    if dims >= 2 and matrix == "lora_A" and kind in (ROW, ROW_SPLIT):
        return 1
    return None


def local_ranges(
    parameter: str, shape: tuple[int, ...], plan: Mapping[str, str], size: int
) -> tuple[int, tuple[RowRange, ...]]:
    """Return the dimension along which a parameter is split and the ranges that the first of
    ``size`` ranks holds, or (-1, ()) if it is not split.

    Sizes that are not divisible by the number of ranks are rounded up.
    """
    return _first_ranges(*_style_of(parameter, plan), shape, size)


@lru_cache(maxsize=1 << 12)
def _first_ranges(
    style: str, matrix: str, shape: tuple[int, ...], size: int
) -> tuple[int, tuple[RowRange, ...]]:
    dim = _cut_dim(style, matrix, len(shape))
    if dim is None:
        return -1, ()
    local = ranges(style, shape[dim], size, 0)
    if len(local) == 1 and local[0].copies == 1:
        local = (RowRange(0, math.ceil(shape[dim] / size)),)
    return dim, local


def is_summed(parameter: str, plan: Mapping[str, str]) -> bool:
    """Return whether a parameter is not split although each rank computes only a part of its
    gradient."""
    style = _style_of(parameter, plan)[0]
    return bool(style) and kind_of(style) == SUMMED


def _style_of(parameter: str, plan: Mapping[str, str]) -> tuple[str, str]:
    """Return the style of a parameter or its module, and "lora_A" or "lora_B" for a parameter of an
    adapter; each is an empty string if there is none."""
    if parameter in plan:
        return plan[parameter], ""
    module, _, part = parameter.rpartition(".")
    while module:
        style = plan.get(module)
        if style is not None and kind_of(style) not in (EXPERTS, LATENT):
            return style, part if part in ("lora_A", "lora_B") else ""
        module, _, part = module.rpartition(".")
    return "", ""


def uses_sequence_parallel(
    setting: bool | Literal["auto"], tensor: int, pipeline: int, splits_tokens: bool
) -> bool:
    """Return whether ``parallel.sequence_parallel`` is on.

    Args:
        tensor, pipeline: sizes of the axes of the mesh.
        splits_tokens: whether it is on by default for the model.
    """
    if setting == "auto":
        return tensor > 1 and pipeline == 1 and splits_tokens
    return setting and tensor > 1

"""How tensor parallelism cuts a layer: the styles of a plan, and which rows or columns each rank
gets. No torch here.

A style is text, as in transformers' plans: a kind, for some a number after a colon, and
``/transposed`` for a weight that is stored [inputs, outputs] (transformers' Conv1D).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

COLUMN, ROW = "colwise", "rowwise"
#: Column-parallel with the output put together again; row-parallel with an input that every rank
#: has whole.
COLUMN_GATHERED, ROW_SPLIT = "colwise_gather_output", "rowwise_split_input"
#: A module kept whole that sees the cut part of an activation (a norm over each head): its gradient
#: is a sum over the ranks.
SUMMED = "replicated_with_grad_allreduce"
#: Several weights stored as one, one after the other (gate and up; query, key and value with
#: ``:3``): each is cut.
PACKED_COLUMN, PACKED_ROW = "packed_colwise", "packed_rowwise"
#: Keys or values of a number of heads (``:1``). Where there are fewer heads than ranks, several
#: ranks hold the same head.
KV_COLUMN = "kv_colwise"
#: Queries of a number of heads (``:8``), then one key and one value head that all ranks hold.
MULTI_QUERY_COLUMN = "multi_query_colwise"
#: Experts whose weights are cut: the input's gradient and the output are sums over the ranks.
#: ``:2`` experts take a token.
EXPERTS = "moe_tp_experts"
#: A projection kept whole of whose output the last features (``:64``) go to all heads without
#: passing a column layer.
LATENT = "mla_kv_a_proj"

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
}
STYLES = tuple(_KINDS)
_DEFAULT_NUMBER = {PACKED_COLUMN: 2, PACKED_ROW: 2}


@dataclass(frozen=True)
class Style:
    """A style taken apart. ``kind``: what happens around the layer (the plain style without what it
    says about packing)."""

    name: str
    kind: str
    number: int
    transposed: bool


@dataclass(frozen=True)
class Range:
    """``length`` rows (or columns) of a whole weight from ``start`` on; ``copies`` ranks hold them,
    ``owned`` on one."""

    start: int
    length: int
    copies: int = 1
    owned: bool = True


@lru_cache(maxsize=1024)
def parse_style(text: str) -> Style:
    """Raises KeyError for an unknown style, ValueError for a number that is none."""
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
    """Which dimension of a weight with ``dims`` dimensions (1: a bias) is cut; None where each rank
    keeps it whole."""
    style = parse_style(text)
    if style.kind in (COLUMN, COLUMN_GATHERED):
        return 0 if dims == 1 else dims - 1 if style.transposed else dims - 2
    if style.kind in (ROW, ROW_SPLIT):
        return None if dims == 1 else dims - 2 if style.transposed else dims - 1
    return None


def needed_divisor(text: str, length: int) -> int:
    """The number that the tensor axis must divide, for a dimension of ``length``; 1-head key and
    value layers need nothing."""
    style = parse_style(text)
    if style.name in (PACKED_COLUMN, PACKED_ROW):
        return length // style.number
    if style.name == MULTI_QUERY_COLUMN:
        return style.number
    return 0 if style.name == KV_COLUMN and style.number == 1 else length


def ranges(text: str, length: int, size: int, rank: int) -> tuple[Range, ...]:
    """What ``rank`` of ``size`` holds of a dimension of ``length``, in the order in which it lies
    in its part."""
    style = parse_style(text)
    if style.name in (PACKED_COLUMN, PACKED_ROW):
        block = length // style.number
        share = block // size
        return tuple(Range(number * block + rank * share, share) for number in range(style.number))
    if style.name == KV_COLUMN and style.number % size:
        head, copies = length // style.number, size // style.number
        return (Range(rank // copies * head, head, copies, rank % copies == 0),)
    if style.name == MULTI_QUERY_COLUMN:
        head = length // (style.number + 2)
        share = style.number // size * head
        return Range(rank * share, share), Range(style.number * head, 2 * head, size, rank == 0)
    share = length // size
    return (Range(rank * share, share),)


def cut_dim(parameter: str, dims: int, plan: Mapping[str, str]) -> int | None:
    """Along which dimension a parameter is cut; None where each rank keeps it whole.

    A column layer: rows of the weight and its bias; of LoRA beside it lora_B alone. A row layer:
    columns of the weight; of LoRA lora_A alone.
    """
    _, style, leaf = _owner(parameter, plan)
    if not style:
        return None
    kind = kind_of(style)
    if leaf:  # LoRA's matrices are plain linear layers, one of which is cut
        cut = (
            "lora_B"
            if kind in (COLUMN, COLUMN_GATHERED)
            else "lora_A"
            if kind in (ROW, ROW_SPLIT)
            else ""
        )
        return None if leaf != cut or dims < 2 else 0 if leaf == "lora_B" else 1
    return cut_axis(style, dims)


def held_ranges(
    parameter: str, shape: tuple[int, ...], plan: Mapping[str, str], size: int
) -> tuple[int, tuple[Range, ...]]:
    """(the dimension along which a parameter is cut, what the first of ``size`` ranks holds of it);
    (-1, ()) where it is kept whole. Sizes that do not divide are rounded up."""
    dim = cut_dim(parameter, len(shape), plan)
    if dim is None:
        return -1, ()
    held = ranges(_owner(parameter, plan)[1], shape[dim], size, 0)
    if len(held) == 1 and held[0].copies == 1:
        held = (Range(0, math.ceil(shape[dim] / size)),)
    return dim, held


def is_summed(parameter: str, plan: Mapping[str, str]) -> bool:
    """True where the parameter is kept whole and each tensor rank has a part of its gradient."""
    style = _owner(parameter, plan)[1]
    return bool(style) and kind_of(style) == SUMMED


def _owner(parameter: str, plan: Mapping[str, str]) -> tuple[str, str, str]:
    """(module of the plan that holds a parameter, or the parameter itself where the plan names it;
    its style; "lora_A" or "lora_B" of an adapter); empty where none."""
    if parameter in plan:
        return parameter, plan[parameter], ""
    parts = parameter.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        if module in plan and kind_of(plan[module]) not in (EXPERTS, LATENT):
            return module, plan[module], parts[end] if parts[end] in ("lora_A", "lora_B") else ""
    return "", "", ""

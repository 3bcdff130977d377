"""Divides the heads of attention modules over the ranks of tensor parallelism."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.models.tensor_plan.families import HEAD_ARGUMENTS, HEAD_NUMBERS
from paceline.models.tensor_plan.plan import check_divisible
from paceline.models.tensor_plan.style import (
    COLUMN,
    KV_COLUMN,
    MULTI_QUERY_COLUMN,
    kind_of,
    parse_style,
)

_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads")


def divide_heads(
    plan: Mapping[str, str],
    modules: Mapping[str, nn.Module],
    group: Communicator,
    keeps_numbers: bool,
) -> None:
    """Give each module with column layers its share of the heads.

    Args:
        keeps_numbers: the modules compute with their attributes (for plans of Paceline or of the
            user). Modules with plans of transformers read the numbers from the shapes of their
            weights, except for the number of queries per key.
    """
    column_styles: dict[str, list[str]] = {}
    for name, style in plan.items():
        if kind_of(style) == COLUMN and name in modules:
            column_styles.setdefault(name.rpartition(".")[0], []).append(style)
    for parent, styles in column_styles.items():
        module: Any = modules[parent]
        shared = [style for style in styles if _is_shared(style, group.size)]
        if keeps_numbers:
            numbers = [_number(module, key) for key in _HEADS]
            heads = next((number for number in numbers if number is not None), None)
            _divide_numbers(parent, module, bool(shared), group.size)
            if heads is not None:
                module.register_forward_pre_hook(
                    partial(_split_arguments, heads, group), with_kwargs=True
                )
        groups = _number(module, "num_key_value_groups")
        if shared and groups is not None:
            parsed = parse_style(shared[0])
            key_heads = parsed.number if parsed.name == KV_COLUMN else 1
            module.num_key_value_groups = groups * key_heads // group.size


def _divide_numbers(parent: str, module: Any, is_shared: bool, size: int) -> None:
    for key in HEAD_NUMBERS:
        number = _number(module, key)
        if number is None:
            continue
        if is_shared and "kv" in key.replace("key_value", "kv"):
            setattr(module, key, 1)
            continue
        check_divisible({f"{parent}.{key}".lstrip("."): number}, size)
        setattr(module, key, number // size)


def _is_shared(style: str, size: int) -> bool:
    """Return whether several ranks hold the same keys and values."""
    parsed = parse_style(style)
    return parsed.name == MULTI_QUERY_COLUMN or (
        parsed.name == KV_COLUMN and parsed.number % size != 0
    )


def _number(module: Any, key: str) -> int | None:
    value = getattr(module, key, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _split_arguments(
    heads: int, group: Communicator, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Reduce keyword arguments that the model computes for all heads (ALiBi) to this rank's
    heads."""
    local = {
        key: _local_heads(kwargs[key], heads, group)
        for key in HEAD_ARGUMENTS
        if isinstance(kwargs.get(key), torch.Tensor)
    }
    return args, {**kwargs, **local}


def _local_heads(tensor: torch.Tensor, heads: int, group: Communicator) -> torch.Tensor:
    share = heads // group.size
    if tensor.dim() == 4 and tensor.shape[1] == heads:
        return tensor.narrow(1, group.rank * share, share)
    if tensor.dim() == 3 and tensor.shape[0] % heads == 0:  # [rows × heads, …], or [heads, …]
        by_head = tensor.view(tensor.shape[0] // heads, heads, *tensor.shape[1:])
        return by_head.narrow(1, group.rank * share, share).flatten(0, 1)
    return tensor

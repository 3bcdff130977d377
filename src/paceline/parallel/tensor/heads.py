"""Attention modules that compute with a number of heads: under tensor parallelism each rank has a
share of them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.distributed.communicator import Communicator
from paceline.models.tensor_plan.families import HEAD_ARGUMENTS, HEAD_NUMBERS
from paceline.models.tensor_plan.plan import refuse_sizes
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
        keeps_numbers: the modules compute with their attributes (of a plan of ours or of the
            user's). Modules of transformers' own plans take the numbers from the shapes of their
            weights, apart from the queries for each key.
    """
    for parent, styles in _columns(plan, modules).items():
        module: Any = modules[parent]
        shared = [style for style in styles if _is_shared(style, group.size)]
        if keeps_numbers:
            heads = next(
                (
                    number
                    for number in (_number(module, key) for key in _HEADS)
                    if number is not None
                ),
                None,
            )
            _divide_numbers(parent, module, bool(shared), group.size)
            if heads is not None:
                module.register_forward_pre_hook(
                    partial(_cut_arguments, heads, group), with_kwargs=True
                )
        groups = _number(module, "num_key_value_groups")
        if shared and groups is not None:
            one = parse_style(shared[0])
            key_heads = one.number if one.name == KV_COLUMN else 1
            module.num_key_value_groups = groups * key_heads // group.size


def _columns(plan: Mapping[str, str], modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for name, style in plan.items():
        if kind_of(style) == COLUMN and name in modules:
            result.setdefault(name.rpartition(".")[0], []).append(style)
    return result


def _divide_numbers(parent: str, module: Any, is_shared: bool, size: int) -> None:
    for key in HEAD_NUMBERS:
        number = _number(module, key)
        if number is None:
            continue
        if is_shared and "kv" in key.replace("key_value", "kv"):
            setattr(module, key, 1)
            continue
        refuse_sizes({f"{parent}.{key}".lstrip("."): number}, size)
        setattr(module, key, number // size)


def _is_shared(style: str, size: int) -> bool:
    """Whether several ranks hold the same keys and values."""
    parsed = parse_style(style)
    return parsed.name == MULTI_QUERY_COLUMN or (
        parsed.name == KV_COLUMN and parsed.number % size != 0
    )


def _number(module: Any, key: str) -> int | None:
    value = getattr(module, key, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _cut_arguments(
    heads: int, group: Communicator, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """What the model computes for all heads (ALiBi), as keyword arguments: the part of this rank's
    heads."""
    cut = {
        key: _own_heads(kwargs[key], heads, group)
        for key in HEAD_ARGUMENTS
        if isinstance(kwargs.get(key), torch.Tensor)
    }
    return args, {**kwargs, **cut}


def _own_heads(tensor: torch.Tensor, heads: int, group: Communicator) -> torch.Tensor:
    share = heads // group.size
    if tensor.dim() == 4 and tensor.shape[1] == heads:
        return tensor.narrow(1, group.rank * share, share)
    if tensor.dim() == 3 and tensor.shape[0] % heads == 0:  # [rows × heads, …], or [heads, …]
        by_head = tensor.view(tensor.shape[0] // heads, heads, *tensor.shape[1:])
        return by_head.narrow(1, group.rank * share, share).flatten(0, 1)
    return tensor

"""Trace one of several equal blocks: a language model has dozens, and a trace of all of them takes
seconds."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import TypeVar

from torch import nn

from paceline.models.blocks import find_blocks

T = TypeVar("T")

#: Endings of attributes with the number of the block.
_NUMBERS = ("idx", "index", "id", "number")


@contextmanager
def without_equal_blocks(model: nn.Module) -> Iterator[dict[str, str]]:
    """Within the block, leave out blocks that are equal to an earlier one. Yield the name of the
    block that stands for each block; empty if none are left out."""
    blocks = find_blocks(model)
    stand_ins = _stand_ins(model, blocks)
    parent = blocks[0][0].rpartition(".")[0] if blocks else ""
    container = model.get_submodule(parent)
    kept = set(stand_ins.values())
    if len(kept) == len(blocks) or not isinstance(container, nn.ModuleList):
        yield {}
        return
    children = dict(container._modules)
    try:
        for name, _ in blocks:
            if name not in kept:
                del container._modules[name.rpartition(".")[2]]
        still_found = {name for name, _ in find_blocks(model)} == kept
        yield stand_ins if still_found else {}
    finally:
        container._modules.clear()
        container._modules.update(children)


def for_all_blocks(traced: Mapping[str, T], stand_ins: Mapping[str, str]) -> dict[str, T]:
    """Return what was traced by module name, also for the blocks that were left out.

    Args:
        traced: name of a module → what was traced.
        stand_ins: the result of :func:`without_equal_blocks`.
    """
    if not stand_ins:
        return dict(traced)
    of_block: dict[str, dict[str, T]] = {}
    others: dict[str, T] = {}
    for name, value in traced.items():
        block = next(
            (each for each in set(stand_ins.values()) if name.startswith(f"{each}.")), None
        )
        if block is None:
            others[name] = value
        else:
            of_block.setdefault(block, {})[name.removeprefix(f"{block}.")] = value
    result = {
        f"{block}.{name}": value
        for block, stand_in in stand_ins.items()
        for name, value in of_block.get(stand_in, {}).items()
    }
    return {**result, **others}


def _stand_ins(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> dict[str, str]:
    """Return the first block that equals each block, and before which the same is trained: whether
    backward needs the gradient of its input depends on that. The first and the last block stand for
    themselves."""
    inside = {id(parameter) for _, block in blocks for parameter in block.parameters()}
    is_trained = any(
        parameter.requires_grad for parameter in model.parameters() if id(parameter) not in inside
    )
    first: dict[Hashable, str] = {}
    result = {}
    for index, (name, block) in enumerate(blocks):
        key = (_structure(block, index), is_trained)
        is_end = index in (0, len(blocks) - 1)
        result[name] = name if is_end else first.setdefault(key, name)
        is_trained = is_trained or any(each.requires_grad for each in block.parameters())
    return result


def _structure(block: nn.Module, index: int) -> Hashable:
    """Return a value that is equal for blocks of the same modules, settings and parameters."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str | NoneType)
                and not (value == index and key.endswith(_NUMBERS))
            ),
            tuple(
                (key, tuple(each.shape), each.dtype, each.requires_grad)
                for key, each in module.named_parameters(recurse=False)
            ),
        )
        for name, module in block.named_modules()
    )

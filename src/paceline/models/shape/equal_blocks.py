"""Trace one of several equal blocks: a language model has dozens, and a trace of all of them takes
seconds."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import TypeVar

from torch import nn

from paceline.models.blocks import find_blocks
from paceline.models.shape.record import modules_around

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
    children = list(container)
    try:
        for name, _ in blocks:
            if name not in kept:
                delattr(container, name.rpartition(".")[2])
        still_found = {name for name, _ in find_blocks(model)} == kept
        yield stand_ins if still_found else {}
    finally:
        for name in map(str, range(len(children))):
            if hasattr(container, name):
                delattr(container, name)
        container.extend(children)


def for_all_blocks(values: Mapping[str, T], stand_ins: Mapping[str, str]) -> dict[str, T]:
    """Return the values also for the blocks that were left out, in the order of the whole model.

    Args:
        values: dotted name of a module, parameter or buffer → a value.
        stand_ins: the result of :func:`without_equal_blocks`.
    """
    kept = set(stand_ins.values())
    of_block: dict[str, dict[str, T]] = {}
    before: dict[str, T] = {}
    after: dict[str, T] = {}
    for name, value in values.items():
        modules = (*modules_around(name), name)
        block = next((module for module in modules if module in kept), None)
        if block is not None:
            of_block.setdefault(block, {})[name.removeprefix(block)] = value
        else:
            (after if of_block else before)[name] = value
    blocks = {
        f"{block}{name}": value
        for block, stand_in in stand_ins.items()
        for name, value in of_block.get(stand_in, {}).items()
    }
    return {**before, **blocks, **after}


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

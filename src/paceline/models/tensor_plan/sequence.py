"""Find out whether a model's activations between tensor-parallel layers can be split along the
tokens. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.models.tensor_plan.style import COLUMN, ROW, SUMMED, VOCABULARY, kind_of

if TYPE_CHECKING:
    from torch import nn


def splits_tokens(model: nn.Module, plan: Mapping[str, str]) -> bool:
    """Return whether sequence parallelism is on by default for a model with a tensor-parallel plan:
    a text model of transformers whose blocks allow it and have no dropout, whose masks would differ
    from a run on one rank."""
    from paceline.models.blocks import DROPOUTS, base_model

    base: Any = base_model(model)
    can_generate = getattr(base, "can_generate", None)
    if (
        not plan
        or not callable(can_generate)
        or not can_generate()
        or hasattr(getattr(base, "config", None), "vision_config")
        or blocks_reason(model, plan) is not None
    ):
        return False
    return not any(
        isinstance(module, DROPOUTS) and module.p > 0 and "lora_" not in name
        for _, block in split_blocks(model, _parents(plan))
        for name, module in block.named_modules()
    )


def split_blocks(model: nn.Module, parents: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Return the blocks that contain modules with tensor-parallel layers.

    Args:
        parents: names of these modules.
    """
    from paceline.models.blocks import find_blocks

    return [
        (name, block)
        for name, block in find_blocks(model)
        if any(_inside(parent, name) for parent in parents)
    ]


def blocks_reason(model: nn.Module, plan: Mapping[str, str]) -> str | None:
    """Return why the blocks of a model cannot process parts of the tokens, or None if they can:
    every tensor-parallel layer is in a module of a block that has column layers and row layers, and
    the blocks' other modules are norms, which process each token alone."""
    plan = {name: style for name, style in plan.items() if style not in VOCABULARY}
    parents = _parents(plan)
    blocks = split_blocks(model, parents)
    for parent in parents:
        reason = _parent_reason(parent, plan, blocks)
        if reason is not None:
            return reason
    for name, block in blocks:
        inside = [parent for parent in parents if _inside(parent, name)]
        for path, module in block.named_modules():
            full = f"{name}.{path}" if path else name
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            if any(full == layer or _inside(full, layer) for layer in plan):
                continue
            if "norm" not in type(module).__name__.lower() or any(
                _inside(full, parent) for parent in inside
            ):
                return (
                    f"`{full}` ({type(module).__name__}) is not split, and is not a norm between"
                    " tensor-parallel layers"
                )
    return None


def _parents(plan: Mapping[str, str]) -> list[str]:
    layers = (name for name, style in plan.items() if style not in VOCABULARY)
    return sorted({name.rpartition(".")[0] for name in layers})


def _parent_reason(
    parent: str, plan: Mapping[str, str], blocks: Iterable[tuple[str, nn.Module]]
) -> str | None:
    styles = {kind_of(style) for name, style in plan.items() if name.rpartition(".")[0] == parent}
    if not any(_inside(parent, name) for name, _ in blocks):
        return (
            f"`{parent or 'the model itself'}` contains tensor-parallel layers, but is not a"
            " module inside a block"
        )
    if not {COLUMN, ROW} <= styles <= {COLUMN, ROW, SUMMED}:
        return (
            f"the layers of `{parent}` have the styles {', '.join(sorted(styles))}, not colwise"
            " and rowwise"
        )
    return None


def _inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")

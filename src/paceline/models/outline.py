"""A model's shape, read from the module itself: on a device, on the CPU, or on torch's meta device, where nothing is stored."""

from __future__ import annotations

from torch import nn

from paceline.config.optimizer import optimizer_bytes_per_element
from paceline.config.schema import Config
from paceline.models.blocks import find_blocks
from paceline.models.shape import ModelShape, TensorShape


def outline(model: nn.Module, config: Config) -> ModelShape:
    """The shape of ``model`` as the task built it, before a strategy has placed it."""
    args = config.train_args
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    parameters = []
    for name, one in model.named_parameters(remove_duplicate=False):
        if id(one) in first:
            aliases[name] = first[id(one)]
            continue
        first[id(one)] = name
        parameters.append(TensorShape(name, tuple(one.shape), one.element_size(), one.requires_grad))
    return ModelShape(
        parameters=tuple(parameters),
        buffers=tuple(TensorShape(name, tuple(one.shape), one.element_size()) for name, one in model.named_buffers()),
        optimizer_bytes_per_element=optimizer_bytes_per_element(args),
        low_bytes=2 if args.bf16 or args.fp16 else 0,
        blocks=tuple(name for name, _ in find_blocks(model)),
        aliases=aliases,
    )

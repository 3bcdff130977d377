"""A model's shape, read from the module itself: on a device, on the CPU, or on torch's meta device, where nothing is stored."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.config.optimizer import optimizer_bytes_per_element
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.blocks import find_blocks
from paceline.models.shape import ModelShape, TensorShape
from paceline.models.tensor_plan import find_tensor_plan


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
        tensor_plan=_tensor_plan(model, config),
        aliases=aliases,
        block_output_elements=_block_output(model),
    )


def _tensor_plan(model: nn.Module, config: Config) -> dict[str, str]:
    try:
        return find_tensor_plan(model, config.parallel.tensor_plan)
    except ConfigError:
        return {}  # said where tensor parallelism is asked for


def _block_output(model: nn.Module) -> int:
    """Elements that a block gives out for each token or sample; 0 where not known."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(inner, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    if isinstance(getattr(text, "hidden_size", None), int):
        return int(text.hidden_size)
    for _, block in find_blocks(model):
        linear = [one for one in block.modules() if isinstance(one, nn.Linear)]
        if linear:
            return int(linear[-1].out_features)
    return 0

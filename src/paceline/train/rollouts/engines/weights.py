"""The weights of the model in training as its files would have them, for an engine that holds a
copy of the model: with the names of the files, and with adapters merged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.models.adapters.targets import adapter_layers
from paceline.models.blocks import base_model

#: Parts that peft adds to the name of a weight, and the copy that it keeps of a trained module.
_ADDED = (".base_layer", "modules_to_save.default.", "base_model.model.")
_KEPT_ORIGINAL = "original_module."
#: The name of the block that a weight belongs to.
_BLOCK = re.compile(r"(.*?\.\d+)\.")


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the value of each weight. A weight that has several names is yielded once.
    Each rank must hold all weights (:meth:`~paceline.parallel.strategy.Strategy.gathered`).

    The weights of a block are merged and converted when they are reached, so that at most one block
    is in memory twice. Merging leaves no trace in the weights: they are restored with their bits.
    """
    from transformers.core_model_loading import revert_weight_conversion

    base: Any = base_model(model)
    adapters = {name for name, _ in _adapter_parameters(model)}
    named = [pair for pair in model.named_parameters() if pair[0] not in adapters]
    layers = [layer for _, layer in adapter_layers(model)] if base is not model else []
    for _, pairs in groupby(named, key=lambda pair: _block_of(pair[0])):
        block = list(pairs)
        of_block = {id(value) for _, value in block}
        with _merged([layer for layer in layers if of_block & _changed_by(layer)]):
            values = {_plain_name(name): value.detach() for name, value in block}
            # Merged weights are overwritten by the original ones when the context ends.
            yield from revert_weight_conversion(base, values).items()


def check_mergeable(model: nn.Module) -> None:
    """Check that adapters can be merged into the weights of a model.

    Raises:
        ConfigError: a weight with an adapter is also a weight without one, or it is quantized.
    """
    if base_model(model) is model:
        return
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for name, layer in adapter_layers(model):
        weight = layer.get_base_layer().weight
        shown = _plain_name(name)
        if uses.get(id(weight), 0) > 1:
            raise _not_mergeable(shown, "it shares its weight with another layer")
        if not weight.is_floating_point():
            raise _not_mergeable(shown, "its weight is quantized")


def _not_mergeable(layer: str, reason: str) -> ConfigError:
    return ConfigError(
        "`grpo.engine: vllm` cannot get the weight of {layer} with its adapter: {reason}",
        code="adapter-not-mergeable",
        fix="leave `grpo.engine` out, or remove the layer from `lora.target_modules`",
        layer=layer,
        reason=reason,
    )


def _adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that the files of the merged model do not have."""
    prefix = getattr(model, "prefix", None)  # of peft's names, such as `lora_`
    for name, parameter in model.named_parameters():
        if base_model(model) is not model and (
            _KEPT_ORIGINAL in name or (prefix and prefix in name.rpartition(".base_layer")[2])
        ):
            yield name, parameter


def _changed_by(layer: Any) -> set[int]:
    """Return the ids of the parameters that merging the adapter of a layer changes. Several layers
    may change the parameters of fused experts."""
    return {id(parameter) for parameter in layer.get_base_layer().parameters(recurse=False)}


@contextmanager
def _merged(layers: list[Any]) -> Iterator[None]:
    """Return a context in which the adapters of layers are merged."""
    kept = [
        (parameter, parameter.detach().clone())
        for layer in layers
        for parameter in layer.get_base_layer().parameters(recurse=False)
    ]
    try:
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer in layers:
            layer.unmerge()
        with torch.no_grad():
            for parameter, values in kept:
                parameter.data.copy_(values)


def _plain_name(name: str) -> str:
    for part in _ADDED:
        name = name.replace(part, "")
    return name


def _block_of(name: str) -> str:
    found = _BLOCK.match(name)
    return found.group(1) if found else ""

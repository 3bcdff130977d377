"""Initializations of adapters that depend on the weights of the model.

PiSSA (Meng et al., "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large
Language Models", 2024) and OLoRA (Büyükakyüz, 2024) decompose each weight W into an initial update
B₀A₀ and a rest, which is frozen instead of W. Each adapter layer keeps A₀ and B₀ as buffers, so
checkpoints contain them: a resumed run subtracts the same update instead of decomposing W again,
which would round differently on other processors. The trained adapter is saved as the difference
BA − B₀A₀ from W, an adapter of twice the rank.

LoftQ (Li et al., "LoftQ: LoRA-Fine-Tuning-Aware Quantization", 2023) starts from an update that
approximates what quantization has taken from W. The quantized weights stay as they are.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.models.adapters.targets import adapter_layers, short_names
from paceline.models.weights.load import convert_weights

_ADAPTER = "default"
#: Buffers of an adapter layer: the initial values of lora_A and lora_B. Their names do not contain
#: "lora_": peft would save them.
_DOWN, _UP = "initial_down", "initial_up"


def add_initial_buffers(adapted: nn.Module, config: Config) -> None:
    """Give each adapter layer buffers for the initial values of its matrices.

    Raises:
        ConfigError: an adapter is not on a linear layer, or its rank exceeds the layer's size.
    """
    lora = config.lora
    setting = f"`lora.init_lora_weights: {lora.init_lora_weights}`"
    layers = dict(adapter_layers(adapted))
    others = [name for name, layer in layers.items() if not _is_linear(layer)]
    if others:
        raise ConfigError(
            "{setting} is not supported with adapters on {short_names}: only the weights of linear"
            " layers are decomposed",
            code="dora-without-linear-layers",
            fix="list linear layers in `lora.target_modules`, such as [q_proj, v_proj, o_proj]",
            setting=setting,
            short_names=short_names(others),
        )
    _check_rank(layers.values(), config)
    for layer in layers.values():
        for name, matrix in ((_DOWN, layer.lora_A), (_UP, layer.lora_B)):
            weight = matrix[_ADAPTER].weight
            layer.register_buffer(name, torch.zeros_like(weight, dtype=torch.float32))


def _check_rank(layers: Iterable[Any], config: Config) -> None:
    """Raise ConfigError if the rank exceeds the number of singular values of a linear layer."""
    lora = config.lora
    smallest = min(min(layer.in_features, layer.out_features) for layer in layers)
    if lora.rank > smallest:
        raise ConfigError(
            "`lora.init_lora_weights: {init_lora_weights}` is not supported with `lora.rank:"
            " {rank}`: the smallest adapted weight has {smallest} singular values",
            code="rank-too-large-for-initialization",
            fix="set `lora.rank: {smallest}` or less, or another initialization",
            init_lora_weights=lora.init_lora_weights,
            rank=lora.rank,
            smallest=smallest,
        )


def correct_rounding(adapted: nn.Module, config: Config) -> None:
    """Start the adapters of quantized layers from the rounding errors of their weights, which
    :func:`paceline.models.adapters.quantize.quantize_layers` has decomposed. Adapters of other
    layers are left as they are. Without values, only checks the rank.

    Raises:
        ConfigError: the rank exceeds the size of an adapted layer.
    """
    layers = [layer for _, layer in adapter_layers(adapted) if _is_linear(layer)]
    _check_rank(layers, config)
    for layer in layers:
        error = vars(layer.get_base_layer()).pop("rounding_error", None)
        if error is not None:
            down, up = error
            layer.lora_A[_ADAPTER].weight.data.copy_(down)
            layer.lora_B[_ADAPTER].weight.data.copy_(up / layer.scaling[_ADAPTER])


def _is_linear(layer: Any) -> bool:
    return not hasattr(layer, "parameter_name") and _ADAPTER in getattr(layer, "lora_A", {})


def subtract_adapters(
    adapted: nn.Module,
    config: Config,
    comm: Communicator,
    read: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Initialize the adapters by decomposing the weights, and subtract them from the weights. A
    collective: each rank decomposes a part of the weights, on its device.

    Does nothing for initializations that leave the weights as they are.

    Args:
        read: function that returns a buffer of a checkpoint by its name. It replaces the
            decomposition when a run resumes, so that the frozen weights are the same.
    """
    if not (config.lora.enable and config.lora.subtracts_adapter):
        return
    with torch.no_grad(), uncounted():
        for number, (name, layer) in enumerate(adapter_layers(adapted)):
            if read is not None:
                for buffer in (_DOWN, _UP):
                    getattr(layer, buffer).copy_(read(f"{name}.{buffer}"))
            else:
                if number % comm.size == comm.rank:
                    _decompose(layer, config.lora.init_lora_weights, comm.device)
                _share(layer, comm)
            _subtract(layer)


def _decompose(layer: Any, method: str, device: torch.device) -> None:
    """Set the buffers to the initial matrices, which peft computes."""
    weight, is_transposed = layer.get_base_layer().weight, layer.fan_in_fan_out
    original = weight.data
    # peft subtracts from this copy, and transposes for only one of the methods.
    weight.data = (original.T if is_transposed else original).to(device, torch.float32, copy=True)
    layer.fan_in_fan_out = False
    if method == "olora":
        layer.olora_init(_ADAPTER)
    else:
        layer.pissa_init(_ADAPTER, method)
    weight.data, layer.fan_in_fan_out = original, is_transposed
    getattr(layer, _DOWN).copy_(layer.lora_A[_ADAPTER].weight)
    getattr(layer, _UP).copy_(layer.lora_B[_ADAPTER].weight)


def _share(layer: Any, comm: Communicator) -> None:
    """Copy the buffers from the rank that computed them: they are zero on the others."""
    if comm.size == 1:
        return
    buffers = [getattr(layer, name) for name in (_DOWN, _UP)]
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers]).to(comm.device)
    comm.wait(comm.all_reduce(flat))
    for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))


def _subtract(layer: Any) -> None:
    convert_weights((layer.get_base_layer().weight,))
    down, up, weight = getattr(layer, _DOWN), getattr(layer, _UP), layer.get_base_layer().weight
    layer.lora_A[_ADAPTER].weight.data = down.clone()
    layer.lora_B[_ADAPTER].weight.data = up.clone()
    update = layer.scaling[_ADAPTER] * (up @ down)
    rest = weight.data.float() - (update.T if layer.fan_in_fan_out else update)
    weight.data = rest.to(weight.dtype)


@contextmanager
def portable_state(adapted: Any) -> Iterator[dict[str, torch.Tensor] | None]:
    """Change peft's configuration within the block to the configuration of the adapter as it is
    saved, which loads on the original model. Return the state dict to save; None for the model's
    own.

    With PiSSA and OLoRA, that is the difference BA − B₀A₀ = [B, −B₀][A; A₀]. With VeRA, the random
    matrices are saved too: not every version of torch draws the same.
    """
    settings = adapted.peft_config[_ADAPTER]
    saved = dict(vars(settings))
    state: dict[str, torch.Tensor] | None = None
    layers = dict(adapter_layers(adapted))
    if hasattr(settings, "save_projection"):
        state = dict(adapted.state_dict())
        settings.save_projection = True
        for name in ("vera_A", "vera_B"):
            state[f"base_model.{name}.{_ADAPTER}"] = getattr(adapted.base_model, name)[_ADAPTER]
    elif any(hasattr(layer, _DOWN) for layer in layers.values()):
        state = dict(adapted.state_dict())
        settings.r *= 2
        settings.lora_alpha *= math.sqrt(2) if settings.use_rslora else 2
        for name, layer in layers.items():
            down, up = (f"{name}.{matrix}.{_ADAPTER}.weight" for matrix in ("lora_A", "lora_B"))
            state[down] = torch.cat([state[down], getattr(layer, _DOWN)])
            state[up] = torch.cat([state[up], -getattr(layer, _UP)], dim=1)
    try:
        yield state
    finally:
        vars(settings).update(saved)

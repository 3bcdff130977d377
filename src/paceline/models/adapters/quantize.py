"""Keep the frozen weights of linear layers in 4 or 8 bits (QLoRA: Dettmers et al., "QLoRA:
Efficient Finetuning of Quantized LLMs", 2023), through bitsandbytes."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.torch_compat import has_values, without_fake_tensors
from paceline.models.adapters.targets import linear_modules
from paceline.models.weights import convert_weights

if TYPE_CHECKING:
    from paceline.config.schema.lora import Lora

#: Numbers of a 4-bit weight that share a scale.
_BLOCK_SIZE = 64
#: Scales that share a scale, with double quantization.
_SCALE_BLOCK_SIZE = 256
#: Of the approximate decomposition of a rounding error: vectors in addition to the rank, and
#: iterations (Halko et al., "Finding Structure with Randomness", 2011, algorithm 4.4).
_OVERSAMPLING, _POWER_ITERATIONS = 8, 8
#: Inputs of an int8 layer from this size on are multiplied in float16 (Dettmers et al.,
#: "LLM.int8()", 2022, section 3.2).
_OUTLIER_THRESHOLD = 6.0


def quantize_layers(model: Any, config: Config) -> None:
    """Replace the linear layers of ``model``, except the output head, by quantized ones, one at a
    time, on the device of their weights. Does nothing without ``lora.quantize``.

    On the meta device, the layers have the shapes of quantized ones. The dtype of the weights is
    the dtype in which the layers compute.

    Raises:
        ConfigError: the model has no such layers.
    """
    lora = config.lora
    if lora.quantize == "none":
        return
    layers = {
        name: module
        for name, module in linear_modules(model).items()
        if isinstance(module, nn.Linear)
    }
    if not layers:
        raise ConfigError(
            f"`lora.quantize: {lora.quantize}` is not supported with `model: {config.model}`: it"
            " has no torch.nn.Linear layers",
            fix="leave `lora.quantize` out",
        )
    for name, linear in layers.items():
        parent, _, leaf = name.rpartition(".")
        layer: Any = _quantized(linear, lora)
        if lora.corrects_rounding and not linear.weight.is_meta:
            layer.rounding_error = _low_rank_error(linear, layer, lora.rank)
        setattr(model.get_submodule(parent), leaf, layer)
    # peft selects its layers by these attributes of transformers' quantized models.
    model.is_loaded_in_8bit = lora.quantize == "int8"
    model.is_loaded_in_4bit = lora.quantize != "int8"


@torch.no_grad()
def _low_rank_error(
    linear: nn.Linear, quantized: nn.Linear, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return matrices A and B whose product BA approximates the rounding error of a weight, by its
    largest singular values (one iteration of Li et al., "LoftQ", 2023, algorithm 1). Every rank
    computes the same, with the same random start."""
    error = (linear.weight.float() - dequantized(quantized).float()).cpu()
    size = min(rank + _OVERSAMPLING, *error.shape)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        left, singular, right = torch.svd_lowrank(error, q=size, niter=_POWER_ITERATIONS)
    root = singular[:rank].sqrt()
    return root[:, None] * right.T[:rank], left[:, :rank] * root


def expert_weights(model: nn.Module) -> list[str]:
    """Return the names of frozen weights of experts that are a single parameter in transformers,
    which :func:`quantize_layers` leaves as they are."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and ".experts." in name and not parameter.requires_grad
    ]


def _quantized(linear: nn.Linear, lora: Lora) -> nn.Linear:
    bnb = _bitsandbytes()
    convert_weights((linear.weight,))
    weight, has_bias = linear.weight.detach(), linear.bias is not None
    sizes = linear.in_features, linear.out_features
    layer: Any
    if lora.quantize == "int8":
        with torch.device("meta"):
            layer = bnb.nn.Linear8bitLt(
                *sizes, bias=has_bias, has_fp16_weights=False, threshold=_OUTLIER_THRESHOLD
            )
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        if weight.is_meta:
            layer.weight.data = torch.empty_like(weight, dtype=torch.int8)
            layer.weight.SCB = torch.empty(linear.out_features, device="meta")
        else:
            layer.weight = layer.weight.to(weight.device)  # quantizes
    else:
        with without_fake_tensors(), torch.device("meta"):
            layer = bnb.nn.Linear4bit(
                *sizes,
                bias=has_bias,
                compute_dtype=weight.dtype,
                compress_statistics=lora.double_quant,
                quant_type=lora.quantize,
                quant_storage=weight.dtype,
            )
        # Not in the layout for inference, which evaluation on a CPU would otherwise switch to.
        layer.support_avx512bf16_for_cpu = False
        packed, layer.quant_state = _pack(weight, lora)
        layer.weight = _parameter_of(packed, layer, weight.dtype, lora)
    if has_bias:
        layer.bias = linear.bias.requires_grad_(False)
    return layer.train(linear.training)  # type: ignore[no-any-return]


def _parameter_of(
    packed: torch.Tensor, layer: Any, storage: torch.dtype, lora: Lora
) -> nn.Parameter:
    """Return the parameter of a layer with 4-bit numbers.

    Args:
        packed: the numbers, viewed in the dtype ``storage``.
    """
    settings = {
        "quant_state": layer.quant_state,
        "blocksize": _BLOCK_SIZE,
        "compress_statistics": lora.double_quant,
        "quant_type": lora.quantize,
        "quant_storage": storage,
        "module": layer,
        "bnb_quantized": True,
    }
    if packed.is_meta or has_values(packed):
        parameter: nn.Parameter = _bitsandbytes().nn.Params4bit(
            packed, requires_grad=False, **settings
        )
        return parameter
    # A fake tensor cannot be of another class. The layer reads only the attributes.
    fake = nn.Parameter(packed, requires_grad=False)
    vars(fake).update(settings)
    return fake


def _pack(weight: torch.Tensor, lora: Lora) -> tuple[torch.Tensor, Any]:
    """Return the 4-bit numbers of a weight, viewed in its dtype, because FSDP shards parameters of
    one dtype, and their scales."""
    functional = _bitsandbytes().functional
    if not has_values(weight):
        return _pack_without_values(weight, lora)
    packed, state = functional.quantize_4bit(
        weight.contiguous(),
        blocksize=_BLOCK_SIZE,
        compress_statistics=lora.double_quant,
        quant_type=lora.quantize,
        quant_storage=weight.dtype,
    )
    return packed, state


def _pack_without_values(weight: torch.Tensor, lora: Lora) -> tuple[torch.Tensor, Any]:
    """Return the shapes of :func:`_pack` for a weight on the meta device or a fake tensor.
    bitsandbytes would cache tables of the meta device, and read values."""
    functional = _bitsandbytes().functional
    num_blocks = math.ceil(weight.numel() / _BLOCK_SIZE)
    empty = partial(torch.empty, device=weight.device, dtype=torch.float32)
    size = math.ceil(weight.numel() / 2 / weight.element_size())
    state = functional.QuantState(
        absmax=empty(num_blocks, dtype=torch.uint8 if lora.double_quant else torch.float32),
        shape=weight.shape,
        code=empty(16),
        blocksize=_BLOCK_SIZE,
        quant_type=lora.quantize,
        dtype=weight.dtype,
    )
    if lora.double_quant:
        state.offset, state.nested = empty(()), True
        state.state2 = functional.QuantState(
            absmax=empty(math.ceil(num_blocks / _SCALE_BLOCK_SIZE)),
            code=empty(256),
            blocksize=_SCALE_BLOCK_SIZE,
            dtype=torch.float32,
        )
    return empty(size, 1, dtype=weight.dtype), state


def _bitsandbytes() -> Any:
    """Return the package, without its warnings: of optional kernels, and that int8 layers cast
    their inputs to float16."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return importlib.import_module("bitsandbytes")


def round_weights(model: Any, config: Config) -> None:
    """Give the linear layers of a model in 16 or 32 bits the values that their quantized weights
    have, in which the adapters were trained. Does nothing without ``lora.quantize``."""
    if config.lora.quantize == "none":
        return
    for linear in linear_modules(model).values():
        if isinstance(linear, nn.Linear):
            linear.weight.data = dequantized(_quantized(linear, config.lora)).to(
                linear.weight.dtype
            )


def dequantized(layer: Any) -> torch.Tensor:
    """Return the weight of a quantized layer as a matrix, in the dtype that it had."""
    bnb = _bitsandbytes()
    if isinstance(layer, bnb.nn.Linear8bitLt):
        return bnb.functional.int8_vectorwise_dequant(layer.weight.data, _int8_scales(layer))  # type: ignore[no-any-return]
    return bnb.functional.dequantize_4bit(layer.weight.data, layer.quant_state)  # type: ignore[no-any-return]


def numbers_per_element(parameter: torch.Tensor) -> int:
    """Return how many numbers an element of a parameter packs: several in a 4-bit weight."""
    is_packed = getattr(parameter, "quant_state", None) is not None
    return 2 * parameter.element_size() if is_packed else 1


def scale_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of the scales of quantized weights. They are attributes of the
    layers, neither parameters nor buffers, so no strategy shards them."""
    for name, module in model.named_modules():
        state, int8_scales = getattr(module, "quant_state", None), _int8_scales(module)
        if state is not None:
            yield f"{name}.weight.absmax", state.absmax
            if state.nested:
                yield f"{name}.weight.nested_absmax", state.state2.absmax
        if int8_scales is not None:
            yield f"{name}.weight.SCB", int8_scales


def _int8_scales(layer: Any) -> torch.Tensor | None:
    """Return the scales of an int8 layer, which its first forward moves from the weight to the
    layer; None for other modules."""
    for owner in (getattr(layer, "weight", None), getattr(layer, "state", None)):
        scales = getattr(owner, "SCB", None)
        if isinstance(scales, torch.Tensor):
            return scales
    return None


def move_scales(model: nn.Module, device: torch.device) -> None:
    """Move the scales of quantized weights, of which ``Module.to`` and FSDP move only the
    numbers."""
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        if state is not None:
            state.to(device)
        weight: Any = getattr(module, "weight", None)
        if isinstance(getattr(weight, "SCB", None), torch.Tensor):
            weight.CB, weight.SCB = weight.data, weight.SCB.to(device)

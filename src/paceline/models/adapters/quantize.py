"""Keep the frozen weights of linear layers in 4 or 8 bits (QLoRA: Dettmers et al., "QLoRA:
Efficient Finetuning of Quantized LLMs", 2023), through bitsandbytes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.log import ignore_import_warnings
from paceline.distributed.torch_compat import has_values, without_fake_tensors
from paceline.models.adapters.quantized_store import WeightTensors, stored_weights
from paceline.models.adapters.targets import linear_modules
from paceline.models.weights.load import final_dtype

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
    layers = _linear_layers(model)
    if not layers:
        raise ConfigError(
            "`lora.quantize: {quantize}` is not supported with `model: {model}`: it has no"
            " torch.nn.Linear layers",
            code="quantize-without-linear-layers",
            fix="leave `lora.quantize` out",
            quantize=lora.quantize,
            model=config.model,
        )
    stored = _stored_weights(model, layers, config)
    for name, linear in layers.items():
        parent, _, leaf = name.rpartition(".")
        dtype = final_dtype(linear.weight)
        tensors = stored.pop(name, None) or _pack(linear.weight.detach().to(dtype), lora)
        layer: Any = _quantized(linear, tensors, dtype, lora)
        if lora.corrects_rounding and not linear.weight.is_meta:
            layer.rounding_error = _low_rank_error(linear, layer, lora.rank)
        setattr(model.get_submodule(parent), leaf, layer)
    # peft selects its layers by these attributes of transformers' quantized models.
    model.is_loaded_in_8bit = lora.quantize == "int8"
    model.is_loaded_in_4bit = lora.quantize != "int8"


def _linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the layers to quantize, by name."""
    return {
        name: module
        for name, module in linear_modules(model).items()
        if isinstance(module, nn.Linear)
    }


def _stored_weights(
    model: Any,
    layers: dict[str, nn.Linear],
    config: Config,
    dtype: torch.dtype | None = None,
) -> dict[str, WeightTensors]:
    """Return the quantized weights of layers that are in the cache, or are stored there now.

    Args:
        dtype: dtype that the weights had when they were quantized; default: the dtype that each
            weight has in training.
    """
    lora = config.lora
    dtypes = {name: dtype or final_dtype(layer.weight) for name, layer in layers.items()}
    settings = [
        *(lora.quantize, lora.double_quant, _BLOCK_SIZE, _SCALE_BLOCK_SIZE),
        sorted((name, str(each)) for name, each in dtypes.items()),
    ]

    def pack(name: str) -> WeightTensors:
        return _pack(layers[name].weight.detach().to(dtypes[name]), lora)

    return stored_weights(model, layers, config, settings, pack)


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


def _quantized(
    linear: nn.Linear, tensors: WeightTensors, dtype: torch.dtype, lora: Lora
) -> nn.Linear:
    """Return the quantized layer that replaces a linear layer.

    Args:
        tensors: what :func:`_pack` returns for its weight.
        dtype: dtype of the weight before, in which the layer computes.
    """
    bnb = _bitsandbytes()
    has_bias = linear.bias is not None
    sizes = linear.in_features, linear.out_features
    layer: Any
    if lora.quantize == "int8":
        with torch.device("meta"):
            layer = bnb.nn.Linear8bitLt(
                *sizes, bias=has_bias, has_fp16_weights=False, threshold=_OUTLIER_THRESHOLD
            )
        numbers = tensors["numbers"]
        layer.weight = bnb.nn.Int8Params(numbers, requires_grad=False, has_fp16_weights=False)
        layer.weight.CB, layer.weight.SCB = layer.weight.data, tensors["scales"]
    else:
        with without_fake_tensors(), torch.device("meta"):
            layer = bnb.nn.Linear4bit(
                *sizes,
                bias=has_bias,
                compute_dtype=dtype,
                compress_statistics=lora.double_quant,
                quant_type=lora.quantize,
                quant_storage=dtype,
            )
        # Not in the layout for inference, which evaluation on a CPU would otherwise switch to.
        layer.support_avx512bf16_for_cpu = False
        layer.quant_state = _state_of(tensors, linear.weight.shape, dtype, lora)
        layer.weight = _parameter_of(tensors["numbers"], layer, dtype, lora)
    if has_bias:
        layer.bias = linear.bias.requires_grad_(False)
    return layer.train(linear.training)  # type: ignore[no-any-return]


def _state_of(tensors: WeightTensors, shape: torch.Size, dtype: torch.dtype, lora: Lora) -> Any:
    """Return the scales of a 4-bit weight in the form of bitsandbytes.

    Args:
        shape: shape of the weight.
        dtype: dtype of the weight before.
    """
    functional = _bitsandbytes().functional
    state = functional.QuantState(
        absmax=tensors["scales"],
        shape=shape,
        code=tensors["table"],
        blocksize=_BLOCK_SIZE,
        quant_type=lora.quantize,
        dtype=dtype,
    )
    if lora.double_quant:
        state.offset, state.nested = tensors["offset"], True
        state.state2 = functional.QuantState(
            absmax=tensors["nested_scales"],
            code=tensors["nested_table"],
            blocksize=_SCALE_BLOCK_SIZE,
            dtype=torch.float32,
        )
    return state


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


@torch.no_grad()
def _pack(weight: torch.Tensor, lora: Lora) -> WeightTensors:
    """Quantize a weight. The result does not depend on the number of threads.

    Returns:
        ``numbers``: 8-bit numbers, or 4-bit ones viewed in the dtype of the weight, because FSDP
        shards parameters of one dtype. ``scales``: scale of each row or block. ``table``: values of
        the 4-bit numbers. With double quantization, ``offset``, ``nested_scales`` and
        ``nested_table`` are what the scales, which are numbers of 8 bits then, were made from.
    """
    if not has_values(weight):
        return _pack_without_values(weight, lora)
    functional = _bitsandbytes().functional
    if lora.quantize == "int8":
        numbers, scales, _ = functional.int8_vectorwise_quant(weight.contiguous().half())
        return {"numbers": numbers, "scales": scales}
    numbers, state = functional.quantize_4bit(
        weight.contiguous(),
        blocksize=_BLOCK_SIZE,
        quant_type=lora.quantize,
        quant_storage=weight.dtype,
    )
    tensors = {"numbers": numbers, "scales": state.absmax, "table": state.code.clone()}
    if lora.double_quant:
        # As bitsandbytes does it, whose offset depends on the number of threads.
        offset = _mean(state.absmax)
        scales, nested = functional.quantize_blockwise(
            state.absmax - offset, blocksize=_SCALE_BLOCK_SIZE
        )
        tensors |= {
            "scales": scales,
            "offset": offset,
            "nested_scales": nested.absmax,
            "nested_table": nested.code,
        }
    return tensors


def _mean(values: torch.Tensor) -> torch.Tensor:
    """Return the mean that one thread computes: several threads add up in another order."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return values.mean()
    finally:
        torch.set_num_threads(num_threads)


def _pack_without_values(weight: torch.Tensor, lora: Lora) -> WeightTensors:
    """Return the shapes of :func:`_pack` for a weight on the meta device or a fake tensor.
    bitsandbytes would cache tables of the meta device, and read values."""
    empty = partial(torch.empty, device=weight.device, dtype=torch.float32)
    if lora.quantize == "int8":
        numbers = torch.empty_like(weight, dtype=torch.int8)
        return {"numbers": numbers, "scales": empty(weight.shape[0])}
    num_blocks = math.ceil(weight.numel() / _BLOCK_SIZE)
    tensors = {
        "numbers": empty(
            math.ceil(weight.numel() / 2 / weight.element_size()), 1, dtype=weight.dtype
        ),
        "scales": empty(num_blocks, dtype=torch.uint8 if lora.double_quant else torch.float32),
        "table": empty(16),
    }
    if lora.double_quant:
        tensors |= {
            "offset": empty(()),
            "nested_scales": empty(math.ceil(num_blocks / _SCALE_BLOCK_SIZE)),
            "nested_table": empty(256),
        }
    return tensors


def _bitsandbytes() -> Any:
    """Return the package, without its warnings: of optional kernels, and that int8 layers cast
    their inputs to float16."""
    ignore_import_warnings()
    return importlib.import_module("bitsandbytes")


def round_weights(model: Any, config: Config) -> None:
    """Give the linear layers of a model in 16 or 32 bits the values that their quantized weights
    have, in which the adapters were trained. Does nothing without ``lora.quantize``."""
    if config.lora.quantize == "none":
        return
    layers = _linear_layers(model)
    dtype: torch.dtype = getattr(torch, config.train_args.mixed_dtype or "float32")
    stored = _stored_weights(model, layers, config, dtype)
    for name, linear in layers.items():
        weight = linear.weight
        tensors = stored.pop(name, None) or _pack(weight.detach().to(dtype), config.lora)
        rounded = dequantized(_quantized(linear, tensors, dtype, config.lora))
        weight.data = rounded.to(weight.dtype)


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
    # `layer.weight` of an adapter is its base layer's.
    own_weight = dict(layer.named_parameters(recurse=False)).get("weight")
    for owner in (own_weight, getattr(layer, "state", None)):
        scales = getattr(owner, "SCB", None)
        if isinstance(scales, torch.Tensor):
            return scales
    return None


def move_scales(model: nn.Module, device: torch.device) -> None:
    """Move the scales of quantized weights: ``Module.to`` and FSDP move only the numbers."""
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        if state is not None:
            state.to(device)
        weight: Any = getattr(module, "weight", None)
        if isinstance(getattr(weight, "SCB", None), torch.Tensor):
            weight.CB, weight.SCB = weight.data, weight.SCB.to(device)

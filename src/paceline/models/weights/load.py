"""Load pretrained weights so that the ranks of a host share them.

Safetensors files are mapped into memory. A weight whose stored dtype is the requested one is used
in place: its pages are in the page cache, once per host, however many ranks map them. A rank that
writes to a mapped page gets a private copy of it; the file never changes.

A strategy that keeps only a part of the weights on each rank loads them in
:func:`deferred_conversion`. Weights then stay in the files' dtype, and :func:`convert_weights`
copies them in float32 once it is known which of them the rank needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.distributed.environment import from_environment
from paceline.models.blocks import find_blocks
from paceline.models.weights.converted import converted_copy
from paceline.models.weights.dequantize import (
    LOW_DTYPES,
    find_release,
    read_model,
    read_weights,
    safetensors_files,
    set_source,
    without_quantization,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Attributes of parameters: whether it was read from the model's files; dtype to convert it to.
_FROM_FILES, _DTYPE = "paceline_from_files", "paceline_dtype"

_defers: ContextVar[bool] = ContextVar("defers", default=False)


# -- load
@contextmanager
def deferred_conversion() -> Iterator[None]:
    """Within the block, :func:`load_pretrained` leaves weights that become float32 in the dtype of
    their files."""
    token = _defers.set(True)
    try:
        yield
    finally:
        _defers.reset(token)


def load_pretrained(auto_class: Any, name: str, *, shares: bool = False, **options: Any) -> Any:
    """Return ``auto_class.from_pretrained(name, **options)``, in which parameters are marked that
    were read from the model's files. Quantized weights are dequantized.

    In :func:`deferred_conversion`, they may have the dtype of their files.

    Args:
        shares: whether the ranks of a host share converted weights, because they are not trained.
            They share dequantized ones in any case.
    """
    release = find_release(name)
    dtype = options.get("dtype")
    is_causal = auto_class.__name__ == "AutoModelForCausalLM"
    defers = _defers.get() and dtype == torch.float32 and is_causal
    if release is not None and "config" in options:
        options["config"] = without_quantization(options["config"])
    source: str | Path = name
    shares = shares and not defers if release is None else isinstance(dtype, torch.dtype)
    if shares and from_environment().local_world_size > 1:
        is_exact = defers and release is not None and release.is_mxfp4
        stored = {**options, "dtype": torch.bfloat16} if is_exact else options
        source = converted_copy(auto_class, name, **stored) or name
    model = None
    if defers:
        model, info = _load_unconverted(str(source), **options)
    if model is None:
        model, info = read_model(auto_class, str(source), **options)
    if source != name:
        set_source(model, name, options.get("trust_remote_code", False))
    absent = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
    for key, parameter in model.named_parameters():
        if key not in absent:
            setattr(parameter, _FROM_FILES, True)
    return model


def is_from_files(parameter: torch.Tensor) -> bool:
    """Return whether the values of a parameter were read from the model's files."""
    return getattr(parameter, _FROM_FILES, False)


def absent_weights(model: nn.Module) -> list[str]:
    """Return the parameters that keep the random values with which transformers fills what a
    model's files do not have."""
    return [name for name, value in model.named_parameters() if not is_from_files(value)]


def unmark_files(parameter: torch.Tensor) -> None:
    """Record that a parameter no longer has the values of the model's files."""
    setattr(parameter, _FROM_FILES, False)


def _load_unconverted(name: str, config: PretrainedConfig, **options: Any) -> tuple[Any, Any]:
    """Load a model whose parameters have the dtype of its files and are marked with the dtype
    of ``options``. Return (None, None) if transformers would do more than convert and rename
    them."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    trust_remote_code = options.pop("trust_remote_code", False)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    release = find_release(name)
    if (
        not safetensors_files(name)
        or getattr(model_class, "config_class", None) is not type(config)
        or (getattr(config, "auto_map", None) and release is None)
        or getattr(config, "transformers_weights", None)
        or getattr(type(config), "extra_files", ())
    ):
        return None, None
    requested: set[torch.dtype | None] = set()
    model, info = read_weights(
        model_class, name, config, release, requested, converts=False, **options
    )
    dtype = options["dtype"]
    if requested - {dtype}:
        return None, None  # some weights keep another dtype
    set_source(model, name, trust_remote_code)
    absent = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
    for key, parameter in model.named_parameters():
        if key not in absent and parameter.dtype in LOW_DTYPES:
            setattr(parameter, _DTYPE, dtype)
    stored = model.state_dict().keys() - absent
    for key, buffer in model.named_buffers():
        if key in stored and buffer.dtype in LOW_DTYPES:
            buffer.data = buffer.data.to(dtype)
    return model, info


# -- convert
def final_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype that a parameter has in training."""
    dtype: torch.dtype = getattr(parameter, _DTYPE, parameter.dtype)
    return dtype


def convert_weights(parameters: Iterable[torch.Tensor], device: torch.device | None = None) -> None:
    """Convert weights whose conversion was deferred, in place.

    Args:
        device: device to which they are moved before they are converted.
    """
    for parameter in parameters:
        if hasattr(parameter, _DTYPE):
            parameter.data = parameter.data.to(device).to(final_dtype(parameter))
            delattr(parameter, _DTYPE)


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model to ``device``, tensor by tensor, and convert its weights there."""
    convert_weights(model.parameters(), device)
    model.to(device)


@contextmanager
def converted_weights(model: nn.Module) -> Iterator[None]:
    """Within the ``with`` block, forward passes see converted weights. The weights of a block of
    the model are converted while it runs, so that they are not in memory all at once."""
    deferred = {
        parameter: parameter.data for parameter in model.parameters() if hasattr(parameter, _DTYPE)
    }
    if not deferred:
        yield
        return
    blocks = [block for _, block in find_blocks(model)]
    inside = {module for block in blocks for module in block.modules()}
    outside = {
        parameter
        for module in model.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    }

    def convert(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in deferred:
                parameter.data = deferred[parameter].to(final_dtype(parameter))

    def restore(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in deferred:
                parameter.data = deferred[parameter]

    with ExitStack() as stack:
        stack.callback(restore, deferred)
        convert(outside)
        for block in blocks:
            local = [parameter for parameter in block.parameters() if parameter not in outside]
            before = block.register_forward_pre_hook(lambda *_, local=local: convert(local))
            after = block.register_forward_hook(
                lambda *_, local=local: restore(local), always_call=True
            )
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield

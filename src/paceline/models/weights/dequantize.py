"""Read the weights of models, also quantized ones, which are dequantized one by one.

Transformers loads them as the weights of an ordinary model. Its own ``dequantize=True`` leaves
operations in the model that quantize the weights again when the model is saved, keeps layers that
are not quantized in the dtype of the files, and rejects weights whose last block is smaller.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import ConfigError
from paceline.models.hub_configs import download_config, find_file, read_raw_config
from paceline.models.transformers_compat import load_generation_config
from paceline.models.weights.release import KEYS, QuantizedRelease, read_entries, release_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Stored dtypes whose conversion can wait, because float32 represents their values exactly.
LOW_DTYPES = (torch.float16, torch.bfloat16)
#: Class of transformers that loads a model → its table of classes, by the class of the config.
_MAPPINGS = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
#: Values of the 4-bit numbers 0 to 7 of MXFP4 (E2M1). Numbers 8 to 15 are their negatives.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: A scale stored as a byte is a power of two with this bias (E8M0).
_SCALE_BIAS = 127


class LazyWeight:
    """A weight in a model's files, with the two operations that transformers applies to the slices
    of a file.

    Args:
        read: function that returns the weight.
        requested: dtypes to which transformers wants to convert weights, which :meth:`to` adds to.
        converts: whether :meth:`to` converts values in 16 bits.
    """

    def __init__(
        self,
        read: Callable[[], torch.Tensor],
        requested: set[torch.dtype | None],
        converts: bool = True,
    ) -> None:
        self._read, self._requested, self._converts = read, requested, converts

    def __getitem__(self, _: object) -> LazyWeight:
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._read()
        self._requested.add(dtype)
        keeps = tensor.dtype in LOW_DTYPES and not self._converts
        return tensor if keeps else tensor.to(dtype=dtype)


def find_release(name: str) -> QuantizedRelease | None:
    """Return what :func:`release_of` does, after the config.json of a hub ID was downloaded."""
    if read_raw_config(name) is None:
        download_config(name)
    return release_of(name)


def without_quantization(config: Any) -> Any:
    """Return a copy of transformers' config that describes the dequantized model."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        for key in KEYS:
            if hasattr(part, key):
                delattr(part, key)
    return plain


def read_model(auto_class: Any, name: str, **options: Any) -> tuple[Any, Any]:
    """Return ``auto_class.from_pretrained(name, output_loading_info=True, **options)``, with
    dequantized weights.

    Raises:
        ConfigError: quantized weights cannot be dequantized.
    """
    from transformers import AutoConfig

    release = find_release(name)
    if release is None:
        return auto_class.from_pretrained(name, output_loading_info=True, **options)  # type: ignore[no-any-return]
    config = options.pop("config", None)
    trust_remote_code = options.pop("trust_remote_code", False)
    dtype = options.pop("dtype", "auto")
    if config is None:
        config, options = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **options)
    if dtype == "auto":
        dtype = getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    config = without_quantization(config)
    model, info = read_weights(
        _class_of(auto_class, config, release), name, config, release, set(), dtype=dtype, **options
    )
    set_source(model, name, trust_remote_code)
    return model, info


def _class_of(auto_class: Any, config: PretrainedConfig, release: QuantizedRelease) -> Any:
    """Return the class of transformers that implements a model."""
    import transformers

    mapping = getattr(transformers, _MAPPINGS[auto_class.__name__])
    found = mapping.get(type(config), None)
    if found is None or isinstance(found, tuple):
        raise ConfigError(
            "`model: {model}`: its weights are stored in {format}, and Paceline dequantizes only"
            " models that are part of transformers",
            code="quantized-release-with-own-code",
            fix="leave `trust_remote_code` out if transformers has the architecture, or give the"
            " unquantized release",
            model=release.model,
            format=release.format,
        )
    return found


def read_weights(
    model_class: Any,
    name: str,
    config: PretrainedConfig,
    release: QuantizedRelease | None,
    requested: set[torch.dtype | None],
    converts: bool = True,
    **options: Any,
) -> tuple[Any, Any]:
    """Return a model with the weights of the safetensors files of ``name``, and information about
    the loading.

    Args:
        requested: set to which the dtypes are added that transformers converts weights to.
        converts: whether weights in 16 bits are converted.
        options: options of ``from_pretrained``.

    Raises:
        ConfigError: there are no safetensors files, or quantized weights have no scales.
    """
    from safetensors import safe_open

    files = safetensors_files(name)
    if not files:
        raise ConfigError(
            "`model: {model}` has no safetensors files, so its quantized weights cannot be read",
            code="quantized-release-without-safetensors",
            fix="give a release with *.safetensors",
            model=name,
        )
    with ExitStack() as stack:
        readers: dict[str, Callable[[], torch.Tensor]] = {}
        for file in files:
            reader = stack.enter_context(safe_open(str(file), framework="pt"))
            for key in reader.keys():  # noqa: SIM118  (not a dictionary)
                readers[key] = partial(reader.get_slice(key).__getitem__, ...)
        if release is not None:
            readers = _dequantizing(release, readers, files)
        weights = {key: LazyWeight(read, requested, converts) for key, read in readers.items()}
        return model_class.from_pretrained(  # type: ignore[no-any-return]
            None, config=config, state_dict=weights, output_loading_info=True, **options
        )


def _dequantizing(
    release: QuantizedRelease, readers: dict[str, Callable[[], torch.Tensor]], files: list[Path]
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions that read dequantized weights, by the names of the weights."""
    result: dict[str, Callable[[], torch.Tensor]] = {}
    for name, (numbers, scales) in release.stored_weights(read_entries(files)).items():
        read = readers[numbers]
        if scales is not None:
            read = partial(read_quantized, release, numbers, read, readers[scales])
        result[name] = read
    return result


def read_quantized(
    release: QuantizedRelease,
    name: str,
    numbers: Callable[[], torch.Tensor],
    scales: Callable[[], torch.Tensor],
) -> torch.Tensor:
    if release.is_mxfp4:
        return dequantize_mxfp4(numbers(), scales())
    try:
        return dequantize_fp8(numbers(), scales(), release.block)
    except ValueError as error:
        raise ConfigError(
            "`model: {model}`: the weight {weight} cannot be dequantized: {reason}",
            code="quantized-weight-unreadable",
            fix="copy the model's files again, or give its unquantized release",
            model=release.model,
            weight=name,
            reason=str(error),
        ) from error


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return weights of experts in bfloat16, which represents them exactly.

    Args:
        blocks: pairs of 4-bit numbers, [experts, outputs, blocks, 16].
        scales: exponents of the blocks, [experts, outputs, blocks].

    Returns:
        Weights with the shape [experts, inputs, outputs].
    """
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)  # the low bits come first
    powers = torch.tensor([2.0 ** (exponent - _SCALE_BIAS) for exponent in range(256)])
    num_experts, num_outputs, num_blocks, num_bytes = blocks.shape
    num_inputs = num_blocks * num_bytes * 2
    weights = torch.empty(num_experts, num_inputs, num_outputs, dtype=torch.bfloat16)
    for expert in range(num_experts):  # indices take several times the memory of the numbers
        numbers = pairs[blocks[expert].int()]
        numbers *= powers[scales[expert].int()][:, :, None, None]
        weights[expert] = numbers.reshape(num_outputs, num_inputs).T
    return weights


def dequantize_fp8(
    numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return a weight in float32.

    Args:
        numbers: 8-bit numbers, [..., rows, columns].
        scales: factor of the weight, or factors of its rows or blocks.
        block: rows and columns of a block; the last blocks may have fewer. None if all
            blocks are equal.

    Raises:
        ValueError: the scales do not fit the weight.
    """
    if scales.dtype == torch.uint8:
        scales = (2.0 ** (torch.arange(256) - _SCALE_BIAS))[scales.int()]
    weight, scales = numbers.float(), scales.float()
    if scales.numel() == 1 or weight.dim() < 2:
        return weight * scales.reshape(-1 if scales.numel() > 1 else ())
    if scales.dim() == 1:
        scales = scales.unsqueeze(-1)
    for dim, configured in zip((-2, -1), block or (0, 0), strict=True):
        size, num_blocks = weight.shape[dim], scales.shape[dim]
        length = configured
        if not configured or math.ceil(size / configured) != num_blocks:
            length, remainder = divmod(size, num_blocks)
            if remainder:
                raise ValueError(
                    f"{list(weight.shape)} numbers do not divide into {list(scales.shape)} blocks"
                )
        scales = scales.repeat_interleave(length, dim).narrow(dim, 0, size)
    return weight * scales


def safetensors_files(name: str) -> list[Path]:
    """Return the safetensors files of a model's folder or hub ID, which are downloaded if
    necessary. The list is empty if it has none."""
    single = find_file(name, "model.safetensors")
    if single is not None:
        return [single]
    index = find_file(name, "model.safetensors.index.json")
    if index is None:
        return []
    from transformers.utils.hub import get_checkpoint_shard_files

    return [Path(file) for file in get_checkpoint_shard_files(name, str(index))[0]]


def set_source(model: Any, name: str, trust_remote_code: bool) -> None:
    """Set what transformers takes from a model's folder besides its config and its weights."""
    model.config.name_or_path = model.name_or_path = name
    if model.can_generate():
        load_generation_config(model, name, trust_remote_code)

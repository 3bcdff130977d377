"""Releases whose files store quantized weights, which Paceline dequantizes: the formats, the
tensors that belong together, and the sizes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import human_bytes
from paceline.core.texts import UserText
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import config_folder, read_raw_config
from paceline.models.json_config import JsonObject
from paceline.models.qwen import is_qwen
from paceline.models.weights.stored_files import HeaderEntry, read_header, weight_files

#: Keys of config.json that describe quantized weights.
KEYS = ("quantization_config", "compression_config")
#: Methods of transformers whose weights are 8-bit floating-point numbers with scales.
_FP8_METHODS = ("fp8", "mxfp8")
#: Formats of compressed-tensors that store a weight and its scales as they are.
_PLAIN_FORMATS = ("float-quantized", "naive-quantized")
_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
#: Of a layer's tensors, after the layer's name: the scales of ``weight``, by which its numbers are
#: multiplied.
_LAYER_SCALES = ("scale", "qscale_weight")
#: The end of the name of scales of activations, which are computed in 8 bits at inference only.
_ACTIVATION_SCALES = ("activation_scale", "input_scale", "qscale_act")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StoredWeight(NamedTuple):
    """The names of a weight's tensors in the files. ``scales``: None if it is not quantized."""

    numbers: str
    scales: str | None


@dataclass(frozen=True)
class QuantizedRelease:
    """How the files of a model store its quantized weights.

    Args:
        model: name of the model, for messages.
        format: name of the format, ``MXFP4`` or ``FP8``.
        block: rows and columns of a weight that share a scale; None if the shapes tell.
    """

    model: str
    format: str
    block: tuple[int, int] | None = None

    @property
    def is_mxfp4(self) -> bool:
        """Whether the numbers have 4 bits. Dequantized, they are exact in bfloat16."""
        return self.format == "MXFP4"

    def stored_weights(self, entries: Mapping[str, HeaderEntry]) -> dict[str, StoredWeight]:
        """Return the tensors that make up each weight of the model, by the weight's name.

        Args:
            entries: the tensors of all files, by name.

        Raises:
            ConfigError: a quantized weight has no scales.
        """
        weights: dict[str, StoredWeight] = {}
        used: set[str] = set()
        for key, entry in entries.items():
            scales = self._scales_of(key, entry, entries)
            if scales is not None:
                used.add(scales)
            name = key.removesuffix("_blocks") if self.is_mxfp4 and scales else key
            weights[name] = StoredWeight(key, scales)
        return {
            name: weight
            for name, weight in weights.items()
            if weight.numbers not in used and not name.endswith(_ACTIVATION_SCALES)
        }

    def _scales_of(
        self, key: str, entry: HeaderEntry, entries: Mapping[str, HeaderEntry]
    ) -> str | None:
        """Return the name of the scales of a tensor, or None if it is not quantized."""
        if self.is_mxfp4:
            is_quantized = key.endswith("_blocks")
            candidates = [f"{key.removesuffix('_blocks')}_scales"]
        else:
            layer = key.removesuffix("weight")
            candidates = [f"{key}_scale_inv", f"{key}_scale"]
            candidates += [layer + name for name in _LAYER_SCALES if layer != key]
            is_quantized = entry["dtype"] in _FP8_DTYPES
        if not is_quantized:
            return None
        found = next((name for name in candidates if name in entries), None)
        if found is None:
            raise ConfigError(
                "`model: {model}`: the weight {weight} is stored in {format}, but the files have no"
                " scales for it",
                code="quantized-weight-without-scales",
                allowed="a tensor with one of the names {names}",
                fix="copy all files of the model again, or give its unquantized release",
                model=self.model,
                weight=key,
                format=self.format,
                names=", ".join(candidates),
            )
        return found

    def num_elements(self, entries: Mapping[str, HeaderEntry]) -> int:
        """Return how many numbers the dequantized weights have."""
        total = 0
        for numbers, scales in self.stored_weights(entries).values():
            pairs = self.is_mxfp4 and scales is not None  # two numbers per byte
            total += math.prod(entries[numbers]["shape"]) * (2 if pairs else 1)
        return total


def release_of(name: str) -> QuantizedRelease | None:
    """Return how a model's files store quantized weights, or None if its config.json does not say
    that they are quantized, or has not been downloaded.

    Raises:
        ConfigError: Paceline does not dequantize the format.
    """
    stored = read_raw_config(name) or {}
    content = _quantization(stored)
    if content is None or is_qwen(stored):  # the conversion of such a model checks its weights
        return None
    method = content.get("quant_method")
    if method == "mxfp4":
        return QuantizedRelease(name, "MXFP4")
    if method in _FP8_METHODS:
        block = content.get("weight_block_size")
        return QuantizedRelease(name, "FP8", _sizes(block))
    if method == "compressed-tensors" and (reason := _compression_limit(content)) is None:
        return QuantizedRelease(name, "FP8")
    if method == "compressed-tensors":
        method = f"compressed-tensors ({reason})"
    elif method is None or method == "bitsandbytes":
        is_bitsandbytes = any(key.startswith("load_in_") for key in content)
        method = "bitsandbytes" if is_bitsandbytes or method else "an unnamed format"
    raise ConfigError(
        "`model: {model}`: its weights are stored in the format {method}, from which Paceline"
        " cannot recover weights to train",
        code="unsupported-quantized-release",
        allowed="weights in 16 or 32 bits, or releases in MXFP4 or FP8, which are dequantized",
        fix="give the unquantized release of the model; `lora.quantize` quantizes its frozen"
        " weights when they are loaded",
        model=name,
        method=method,
    )


def _quantization(content: JsonObject) -> Any:
    """Return the part of a config.json that describes quantized weights, or None."""
    for fields in (content, content.get("text_config")):
        if isinstance(fields, Mapping):
            for key in KEYS:
                if isinstance(found := fields.get(key), Mapping) and found:
                    return found
    return None


def _sizes(block: object) -> tuple[int, int] | None:
    is_pair = isinstance(block, list) and len(block) == 2
    return (int(block[0]), int(block[1])) if is_pair else None  # type: ignore[index]


def _compression_limit(content: Any) -> str | None:
    """Return why the weights of compressed-tensors are not plain 8-bit floating-point numbers with
    scales, or None if they are."""
    groups = content.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = (group.get("weights") or {}) if isinstance(group, Mapping) else {}
        number, bits = weights.get("type"), weights.get("num_bits")
        if (number, bits) != ("float", 8):
            return f"weights of type {number} with {bits} bits"
        if (each := group.get("format")) not in (None, *_PLAIN_FORMATS):
            return f"format {each}"
    if (stored := content.get("format")) not in _PLAIN_FORMATS:
        return f"format {stored}"
    sparsity = (content.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        return f"sparse weights in the format {sparsity}"
    return "transformed weights" if content.get("transform_config") else None


def read_entries(files: list[Path]) -> dict[str, HeaderEntry]:
    """Return the tensors of safetensors files by name.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    return {name: entry for file in files for name, entry in read_header(file)[0].items()}


def check_release(config: Config) -> None:
    """Check before a run starts that quantized weights can be dequantized.

    Raises:
        ConfigError: the format is not supported, or quantized weights have no scales.
    """
    name = resolve_model(config.model)
    if (release := release_of(name)) is not None:
        folder = config_folder(name)
        files = [] if folder is None else weight_files(folder)
        try:
            release.stored_weights(read_entries(files))
        except (OSError, ValueError, TypeError, LookupError):
            return  # reported by the check of the files


def weights_bytes(folder: Path, dtype: str) -> int:
    """Return the size of a model's weights: as its files store them or, if they are quantized, in
    ``dtype`` (such as ``bfloat16``)."""
    files = weight_files(folder)
    release = release_of(str(folder))
    if release is None or not files:
        return sum(file.stat().st_size for file in files)
    return release.num_elements(read_entries(files)) * _BYTES[dtype]


def release_notice(config: Config) -> UserText | None:
    """Return what a user must know about the memory of dequantized weights; None if the model's
    files have no quantized weights."""
    name = resolve_model(config.model)
    release = release_of(name)
    if release is None:
        return None
    args = config.train_args
    dtype = (args.mixed_dtype or "float32") if config.lora.enable else args.weight_dtype
    folder = config_folder(name)
    files = [] if folder is None else weight_files(folder)
    if folder is None or not files:
        return UserText(
            "model: the weights are stored in {format} and dequantized to {dtype}",
            code="weights-dequantized-unknown-size",
            format=release.format,
            dtype=dtype,
        )
    return UserText(
        "model: the weights are stored in {format} and dequantized to {dtype}: {size} instead of"
        " {stored_size}",
        code="weights-dequantized",
        format=release.format,
        dtype=dtype,
        size=human_bytes(weights_bytes(folder, dtype)),
        stored_size=human_bytes(sum(file.stat().st_size for file in files)),
    )

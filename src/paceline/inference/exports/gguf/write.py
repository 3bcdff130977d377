"""Write a GGUF file from a model's folder, one tensor at a time."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import RunError
from paceline.core.files import fsync_path
from paceline.core.texts import UserText
from paceline.inference.exports.gguf.architectures import find_architecture
from paceline.inference.exports.gguf.metadata import window_of
from paceline.inference.exports.gguf.model_config import ModelConfig
from paceline.inference.exports.gguf.quantize import encode_tensor
from paceline.inference.exports.gguf.tensor_types import (
    FILE_TYPES,
    TypeChoice,
    choose_types,
    tensor_bytes,
)
from paceline.inference.exports.gguf.tokenizer import read_tokenizer
from paceline.inference.exports.gguf.weights import Weight, stored_weights

if TYPE_CHECKING:
    import gguf

logger = logging.getLogger(__name__)

#: llama.cpp's tool, used for types that the package gguf does not write.
QUANTIZE_TOOL = "llama-quantize"


def write_gguf(model: Path, file: Path, kind: str, name: str) -> None:
    """Write the model in a folder of ``save_pretrained`` to a GGUF file.

    Args:
        kind: one of ``tensor_types.KINDS``.
        name: name of the model in the file.

    Raises:
        ConfigError: the model or its tokenizer is not supported.
        RunError: llama-quantize failed.
    """
    tool = shutil.which(QUANTIZE_TOOL) if kind == "q4_k_m" else None
    if tool is None:
        _write(model, file, kind, name)
    else:
        between = file.with_suffix(".f16")
        try:
            _write(model, between, "f16", name)
            _run_tool(tool, between, file)
        finally:
            between.unlink(missing_ok=True)
    fsync_path(file)


def _run_tool(tool: str, source: Path, target: Path) -> None:
    done = subprocess.run(
        [tool, str(source), str(target), "Q4_K_M"], capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise RunError(
            "{tool} failed with exit code {result}: {reason}",
            code="gguf-quantize-failed",
            fix="remove it from PATH to quantize with the package xllamacpp",
            tool=tool,
            result=done.returncode,
            reason=lines[-1] if lines else "it printed nothing",
        )


def planned_tensors(model: Path, config: ModelConfig) -> list[Weight]:
    """Return the tensors of the file in the order in which they are written. Reads no values.

    Raises:
        ConfigError: the model is not supported.
    """
    architecture = find_architecture(config)
    return list(architecture.weights(config, stored_weights(model)))


def choose(kind: str, weights: list[Weight], config: ModelConfig) -> TypeChoice:
    """Choose the types of tensors."""
    shapes = {weight.name: weight.shape for weight in weights}
    return choose_types(kind, shapes, config.num_layers, config.num_experts)


def _write(model: Path, file: Path, kind: str, name: str) -> None:
    import gguf

    config = ModelConfig.read(str(model))
    architecture = find_architecture(config)
    weights = planned_tensors(model, config)
    embedding = next(weight for weight in weights if weight.name == "token_embd.weight")
    tokenizer = read_tokenizer(model, embedding.shape[0])
    choice = choose(kind, weights, config)
    _report(config, choice, kind)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[architecture.name]])
    try:
        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(FILE_TYPES[kind])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        architecture.add_metadata(writer, config)
        tokenizer.add_to(writer)
        _write_tensors(writer, weights, choice)
    finally:
        writer.close()


def _write_tensors(writer: gguf.GGUFWriter, weights: list[Weight], choice: TypeChoice) -> None:
    import numpy as np

    for weight in weights:
        kind = choice.types[weight.name]
        dtype = {"F32": np.float32, "F16": np.float16}.get(kind.name)
        # GGUFWriter derives the shape from the number of bytes only for uint8.
        writer.add_tensor_info(
            weight.name,
            weight.shape,
            np.dtype(dtype or np.int8),
            tensor_bytes(weight.shape, kind),
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for weight in weights:
        values = encode_tensor(weight.load(), choice.types[weight.name])
        try:
            writer.write_tensor_data(values)
        except OSError as error:
            if error.errno is not None:
                raise
            # numpy only says that it has written fewer numbers.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def _report(config: ModelConfig, choice: TypeChoice, kind: str) -> None:
    """Log what a file does not have, or has in another form."""
    if config.is_part:
        logger.warning(
            UserText(
                "the GGUF file has the language model only: what reads images is left out",
                code="gguf-language-only",
            )
        )
    if (window := window_of(config)) is not None:
        logger.warning(
            UserText(
                "the GGUF file is for texts of up to {window} tokens: the model attends to no more,"
                " and llama.cpp does not have this limit",
                code="gguf-window",
                window=window,
            )
        )
    if choice.num_fallbacks:
        logger.warning(
            UserText(
                "{num_tensors} of {total} tensors have rows that do not fit the blocks of {kind},"
                " and are stored with more bits",
                code="gguf-larger-types",
                num_tensors=choice.num_fallbacks,
                total=len(choice.types),
                kind=kind,
            )
        )

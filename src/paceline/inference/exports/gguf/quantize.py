"""Values of tensors in the types of GGUF files."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType

#: Types that the package gguf writes itself; llama.cpp's library writes the others.
_OF_GGUF = ("F32", "F16", "BF16", "Q8_0")


def encode_tensor(tensor: torch.Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    """Return the values of a tensor as they are stored, one stack of rows at a time: float32 or
    float16 for these types, bytes for others."""
    import gguf
    import torch

    if kind.name == "F32":
        return tensor.float().contiguous().numpy()
    if kind.name == "F16":
        return tensor.to(torch.float16).contiguous().numpy()
    if kind.name == "BF16":
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    values = tensor.float().contiguous().numpy()
    if kind.name in _OF_GGUF:
        encoded: np.ndarray = gguf.quants.quantize(values, kind)
        return encoded
    return _quantize_with_library(values, kind)


def _quantize_with_library(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantize rows with ``ggml_quantize_chunk``, on all CPUs."""
    import gguf
    import numpy as np

    library, columns = ggml_library(), values.shape[-1]
    rows = values.size // columns
    block, size = gguf.GGML_QUANT_SIZES[kind]
    encoded = np.empty((*values.shape[:-1], columns // block * size), np.uint8)
    source = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    target = encoded.ctypes.data_as(ctypes.c_void_p)
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    step = max(1, -(-rows // (4 * num_threads)))

    def quantize(start: int) -> None:
        count = min(step, rows - start)
        library.ggml_quantize_chunk(
            kind.value, source, target, start * columns, count, columns, None
        )

    library.ggml_quantize_init(kind.value)
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(quantize, range(0, rows, step)))
    return encoded


@cache
def ggml_library() -> ctypes.CDLL:
    """Return the library of llama.cpp in the package xllamacpp."""
    path = library_path()
    if path is None:
        raise ImportError("xllamacpp is not installed")
    library = ctypes.CDLL(str(path))
    library.ggml_quantize_init.argtypes = [ctypes.c_int]
    library.ggml_quantize_init.restype = None
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_float),
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_float),
    ]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def library_path() -> Path | None:
    """Return the file of llama.cpp's library in the package xllamacpp, or None without it."""
    found = importlib.util.find_spec("xllamacpp")
    folders = found.submodule_search_locations if found is not None else None
    for folder in folders or []:
        files = [
            file
            for pattern in ("xllamacpp*.so", "xllamacpp*.pyd", "xllamacpp*.dylib")
            for file in sorted(Path(folder).glob(pattern))
        ]
        if files:
            return files[0]
    return None

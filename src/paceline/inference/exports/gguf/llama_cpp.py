"""llama.cpp's library in the package xllamacpp: models, tokens, and logits.

The functions are in llama.cpp's ``include/llama.h``. Its parameters are structs that change between
releases. They are passed as blocks of bytes that are larger than the structs, with
llama.cpp's defaults, so that only the fields that are changed must be at known positions.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import RunError
from paceline.inference.exports.gguf.quantize import ggml_library

if TYPE_CHECKING:
    import torch

_MIN_CONTEXT = 1024
_BATCH = 512
#: Fields of the parameters of a context before the types of keys and values, as 32-bit values:
#: flash attention (automatic), two numbers of the rotary embedding, four of YaRN, its original
#: length, a threshold, and two pointers.
_MINUS_ONE = 0xBF800000  # -1.0 in float32
_BEFORE_TYPES = (0xFFFFFFFF, 0, 0, *(_MINUS_ONE,) * 4, 0, _MINUS_ONE, 0, 0, 0, 0)
_F16_TYPES = (1, 1)
_NUM_CONTEXT_FIELD, _FIRST_FIELDS = 0, (512, 2048, 512)

_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class _Struct(ctypes.Structure):
    """A struct of llama.cpp, or less: none has as many bytes."""

    _fields_ = [("fields", ctypes.c_uint32 * 256)]


_TOKENS = ctypes.POINTER(ctypes.c_int32)
_POINTER = ctypes.c_void_p
#: function → (type of its result, types of its arguments)
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_LogCallback, _POINTER]),
    "llama_model_default_params": (_Struct, []),
    "llama_context_default_params": (_Struct, []),
    "llama_model_load_from_file": (_POINTER, [ctypes.c_char_p, _Struct]),
    "llama_model_free": (None, [_POINTER]),
    "llama_model_get_vocab": (_POINTER, [_POINTER]),
    "llama_model_chat_template": (ctypes.c_char_p, [_POINTER, ctypes.c_char_p]),
    "llama_init_from_model": (_POINTER, [_POINTER, _Struct]),
    "llama_free": (None, [_POINTER]),
    "llama_n_ctx": (ctypes.c_uint32, [_POINTER]),
    "llama_set_n_threads": (None, [_POINTER, ctypes.c_int32, ctypes.c_int32]),
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_memory_clear": (None, [_POINTER, ctypes.c_bool]),
    "llama_batch_get_one": (_Struct, [_TOKENS, ctypes.c_int32]),
    "llama_decode": (ctypes.c_int32, [_POINTER, _Struct]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [_POINTER, ctypes.c_int32]),
    "llama_vocab_n_tokens": (ctypes.c_int32, [_POINTER]),
    "llama_tokenize": (
        ctypes.c_int32,
        [
            *(_POINTER, ctypes.c_char_p, ctypes.c_int32, _TOKENS),
            *(ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
        ],
    ),
}


class LlamaCppFailed(RunError):
    """llama.cpp does not read a file or does not run a model."""


@cache
def _library() -> tuple[ctypes.CDLL, Callable[..., object]]:
    """Return the library with the types of its functions, silent, and what keeps it silent."""
    library = ggml_library()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    silent = _LogCallback(lambda level, text, data: None)
    library.llama_log_set(silent, None)
    library.llama_backend_init()
    return library, silent


def _set_exact(params: _Struct, num_context: int) -> bool:
    """Change the parameters of a context to keys and values in float32, and no flash attention,
    which computes in float16. Return False if the fields are not found and keep llama.cpp's
    values."""
    fields = list(params.fields)
    if tuple(fields[: len(_FIRST_FIELDS)]) == _FIRST_FIELDS:
        params.fields[_NUM_CONTEXT_FIELD] = num_context
    pattern = [*_BEFORE_TYPES, *_F16_TYPES]
    for start in range(len(fields) - len(pattern)):
        if fields[start : start + len(pattern)] == pattern:
            params.fields[start] = 0
            types = start + len(_BEFORE_TYPES)
            params.fields[types] = params.fields[types + 1] = 0
            return True
    return False


class LlamaCppModel:
    """A model that llama.cpp has loaded.

    Args:
        file: GGUF file.

    Raises:
        LlamaCppFailed: llama.cpp does not load it.
    """

    def __init__(self, file: Path) -> None:
        self._library, _ = _library()
        self._file = file
        self._context: int | None = None
        #: Whether keys and values are in float32.
        self.is_exact = _set_exact(self._library.llama_context_default_params(), 1)
        self._model = self._library.llama_model_load_from_file(
            os.fsencode(file), self._library.llama_model_default_params()
        )
        if not self._model:
            raise LlamaCppFailed(
                "llama.cpp does not load {file}", code="gguf-not-loaded", file=file
            )
        self._vocabulary = self._library.llama_model_get_vocab(self._model)
        self.vocab_size = int(self._library.llama_vocab_n_tokens(self._vocabulary))
        self.has_template = bool(self._library.llama_model_chat_template(self._model, None))

    def close(self) -> None:
        """Free the model."""
        if self._context:
            self._library.llama_free(self._context)
        if self._model:
            self._library.llama_model_free(self._model)
        self._context = self._model = None

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, in which the texts of special tokens stand for them."""
        content = text.encode()
        size = len(content) + 8
        tokens = (ctypes.c_int32 * size)()
        count = self._library.llama_tokenize(
            self._vocabulary, content, len(content), tokens, size, True, True
        )
        return list(tokens[:count])

    def start(self, tokens: Sequence[int], num_more: int) -> None:
        """Begin a new text.

        Args:
            num_more: number of tokens that follow.
        """
        needed = max(_MIN_CONTEXT, len(tokens) + num_more)
        if self._context is None or self._library.llama_n_ctx(self._context) < needed:
            self._make_context(needed)
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        for begin in range(0, len(tokens), _BATCH):
            self.extend(tokens[begin : begin + _BATCH])

    def _make_context(self, num_tokens: int) -> None:
        if self._context:
            self._library.llama_free(self._context)
        params = self._library.llama_context_default_params()
        _set_exact(params, num_tokens)
        self._context = self._library.llama_init_from_model(self._model, params)
        if not self._context or self._library.llama_n_ctx(self._context) < num_tokens:
            raise LlamaCppFailed(
                "llama.cpp has no memory for {num_tokens} tokens with {file}",
                code="gguf-no-context",
                num_tokens=num_tokens,
                file=self._file,
            )
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._library.llama_set_n_threads(self._context, threads, threads)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text.

        Raises:
            LlamaCppFailed: llama.cpp does not compute them.
        """
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self._library.llama_batch_get_one(array, len(tokens))
        status = self._library.llama_decode(self._context, batch)
        if status:
            raise LlamaCppFailed(
                "llama.cpp does not compute {file}: error {result}",
                code="gguf-not-computed",
                file=self._file,
                result=status,
            )

    def logits(self) -> torch.Tensor:
        """Return the logits after the text, in float32."""
        import numpy as np
        import torch

        pointer = self._library.llama_get_logits_ith(self._context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(pointer, (self.vocab_size,)).copy())

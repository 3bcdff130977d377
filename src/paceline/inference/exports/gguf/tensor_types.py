"""The type of each tensor in a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

KINDS = ("f16", "bf16", "q8_0", "q4_k_m")
#: ``general.file_type`` of each kind (``enum llama_ftype`` in llama.cpp's ``llama.h``).
#: ``f32`` is not a form of an export: it shows whether llama.cpp computes what the model does.
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_k_m": 15}
#: Matrices that llama.cpp needs in float32 or does not quantize (``prepare_tensors`` in its
#: converter, ``tensor_allows_quantization`` in ``llama-quant.cpp``).
_FLOAT32 = re.compile(
    r"ffn_gate_inp(_shexp)?\.weight$|ssm_conv1d\.weight$|shortconv\.conv\.weight$"
)
_LAYER = re.compile(r"^blk\.(\d+)\.")
#: Type → type whose blocks are smaller, for rows that are no multiple of 256.
_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class TypeChoice:
    """The types of all tensors.

    Args:
        types: type of each tensor, by name.
        num_fallbacks: number of tensors whose rows do not fit the blocks of the type that they
            would have had.
    """

    types: dict[str, GGMLQuantizationType]
    num_fallbacks: int

    def num_bytes(self, shapes: dict[str, tuple[int, ...]]) -> int:
        """Return the size of the tensors.

        Args:
            shapes: shape of each tensor, as in torch.
        """
        return sum(tensor_bytes(shapes[name], kind) for name, kind in self.types.items())


def tensor_bytes(shape: Sequence[int], kind: GGMLQuantizationType) -> int:
    """Return the size of a tensor in a type."""
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[kind]
    return prod(shape) // block * size


def choose_types(
    kind: str, shapes: dict[str, tuple[int, ...]], num_layers: int, num_experts: int
) -> TypeChoice:
    """Choose the types of all tensors.

    Args:
        kind: one of ``KINDS``.
        shapes: shape of each tensor, in the order in which they are written.
        num_experts: number of experts of a layer; 0 for a dense model.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    mix = _Q4KMMix(shapes, num_layers, num_experts)
    types, num_fallbacks = {}, 0
    for name, shape in shapes.items():
        if len(shape) < 2 or "_norm." in name or _FLOAT32.search(name) or not _is_weight(name):
            types[name] = GGMLQuantizationType.F32
            continue
        wanted = mix.type_of(name) if kind == "q4_k_m" else kind.upper()
        chosen = wanted
        while shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[chosen]][0]:
            chosen = _SMALLER_BLOCKS.get(chosen, "F16")
        num_fallbacks += chosen != wanted
        types[name] = GGMLQuantizationType[chosen]
    return TypeChoice(types, num_fallbacks)


def _is_weight(name: str) -> bool:
    return name.endswith(".weight")


class _Q4KMMix:
    """The mix of types that llama.cpp names Q4_K_M (``llama_tensor_get_type_impl`` in its
    ``llama-quant.cpp``): values and the second projection of a feed-forward layer have more bits in
    the first and last eighth of the layers and in each third one between.

    Args:
        shapes: shape of each tensor, by name.
        num_experts: number of experts of a layer; 0 for a dense model.
    """

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], num_layers: int, num_experts: int
    ) -> None:
        self._num_layers, self._num_experts = num_layers, num_experts
        values = [name for name in shapes if re.search(r"attn_(v|qkv)\.weight$", name)]
        self._value_order = {name: number for number, name in enumerate(values)}
        self._has_head = "output.weight" in shapes
        self._is_70b = num_layers == 80 and num_experts == 0

    def type_of(self, name: str) -> str:
        """Return the name of the type of a tensor."""
        has_eight = self._num_experts == 8
        if name == "output.weight" or (name == "token_embd.weight" and not self._has_head):
            return "Q6_K"
        if name.endswith("attn_v.weight"):
            more = _has_more_bits(self._value_order[name], len(self._value_order))
            kind = "Q6_K" if more else "Q5_K" if self._is_70b else "Q4_K"
            return "Q8_0" if has_eight else kind
        if name.endswith("attn_k.weight") and has_eight:
            return "Q8_0"
        if name.endswith(("ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")):
            layer = int(match[1]) if (match := _LAYER.match(name)) else 0
            return "Q6_K" if _has_more_bits(layer, self._num_layers) else "Q4_K"
        if name.endswith("attn_output.weight") and has_eight:
            return "Q5_K"
        return "Q5_K" if name.endswith("attn_qkv.weight") else "Q4_K"


def _has_more_bits(number: int, total: int) -> bool:
    eighth = total // 8
    return number < eighth or number >= 7 * total // 8 or (number - eighth) % 3 == 2

"""Which layers of a model an export quantizes, and which stay as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch import nn

Scheme = Literal["fp8", "w4a16", "gptq", "awq"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

#: Numbers of a row that share a scale, in schemes with 4 bits.
GROUP_SIZE = 128
#: Sizes (inputs, outputs) whose multiples the kernels of vLLM multiply: ``scaled_mm`` for fp8, and
#: Marlin for 4 bits.
MULTIPLES: Mapping[Scheme, tuple[int, int]] = {
    "fp8": (16, 16), "w4a16": (GROUP_SIZE, 64), "gptq": (GROUP_SIZE, 64), "awq": (GROUP_SIZE, 64),
}  # fmt: skip
#: Layers that servers join to one, so that all of them are quantized or none is.
_JOINED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)  # fmt: skip
#: Layers that choose experts, and the layers of linear attention, which lose the most by rounding.
_SENSITIVE = re.compile(r"\.(gate|router|shared_expert_gate)(\.|$)|\.(linear_attn|mixer|mamba)\.")
#: Names of layers that are not linear layers of blocks.
_OUTSIDE = re.compile(
    r"(^|\.)(lm_head|embed\w*|\w*embeddings?|wte|wpe|score|classifier)(\.|$)|norm\w*(\.|$)|^mtp\."
    r"|(^|\.)(visual|vision\w*|audio\w*|multi_modal_projector|mm_projector|embed_vision)(\.|$)"
)


def is_sensitive(name: str) -> bool:
    """Return whether a layer stays in 16 bits because of what it computes."""
    return _SENSITIVE.search(name) is not None or _OUTSIDE.search(name) is not None


def fits(scheme: Scheme, num_inputs: int, num_outputs: int) -> bool:
    """Return whether the kernels of servers multiply weights of these sizes."""
    inputs, outputs = MULTIPLES[scheme]
    return num_inputs % inputs == 0 and num_outputs % outputs == 0


def unquantized_layers(shapes: Mapping[str, tuple[int, int]], scheme: Scheme) -> set[str]:
    """Return the names of layers that stay in 16 bits.

    Args:
        shapes: (outputs, inputs) of each linear layer.
    """
    kept = {
        name
        for name, (outputs, inputs) in shapes.items()
        if is_sensitive(name) or not fits(scheme, inputs, outputs)
    }
    return kept | {other for name in kept for other in _joined_with(name, shapes)}


def _joined_with(name: str, names: Iterable[str]) -> list[str]:
    parent, _, last = name.rpartition(".")
    known = set(names)
    for group in _JOINED:
        if last in group:
            others = [f"{parent}.{other}" for other in group]
            return [other for other in others if other in known]
    return []


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the linear layers of a model."""
    from torch import nn

    return {
        name: (int(module.weight.shape[0]), int(module.weight.shape[1]))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }

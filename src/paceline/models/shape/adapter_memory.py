"""Estimate the memory that the adapters of LoRA need during forward and backward. Imports no
torch."""

import re
from dataclasses import dataclass, replace
from typing import Self

from paceline.config.schema import Config
from paceline.models.shape.dims import LanguageDims
from paceline.models.shape.record import ModelShape, TensorShape, modules_around

_FLOAT32 = 4


#: Names of linear layers that peft takes for experts where it adapts experts as parameters.
_EXPERT_PROJECTIONS = frozenset({"gate_proj", "up_proj", "down_proj"})


def adapted_layers(
    dims: LanguageDims, config: Config, merges_experts: bool = False
) -> dict[str, tuple[int, int]]:
    """Return the widths of each linear layer of a block that has an adapter.

    Args:
        merges_experts: whether adapters of experts are merged; then the layers that have the names
            of projections of experts are merged too, or have no adapter.
    """
    layers = dict(dims.linears)
    if dims.experts > 1:  # fused experts have no linear layers, those for every token do
        wide = dims.shared_feed_forward
        layers = {name: each for name, each in layers.items() if name not in _EXPERT_PROJECTIONS}
        if wide:
            layers |= dict.fromkeys(("gate_proj", "up_proj"), (dims.hidden, wide))
            layers["down_proj"] = wide, dims.hidden
            if dims.gated_shared:
                layers["shared_expert_gate"] = dims.hidden, 1
    if merges_experts:
        layers = {name: each for name, each in layers.items() if name not in _EXPERT_PROJECTIONS}
    named = config.lora.target_modules
    if isinstance(named, str) and named != "all-linear":
        places = [
            f"model.layers.{index}.{part}."
            for index in range(dims.layers)
            for part in ("self_attn", "linear_attn", "mlp")
        ]
        named = [
            name for name in layers if any(re.fullmatch(named, place + name) for place in places)
        ]
    if isinstance(named, list):
        targets = {target.rpartition(".")[2] for target in named}
        selected = {name: widths for name, widths in layers.items() if name in targets}
        layers = selected or layers
    return layers


#: Layers whose input features tensor parallelism splits.
_ROW_LAYERS = ("o_proj", "out_proj", "down_proj")


#: Layers that read the hidden states after the second norm, and layers that read the result of
#: another layer; the others read the hidden states after the first norm.
_MLP_LAYERS = ("up_proj", "gate_proj", "gate_up_proj", "shared_expert_gate")
_INNER_LAYERS = (*_ROW_LAYERS, "q_b_proj", "kv_b_proj")


def adapter_bytes(
    dims: LanguageDims,
    config: Config,
    low: int,
    mask_bytes: int,
    row_mask_bytes: int,
    merges_experts: bool = False,
) -> float:
    """Return the bytes per token that the adapters of one layer save: each saves its input (with
    dropout, a separate copy and a mask) and ``lora.rank`` numbers.

    Args:
        dims: widths of the part of the layer that the rank computes.
        low: bytes per element of the results of matrix products.
        mask_bytes: bytes per element of a dropout mask.
        row_mask_bytes: the same of a layer whose input features tensor parallelism splits.
        merges_experts: whether adapters of experts are merged.
    """
    lora, layers = config.lora, adapted_layers(dims, config, merges_experts)
    if lora.dropout > 0:
        inputs = sum(
            (low + (row_mask_bytes if name in _ROW_LAYERS else mask_bytes)) * width
            for name, (width, _) in layers.items()
        )
    else:  # q, k and v share one input, and so do gate and up
        groups: dict[str, int] = {}
        for name, (width, _) in layers.items():
            is_shared = name not in _INNER_LAYERS
            mlp = name in _MLP_LAYERS
            groups[("mlp" if mlp else "attention") if is_shared else name] = low * width
        inputs = sum(groups.values())
    # DoRA scales the results of the layer and of the adapter; VeRA scales two results of its own.
    scaled = (2 if lora.use_dora else 0) + (1 if lora.method == "vera" else 0)
    ranks = lora.rank * (2 if lora.method == "vera" else 1)
    outputs = sum(width for _, width in layers.values())
    return inputs + low * ranks * len(layers) + low * scaled * outputs


def adapter_temporary(
    dims: LanguageDims,
    config: Config,
    low: int,
    adapter_bytes: int,
    tensor_ranks: int = 1,
    merges_experts: bool = False,
) -> float:
    """Return the bytes per token that the widest adapter of a layer allocates and frees in its
    forward pass: the input and the output of the frozen layer, the input in the dtype of the
    adapter, and the same with dropout. A split row layer makes the mask of all features from ones.

    Args:
        low: bytes per element of the results of matrix products.
        adapter_bytes: bytes per element of the adapter's weights.
        merges_experts: whether adapters of experts are merged.
    """
    layers = adapted_layers(dims, config, merges_experts)
    if not layers:
        return 0.0
    widest = max(layers, key=lambda name: layers[name][0])
    width, output = layers[widest]
    copies = 0 if adapter_bytes == low else 1
    if config.lora.dropout > 0:
        is_split = tensor_ranks > 1 and widest in _ROW_LAYERS
        copies += 2 * tensor_ranks if is_split else copies
    return (adapter_bytes * copies + low) * width + low * output


def layer_matrices(dims: LanguageDims, config: Config, low: int) -> float:
    """Return the bytes of the matrices of one layer that exist while it computes: its weight, if it
    is quantized, and with DoRA the update as a matrix (from an identity matrix in float32), and its
    sum with the weight."""
    lora = config.lora
    if not lora.enable:
        return 0.0
    size = dims.hidden * max(dims.feed_forward, dims.queries)
    copies = (1 if lora.quantize != "none" else 0) + (3 if lora.use_dora else 0)
    identity = _FLOAT32 * max(dims.feed_forward, dims.hidden) ** 2 if lora.use_dora else 0
    return copies * low * size + identity


@dataclass(frozen=True)
class MergedExperts:
    """What the adapters of a block make of its fused experts: peft has no layer for such a
    parameter W, so it computes W + BA as a whole, from B and A in the dtype of W. The linear layers
    that it takes for experts are merged in the same way.

    Args:
        saved: bytes of the merged weights, and of the copies of A and B, which backward needs.
        gradient: bytes of the gradient of the last merged weight, with which backward begins.
        first_gradient: bytes of the gradient of the first merged weight.
        shared: like ``saved``, of the linear layers in a block with experts.
        dense: like ``saved``, of the linear layers in a block without experts.
        merges_linears: whether linear layers with names of projections of experts are merged or
            have no adapters.
    """

    saved: float = 0.0
    gradient: float = 0.0
    first_gradient: float = 0.0
    shared: float = 0.0
    dense: float = 0.0
    merges_linears: bool = False

    def split(self, ranks: int) -> Self:
        """Return the part of one of ``ranks`` ranks that divide each expert, or the experts."""
        return replace(
            self,
            saved=self.saved / ranks,
            gradient=self.gradient / ranks,
            first_gradient=self.first_gradient / ranks,
        )


NO_EXPERTS = MergedExperts()


def merged_experts(shape: ModelShape) -> MergedExperts:
    """Return what the adapters of a block with experts merge, and of a block without."""
    return shape.memoize("merged experts", lambda: _merged_experts(shape))


def _merged_experts(shape: ModelShape) -> MergedExperts:
    blocks: dict[str, list[TensorShape]] = {name: [] for name in shape.blocks}
    for tensor in shape.parameters:
        for name in blocks.keys() & modules_around(tensor.name):
            blocks[name].append(tensor)
    fused_of = {
        name: [each for each in tensors if _is_fused(each)] for name, tensors in blocks.items()
    }
    mixture = next((name for name, fused in fused_of.items() if fused), None)
    if mixture is None:
        return NO_EXPERTS
    fused = fused_of[mixture]
    module = fused[0].name.partition(".base_layer.")[0]
    elements = sum(each.numel for each in blocks[mixture] if each.name.startswith(f"{module}."))
    dense = next((name for name, found in fused_of.items() if not found), None)
    return MergedExperts(
        fused[0].element_bytes * elements,
        fused[-1].size_bytes,
        fused[0].size_bytes,
        shared=_merged_linears(blocks[mixture]),
        dense=_merged_linears(blocks[dense]) if dense is not None else 0.0,
        merges_linears=True,
    )


def _is_fused(tensor: TensorShape) -> bool:
    """Return whether a parameter is fused experts that have an adapter."""
    return len(tensor.shape) == 3 and ".base_layer." in tensor.name


def _merged_linears(tensors: list[TensorShape]) -> float:
    """Return the bytes of the merged weights of a block, and of the copies of A and B."""
    bases = [each for each in tensors if len(each.shape) == 2 and ".base_layer." in each.name]
    size = 0
    for base in bases:
        module = base.name.partition(".base_layer.")[0]
        if module.rpartition(".")[2] in _EXPERT_PROJECTIONS:
            parts = [each.numel for each in tensors if each.name.startswith(f"{module}.")]
            size += base.element_bytes * sum(parts)
    return size

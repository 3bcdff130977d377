"""Estimate what the layers of a language model save for backward. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.models.shape.adapter_memory import (
    MergedExperts,
    adapted_layers,
    adapter_bytes,
    adapter_temporary,
)
from paceline.models.shape.block_memory import FLOAT32_BYTES, BlockMemory
from paceline.models.shape.expert_memory import ExpertRows


@dataclass(frozen=True)
class LayerMemory:
    """What the layers save for backward in a micro-batch, in bytes.

    Args:
        block: a layer; of a mixture, a layer with experts.
        rows: what its experts compute; None in a dense model.
        merged: what adapters merge.
        tokens: number of tokens of the micro-batch.
        row: number of tokens of a row, if attention stores its scores; else None.
        joined: whether a copy joins the results of the samples of a packed row.
        token_parts: number of ranks that divide the tokens outside the split layers.
        row_mask_bytes: bytes per element of the dropout mask of a layer whose input features are
            split.
    """

    block: BlockMemory
    rows: ExpertRows | None
    merged: MergedExperts
    tokens: float
    row: float | None
    joined: bool
    token_parts: int
    row_mask_bytes: int

    @cached_property
    def layers(self) -> list[float]:
        """Bytes that each layer saves without activation checkpointing."""
        return self._of_each_layer(self._layer)

    def _layer(self, block: BlockMemory) -> float:
        size = self._per_token(block) * self.tokens
        if self.rows is None:
            return size + self.merged.saved + self.merged.shared
        if block.dims.experts == 1:
            return size + self.merged.dense
        return size + self.rows.saved * self.tokens + self.merged.saved + self.merged.shared

    def _of_each_layer(self, size_of: Callable[[BlockMemory], float]) -> list[float]:
        """Return a size of each layer. Layers of one kind have the same."""
        dims = self.block.dims
        kinds = [dims.of_layer(number) for number in range(dims.layers)]
        sizes = {kind: size_of(replace(self.block, dims=kind)) for kind in set(kinds)}
        return [sizes[kind] for kind in kinds]

    def saved_by_layer(self) -> list[float]:
        """Return what each layer saves, with activation checkpointing."""
        dims, setting = self.block.dims, self.block.config.train_args.recomputation
        inputs = self.block.stream * dims.hidden / self.token_parts * self.tokens
        if setting == "none":
            return self.layers
        if setting == "selective":
            return [inputs + size * self.tokens for size in self._of_each_layer(_products)]
        every = setting if isinstance(setting, int) else 1
        return [size if number % every else inputs for number, size in enumerate(self.layers)]

    def temporary(self, adapter_bytes: int, tensor_ranks: int) -> float:
        """Return what a layer allocates and frees in its forward or backward pass, without experts.

        Args:
            adapter_bytes: bytes per element of the weights of adapters.
        """
        block = self.block
        gradients = block.gradients(self.row or 0.0)
        if not block.frozen:
            return gradients * self.tokens
        merges = self.merged.merges_linears
        in_adapter = adapter_temporary(
            block.dims, block.config, block.low, adapter_bytes, tensor_ranks, merges
        )
        return max(gradients, in_adapter + block.around_layer()) * self.tokens

    def _per_token(self, block: BlockMemory) -> float:
        """Return the bytes per token that a layer saves, without experts."""
        if block.dims.mixer is not None:
            attention = block.linear_attention(block.dims.mixer)
        elif self.row is None:
            attention = block.attention(self.joined)
        else:
            attention = block.eager_attention(self.row)
        size = block.norms() / self.token_parts + block.inputs() + attention + block.mlp()
        if not block.frozen:
            return size
        merges = self.merged.merges_linears
        masks = block.mask_bytes, self.row_mask_bytes
        size += adapter_bytes(block.dims, block.config, block.low, *masks, merges)
        return size + (block.merged_inputs() if merges else 0)


def _products(block: BlockMemory) -> float:
    """Return the bytes per token of the results of matrix products and attention of a layer. Of
    an adapter, the first product is stored; the second is cheap."""
    dims, config = block.dims, block.config
    wide = (2 if dims.gated else 1) * (  # grouped products of experts are repeated
        dims.feed_forward if dims.experts == 1 else dims.shared_feed_forward
    )
    attention = 2 * dims.queries + 2 * dims.keys + dims.hidden
    if dims.latent is not None:
        layers = dims.latent.linears(dims.hidden, dims.queries, dims.heads)
        attention = sum(output for _, output in layers.values()) + dims.latent.values
    elif dims.mixer is not None:
        attention = sum(output for _, output in dims.mixer.linears(dims.hidden).values())
    elif dims.gated_attention:
        attention += dims.queries
    outputs = attention + wide + dims.hidden
    adapters = config.lora.rank * len(adapted_layers(dims, config)) if config.lora.enable else 0
    return block.low * (outputs + adapters) + FLOAT32_BYTES * dims.heads

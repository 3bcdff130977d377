"""Estimate what the layers of a language model save for backward. Imports no torch."""

from dataclasses import dataclass, replace

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

    @property
    def layer(self) -> float:
        """Bytes that a layer saves without activation checkpointing; of a mixture, a layer with
        experts."""
        of_experts = 0.0 if self.rows is None else self.rows.saved
        size = self._per_token(self.block) + of_experts
        return size * self.tokens + self.merged.saved + self.merged.shared

    @property
    def dense_layer(self) -> float:
        """Bytes that a layer of a mixture without experts saves; 0 if there is none."""
        if not self.block.dims.dense_layers:
            return 0.0
        return self._per_token(self._dense) * self.tokens + self.merged.dense

    @property
    def _dense(self) -> BlockMemory:
        return replace(self.block, dims=self.block.dims.dense)

    def saved_by_layer(self) -> list[float]:
        """Return what each layer saves, with activation checkpointing."""
        dims, setting = self.block.dims, self.block.config.train_args.recomputation
        inputs = self.block.stream * dims.hidden / self.token_parts * self.tokens
        layers = [self.layer] * dims.layers
        products = [_products(self.block)] * dims.layers
        for number in dims.dense_layers:
            layers[number], products[number] = self.dense_layer, _products(self._dense)
        if setting == "none":
            return layers
        if setting == "selective":
            return [inputs + size * self.tokens for size in products]
        every = setting if isinstance(setting, int) else 1
        return [size if number % every else inputs for number, size in enumerate(layers)]

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
        attention = (
            block.attention(self.joined) if self.row is None else block.eager_attention(self.row)
        )
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
    outputs = attention + wide + dims.hidden
    adapters = config.lora.rank * len(adapted_layers(dims, config)) if config.lora.enable else 0
    return block.low * (outputs + adapters) + FLOAT32_BYTES * dims.heads

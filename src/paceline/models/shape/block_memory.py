"""Estimate what a block of a language model saves for backward. Imports no torch."""

from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.models.shape.adapter_memory import adapted_layers
from paceline.models.shape.dims import LanguageDims

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class BlockMemory:
    """What a block saves for backward, in bytes per token.

    Args:
        low: bytes per element of the results of matrix products.
        stream: bytes per element of the residual stream.
        autocasts: whether autocast selects the precision of each operation.
        is_split: whether layers are split. Then each input is cast once, before the ranks share its
            gradient.
    """

    dims: LanguageDims
    config: Config
    low: int
    stream: int
    autocasts: bool
    mask_bytes: int
    is_split: bool = False

    @property
    def frozen(self) -> bool:
        return self.config.lora.enable

    @property
    def liger(self) -> bool:
        return self.config.train_args.use_liger_kernel

    def norm(self, width: int, input_bytes: int) -> int:
        """Return what a norm of ``width`` numbers saves.

        Liger's kernels save the input as it is. torch's LayerNorm saves its input, which autocast
        casts to float32. A root-mean-square norm (``LlamaRMSNorm``) saves its input in float32 and,
        for the gradient of its weight, the result before scaling in the dtype of the input, or in
        float32 (``GemmaRMSNorm``).
        """
        if self.liger:
            return input_bytes * width
        if self.dims.layer_norms:
            return (FLOAT32_BYTES if self.autocasts else input_bytes) * width
        scaled = FLOAT32_BYTES if self.dims.float32_norms else input_bytes
        return (FLOAT32_BYTES + (0 if self.frozen else scaled)) * width

    def norms(self) -> int:
        """Return what the norms of the hidden states save."""
        return self.dims.norms * self.norm(self.dims.hidden, self.stream)

    def inputs(self) -> int:
        """Return the inputs of the projections. Those that have the dtype of matrix products exist
        once per norm; of the others, autocast makes a copy for each projection."""
        if self.frozen:
            return 0
        dims = self.dims
        copies = 1 if dims.norms == 1 else 2
        casts = self.autocasts and (self.stream != self.low or dims.layer_norms)
        if casts and not self.is_split:
            copies = 1 if dims.fused_qkv else 3
            if dims.experts > 1:
                copies += 3 if dims.shared_feed_forward else 1  # of the router, and shared experts
            else:
                copies += 2 if dims.gated and not dims.fused_gate else 1
        return self.low * dims.hidden * copies

    def _query_norms(self) -> int:
        width = self.dims.queries + self.dims.keys
        return self.norm(width, self.low) if self.dims.normed_queries else 0

    def _states(self) -> int:
        """Return the number of elements of queries, keys and values. If one layer computes them,
        the values are a view of its result, and rotated queries and keys are not."""
        dims = self.dims
        rotated = dims.queries + dims.keys if dims.fused_qkv and dims.rotates else 0
        return dims.queries + 2 * dims.keys + rotated

    def attention(self, joined: bool) -> float:
        """Return what a fused kernel saves: queries, keys, values, its result, and the sums of the
        rows in float32; and the results of the samples, if they are ``joined``."""
        dims = self.dims
        size = self.low * (self._states() + dims.queries) + FLOAT32_BYTES * dims.heads
        if joined and self.config.train_args.packing is not False:
            size += self.low * dims.queries
        return size + self._query_norms()

    @property
    def _softmax_bytes(self) -> int:
        """Bytes per element of the softmax that eager attention computes: float32, or with learned
        scores the dtype of the mask, to which the scores are added."""
        return self.stream if self.dims.has_sinks else FLOAT32_BYTES

    @property
    def _copied_bytes(self) -> int:
        """Bytes per element of the copy of a softmax for the matrix product; 0 without a copy."""
        return self.low if self.low != self._softmax_bytes else 0

    def scores_in_forward(self, row: float) -> float:
        """Return what eager attention with learned scores allocates in its forward pass: the scores
        with the mask, and the same with the learned scores, less their maximum."""
        return 2 * self._softmax_bytes * self.dims.heads * row if self.dims.has_sinks else 0.0

    def eager_attention(self, row: float) -> float:
        """Return what ``eager_attention_forward`` of transformers saves: queries, keys and values
        repeated for all heads, its result if the output projection is trained, and of each score
        the softmax, its copy for the matrix product, and the ``tanh`` of a soft cap."""
        dims = self.dims
        score = self._softmax_bytes + self._copied_bytes
        score += self.low if dims.softcaps_scores else 0
        states = self.low * dims.queries * (3 if self.frozen else 4)
        return states + dims.heads * row * score + self._query_norms()

    def mlp(self) -> int:
        """Return what the MLP saves; in a mixture, the experts that process every token. With a
        gate: both projections, the activation of the gate, and the product, if the down projection
        is trained. Liger's kernel computes the activation again."""
        dims = self.dims
        wide = dims.shared_feed_forward if dims.experts > 1 else dims.feed_forward
        product = 0 if self.frozen else self.low * wide
        if dims.gated:
            return self.low * wide * (2 if self.liger else 3) + product
        if not dims.composed_activation:
            return self.low * wide + product
        # NewGELUActivation: a power, which autocast computes in float32, tanh, a sum, and the half.
        chain = 3 * (FLOAT32_BYTES if self.autocasts else self.low)
        return (chain + self.low) * wide + product

    def around_layer(self) -> int:
        """Return what exists while an adapter computes in addition to what it needs: the residual
        stream, or the gradient of it, and the result of a norm."""
        normed = FLOAT32_BYTES if self.dims.layer_norms and self.autocasts else self.stream
        return (self.stream + normed) * self.dims.hidden

    def gradients(self, row: float = 0.0) -> float:
        """Return the gradients in flight in the backward pass of the MLP: the gradient of the
        residual stream and the gradients of two inner results, or of three in float32 (see
        :meth:`mlp`).

        If scores of ``row`` tokens are stored: instead of the inner results, the gradients of the
        softmax and of its argument, if they need more. What the MLP saved, and the
        copy of the softmax, are freed before.
        """
        dims = self.dims
        wide = dims.shared_feed_forward if dims.experts > 1 else dims.feed_forward
        inner = 2 * self.low
        if self.dims.composed_activation:
            inner = 3 * (FLOAT32_BYTES if self.autocasts else self.low)
        score = 2 * self._softmax_bytes - self._copied_bytes
        scores = self.dims.heads * row * score - self.mlp()
        return self.stream * self.dims.hidden + max(inner * wide, scores)


def block_sizes(
    dims: LanguageDims, config: Config, layer: float, inputs: float, low: int
) -> list[float]:
    """Return the bytes per token that each block saves for backward.

    Args:
        layer: bytes that a block saves without activation checkpointing.
        inputs: bytes of the input of a block, which every checkpointed block saves.
    """
    setting = config.train_args.recomputation
    if setting == "none":
        return [layer] * dims.layers
    if setting == "selective":
        return [inputs + _products(dims, config, low)] * dims.layers
    every = setting if isinstance(setting, int) else 1
    return [layer if number % every else inputs for number in range(dims.layers)]


def _products(dims: LanguageDims, config: Config, low: int) -> float:
    """Return the bytes per token of the results of matrix products and attention of a layer. Of
    an adapter, the first product is stored; the second is cheap."""
    wide = (2 if dims.gated else 1) * (  # grouped products of experts are repeated
        dims.feed_forward if dims.experts == 1 else dims.shared_feed_forward
    )
    outputs = 2 * dims.queries + 2 * dims.keys + wide + 2 * dims.hidden
    adapters = config.lora.rank * len(adapted_layers(dims, config)) if config.lora.enable else 0
    return low * (outputs + adapters) + FLOAT32_BYTES * dims.heads

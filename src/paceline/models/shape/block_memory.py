"""Estimate what a block of a language model saves for backward. Imports no torch."""

from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.models.shape.dims import LanguageDims, LatentAttention
from paceline.models.shape.linear_attention import LinearAttention

FLOAT32_BYTES = 4
#: Kernels for packed rows take heads whose size is a multiple of this.
HEAD_MULTIPLE = 8


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
            copies = self._projections
            if dims.experts > 1:
                copies += 3 if dims.shared_feed_forward else 1  # of the router, and shared experts
                copies += 1 if dims.gated_shared else 0
            else:
                copies += 2 if dims.gated and not dims.fused_gate else 1
        return self.low * dims.hidden * copies

    @property
    def _projections(self) -> int:
        """Number of linear layers that read the result of the first norm."""
        if self.dims.mixer is not None:
            return len(self.dims.mixer.linears(self.dims.hidden)) - 1
        return 1 if self.dims.fused_qkv else 3 if self.dims.latent is None else 2

    def merged_inputs(self) -> int:
        """Return the inputs of linear layers whose adapters are merged with their weights."""
        dims = self.dims
        wide = dims.shared_feed_forward if dims.experts > 1 else dims.feed_forward
        return self.low * (dims.hidden + wide) if wide else 0

    def _latent(self, latent: LatentAttention) -> int:
        """Return what the norms of narrow vectors save, and the inputs of the layers after them."""
        widths = latent.query_rank, latent.key_rank
        inputs = 0 if self.frozen else self.low * sum(widths)
        return sum(self.norm(width, self.low) for width in widths if width) + inputs

    def _latent_attention(self, latent: LatentAttention, pads: bool) -> int:
        """Return the queries, keys, values, and the result of multi-head latent attention.

        Args:
            pads: whether values are padded to the width of keys. Otherwise they are a view of the
                result of the layer that also computes the unrotated part of keys.
        """
        dims = self.dims
        unrotated = dims.queries - dims.heads * latent.rotated
        if not pads:
            return self.low * (2 * dims.queries + unrotated + 2 * latent.values)
        size = max(dims.queries, latent.values) // dims.heads
        size += -size % HEAD_MULTIPLE
        padded = dims.heads * size
        # The output projection reads a copy without the padding.
        copy = latent.values if padded != latent.values and not self.frozen else 0
        return self.low * (4 * padded + copy)

    def _query_norms(self) -> int:
        width = self.dims.queries + self.dims.keys
        return self.norm(width, self.low) if self.dims.normed_queries else 0

    def _states(self) -> int:
        """Return the number of elements of queries, keys and values. If one layer computes them,
        the values are a view of its result, and rotated queries and keys are not."""
        dims = self.dims
        rotated = dims.queries + dims.keys if dims.fused_qkv and dims.rotates else 0
        return dims.queries + 2 * dims.keys + rotated

    def linear_attention(self, mixer: LinearAttention) -> float:
        """Return what linear attention saves."""
        return mixer.saved(self.low, self.stream, self.autocasts, self.frozen)

    def _output_gate(self, copies: bool) -> int:
        """Return what the gate of attention saves: its sigmoid, the result of attention, if a
        kernel's result is copied, and the product, if the output projection is trained."""
        if not self.dims.gated_attention:
            return 0
        return self.low * self.dims.queries * (1 + copies + (not self.frozen))

    def attention(self, joined: bool) -> float:
        """Return what a fused kernel saves: queries, keys, values, its result, and the sums of the
        rows in float32; and the results of the samples, if they are ``joined``."""
        dims, packs = self.dims, self.config.train_args.packing is not False
        size: float = FLOAT32_BYTES * dims.heads
        if dims.latent is not None:
            states = self._latent_attention(dims.latent, pads=packs and not joined)
            size += self._latent(dims.latent) + states
        else:
            size += self.low * (self._states() + dims.queries)
        if joined and packs:
            size += self.low * dims.values
        # Queries that are rotated in part are joined head by head, and so is the kernel's result.
        return size + self._query_norms() + self._output_gate(copies=packs and not joined)

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
        keeps_result = dims.gated_attention or not self.frozen
        states = self.low * dims.queries * (4 if keeps_result else 3)
        if dims.latent is not None:
            states = self._latent(dims.latent) + self._latent_attention(dims.latent, pads=False)
            states -= self.low * dims.latent.values if self.frozen else 0
        states += self._query_norms() + self._output_gate(copies=False)
        return states + dims.heads * row * score

    def mlp(self) -> int:
        """Return what the MLP saves; in a mixture, the experts that process every token. With a
        gate: both projections, the activation of the gate, and the product, if the down projection
        is trained. Liger's kernel computes the activation again."""
        dims = self.dims
        wide = dims.shared_feed_forward if dims.experts > 1 else dims.feed_forward
        product = 0 if self.frozen else self.low * wide
        if dims.gated_shared and dims.experts > 1:  # the result, which the gate multiplies
            product += self.low * dims.hidden
        if dims.gated:
            return self.low * wide * (2 if self.liger else 3) + product
        if not dims.composed_activation:
            return self.low * wide + product
        # NewGELUActivation: a power, which autocast computes in float32, tanh, a sum, and the half.
        chain = 3 * (FLOAT32_BYTES if self.autocasts else self.low)
        return (chain + self.low) * wide + product

    def after_experts(self) -> int:
        """Return what a layer of experts saves after them: what the experts for every token save,
        if they are computed last, or the product with their gate."""
        if self.dims.gated_shared:
            return self.low * self.dims.hidden
        return self.mlp() if self.dims.shared_feed_forward else 0

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

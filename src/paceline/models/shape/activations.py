"""Estimate the activation memory of a language model from its config.json. Imports no torch.

The estimate follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), section 4: each operation saves its inputs. Their formula for a layer, ``sbh(34 +
5as/h)`` bytes, assumes 2-byte activations, dropout, an ungated MLP of width 4h and attention with
stored scores. Here the widths are those of the model (gated MLP, grouped keys and values), fused
attention stores no scores (their section 5; Dao et al., "FlashAttention", 2022, section 3.1), norms
compute in float32, and a frozen weight saves no input (Hu et al., "LoRA", 2021).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

from paceline.config.schema import Config
from paceline.models.shape.adapter_memory import (
    adapted_layers,
    adapter_bytes,
    adapter_temporary,
    layer_matrices,
)
from paceline.models.shape.dims import LanguageDims
from paceline.models.shape.record import ModelShape, modules_around

_FLOAT32 = 4
#: The loss in chunks converts logits in 16 bit to float32 a few rows at a time, of this size in
#: bytes. No value depends on it.
FLOAT_LOGITS_BYTES = 16 << 20


@dataclass(frozen=True)
class TrainedMatrices:
    """The trained matrices that a rank holds in full, as numbers of elements.

    Args:
        blocks, largest: of all blocks, and the largest matrix of them.
        head: of the output head.
        is_tied: whether the head shares its weight with the token embedding.
    """

    blocks: int = 0
    largest: int = 0
    head: int = 0
    is_tied: bool = False


def trained_matrices(shape: ModelShape) -> TrainedMatrices:
    """Return the trained matrices of a rank that holds the full model."""
    blocks, tied, phases = set(shape.blocks), set(shape.aliases.values()), shape.phases or {}
    inside, head, is_tied = [0], 0, False
    for tensor in shape.trained:
        if len(tensor.shape) < 2:
            continue
        if blocks.intersection(modules_around(tensor.name)):
            inside.append(tensor.numel)
        elif tensor.name in tied or "after" in phases.get(tensor.name, ()):
            head, is_tied = max(head, tensor.numel), is_tied or tensor.name in tied
    return TrainedMatrices(sum(inside), max(inside), head, is_tied)


@dataclass(frozen=True)
class Activations:
    """Activation memory in bytes for one micro-batch, on a rank that holds the full model.

    Args:
        blocks: saved by each block from its forward pass to its backward pass.
        recomputed: needed to recompute one block, and to compute one layer with a quantized weight
            or DoRA; 0 without any of these.
        ends: saved by the layers outside the blocks: the last norm and the head.
        logits: needed for the loss, when all other activations exist: the head's output and two
            gradients of it in float32. If the loss is computed in chunks: those of a chunk, and the
            gradients of the head's weight and input.
        logits_saved: the part of ``logits`` that is kept until backward.
        temporary: what a block allocates and frees in its forward or backward pass.
        boundary: the hidden states that a block passes to the next.
        other_micro_batches: saved by the micro-batches that a pipeline has started before this one,
            and messages between its stages.
        peaks: what exists at the moments at which memory may be at its maximum, the first of them
            at the end of the forward pass.
    """

    blocks: tuple[int, ...] = ()
    recomputed: float = 0.0
    ends: float = 0.0
    logits: float = 0.0
    logits_saved: float = 0.0
    temporary: float = 0.0
    boundary: float = 0.0
    other_micro_batches: float = 0.0
    peaks: tuple[float, ...] = (0.0,)

    @property
    def total(self) -> int:
        """Peak memory of a step."""
        return round(max(self.peaks))

    @property
    def on_device(self) -> tuple[int, ...]:
        """The blocks' memory if activations are offloaded: when backward begins, those of the last
        block are on the device, and those of the block before it are copied back."""
        return tuple(0 for _ in self.blocks[:-2]) + self.blocks[-2:]

    @property
    def on_host(self) -> int:
        """Host memory if activations are offloaded. The last block's are not."""
        return sum(self.blocks[:-1])

    @property
    def saved(self) -> int:
        """Memory that is kept from forward to backward."""
        return round(self.other_micro_batches + sum(self.blocks) + self.ends + self.logits_saved)

    def of_model(self, num_blocks: int) -> Self:
        """Return these activations for a model with this number of blocks. If it is not the number
        of layers, what the layers save counts as saved outside of blocks."""
        if len(self.blocks) == num_blocks:
            return self
        return replace(self, blocks=(), ends=self.ends + sum(self.blocks))

    def of_stages(
        self, numbers: Collection[int], *, has_head: bool, num_unfinished: int, messages: int
    ) -> Self:
        """Return the activations of the pipeline stages of a rank.

        Args:
            numbers: the blocks of the stages.
            has_head: whether the last stage is among them.
            num_unfinished: number of micro-batches that are between forward and backward.
            messages: number of hidden states, or gradients of them, that exist in addition.
        """
        blocks = tuple(size if number in numbers else 0 for number, size in enumerate(self.blocks))
        others = (num_unfinished - 1) * sum(blocks) + messages * self.boundary
        if has_head:
            other_blocks = sum(self.blocks) - sum(blocks)
            peaks = tuple(others + peak - other_blocks for peak in self.peaks)
            return replace(self, blocks=blocks, other_micro_batches=others, peaks=peaks)
        return replace(
            self,
            blocks=blocks,
            ends=0.0,
            logits=0.0,
            logits_saved=0.0,
            other_micro_batches=others,
            peaks=(others + sum(blocks) + self.recomputed + self.temporary,),
        )


NO_ACTIVATIONS = Activations()


def language_activations(
    dims: LanguageDims,
    config: Config,
    tokens: float,
    labels: float,
    *,
    mask_bytes: int = 1,
    fused_attention: bool = True,
    longest: float = 0.0,
    joined: bool = True,
    low_weights: bool = False,
    matrices: TrainedMatrices | None = None,
    tensor_ranks: int = 1,
) -> Activations:
    """Estimate the activation memory of a micro-batch of ``tokens`` tokens, of which ``labels``
    have a loss.

    Args:
        mask_bytes: bytes per element of a dropout mask: 1 on accelerators, 4 on a CPU, where torch
            stores masks in float32.
        fused_attention: whether attention is computed without storing its scores.
        longest: number of tokens of the longest sample, which determines the size of attention
            scores.
        joined: whether the results of the samples of a packed row are joined by a copy, because
            they are not computed in one call.
        low_weights: whether the strategy stores or gathers trained weights in the low precision of
            the config, so that autocast makes no copies of them.
        matrices: default: none, because the strategy's cost counts what they add.
        tensor_ranks: number of ranks that split each layer.
    """
    args, dims = config.train_args, dims.split(tensor_ranks)
    # With sequence parallelism, each rank has a part of the tokens outside the split layers.
    token_parts = tensor_ranks if config.parallel.sequence_parallel else 1
    is_pure = args.weight_dtype == "bfloat16"
    low = 2 if args.mixed_dtype or is_pure else _FLOAT32
    low_weights = is_pure or (low_weights and low != _FLOAT32)
    frozen = config.lora.enable
    block = _Block(
        dims,
        config,
        low=low,
        # Autocast leaves the residual stream in the dtype of the embedding.
        stream=low if frozen or low_weights else _FLOAT32,
        autocasts=args.mixed_dtype is not None and not is_pure,
        mask_bytes=mask_bytes,
        is_split=tensor_ranks > 1,
    )
    attention = block.attention(joined) if fused_attention else block.eager_attention(longest)
    layer = block.norms() / token_parts + block.inputs() + attention + block.mlp()
    temporary: float = block.gradients()
    if frozen:
        stored = low if low_weights else _FLOAT32
        # A split layer multiplies its input by its part of a mask in the dtype of the adapter.
        row_mask_bytes = mask_bytes if tensor_ranks == 1 else stored
        layer += adapter_bytes(dims, config, low, mask_bytes, row_mask_bytes)
        temporary = max(temporary, adapter_temporary(dims, config, low, stored, tensor_ranks))
    temporary *= tokens
    sizes = _block_sizes(dims, config, layer, block.stream * dims.hidden / token_parts, low)
    blocks = tuple(round(size * tokens) for size in sizes)
    recomputed = 0.0 if args.gradient_checkpointing == "none" else layer
    recomputed = recomputed * tokens + layer_matrices(dims, config, low)
    head_input = 0 if frozen else low * dims.hidden * labels
    ends = block.norm(dims.hidden, block.stream) * tokens + head_input
    weights = _Weights.of(
        matrices or TrainedMatrices(),
        low,
        is_low=low_weights,
        recomputed_share=args.recomputed_share(dims.layers),
    )
    loss = _loss(dims, config, labels, low, low_weights)
    at_loss = in_backward = sum(blocks)
    if config.parallel.offloads_activations:
        # Those of the last block; then those of two blocks.
        at_loss, in_backward = blocks[-1], max(map(sum, zip(blocks, (0, *blocks), strict=False)))
    saved = at_loss + ends
    peaks = (
        saved + loss.forward + weights.block_copies + weights.head_copy,
        saved + loss.backward + weights.retained + (0 if loss.in_chunks else weights.head_copy),
        # The gradient of the head, and that of its input.
        saved
        + weights.retained
        + weights.head_copy
        + weights.gradient_bytes * weights.matrices.head
        + _FLOAT32 * dims.hidden * labels,
        # The first block that backward reaches.
        in_backward + recomputed + temporary + weights.during_block(dims.layers),
        weights.tied_gradients,
    )
    return Activations(
        blocks,
        recomputed,
        ends,
        loss.peak,
        loss.saved,
        temporary=temporary,
        boundary=block.stream * dims.hidden * tokens,
        peaks=peaks,
    )


@dataclass(frozen=True)
class _Block:
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
            return (_FLOAT32 if self.autocasts else input_bytes) * width
        scaled = _FLOAT32 if self.dims.float32_norms else input_bytes
        return (_FLOAT32 + (0 if self.frozen else scaled)) * width

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
            copies += 2 if dims.gated and not dims.fused_gate else 1
        return self.low * dims.hidden * copies

    def _query_norms(self) -> int:
        width = self.dims.queries + self.dims.keys
        return self.norm(width, self.low) if self.dims.normed_queries else 0

    def attention(self, joined: bool) -> float:
        """Return what a fused kernel saves: queries, keys, values, its result, and the sums of the
        rows in float32; and the results of the samples, if they are ``joined``."""
        dims = self.dims
        size = self.low * (2 * dims.queries + 2 * dims.keys) + _FLOAT32 * dims.heads
        if joined and self.config.train_args.packing is not False:
            size += self.low * dims.queries
        return size + self._query_norms()

    def eager_attention(self, longest: float) -> float:
        """Return what ``eager_attention_forward`` of transformers saves: queries, keys and values
        repeated for all heads, its result if the output projection is trained, and of each score
        the softmax in float32, its copy for the matrix product, and the ``tanh`` of a soft cap."""
        dims = self.dims
        score = _FLOAT32 + (self.low if self.low != _FLOAT32 else 0)
        score += self.low if dims.softcaps_scores else 0
        states = self.low * dims.queries * (3 if self.frozen else 4)
        return states + dims.heads * longest * score + self._query_norms()

    def mlp(self) -> int:
        """Return what the MLP saves. With a gate: both projections, the activation of the gate, and
        the product, if the down projection is trained. Liger's kernel computes the activation
        again."""
        dims = self.dims
        wide = dims.feed_forward * dims.experts_per_token
        product = 0 if self.frozen else self.low * wide
        if dims.gated:
            return self.low * wide * (2 if self.liger else 3) + product
        if not dims.composed_activation:
            return self.low * wide + product
        # NewGELUActivation: a power, which autocast computes in float32, tanh, a sum, and the half.
        chain = 3 * (_FLOAT32 if self.autocasts else self.low)
        return (chain + self.low) * wide + product

    def gradients(self) -> int:
        """Return the gradients in flight in the backward pass of the MLP: that of the residual
        stream and those of two inner results."""
        wide = self.dims.feed_forward * self.dims.experts_per_token
        return self.stream * self.dims.hidden + 2 * self.low * wide


@dataclass(frozen=True)
class _Weights:
    """What trained matrices add to the activations, in bytes.

    Autocast makes a low-precision copy of each float32 matrix. All copies exist at the end of the
    forward pass; of a recomputed block, only autocast refers to them, which then releases them.

    Args:
        block_copies, head_copy: these copies.
        retained: copies of the blocks that exist until their backward pass.
        gradient_bytes: bytes per element of a gradient when it is computed: in the dtype of the
            product, and cast to that of the weight.
        tied_gradients: at the end of backward, those of the head and the embedding, and their sum.
    """

    matrices: TrainedMatrices
    block_copies: int
    head_copy: int
    retained: float
    gradient_bytes: int
    tied_gradients: int
    held_gradient: int

    @classmethod
    def of(
        cls, matrices: TrainedMatrices, low: int, *, is_low: bool, recomputed_share: float
    ) -> Self:
        stored = low if is_low else _FLOAT32
        copied = low if stored != low else 0
        tied = stored * matrices.head if matrices.is_tied else 0
        return cls(
            matrices,
            block_copies=copied * matrices.blocks,
            head_copy=copied * matrices.head,
            retained=copied * matrices.blocks * (1 - recomputed_share),
            gradient_bytes=stored + copied,
            tied_gradients=3 * tied,
            held_gradient=tied,
        )

    def during_block(self, layers: int) -> float:
        """Return what exists during the backward pass of the last block: copies, the gradient of
        its largest matrix, and that of a tied head."""
        copies = max(self.retained, self.block_copies / layers)
        return copies + self.gradient_bytes * self.matrices.largest + self.held_gradient


@dataclass(frozen=True)
class _Loss:
    """Bytes that the loss needs at the end of forward and at the start of backward, and those that
    are kept in between."""

    forward: float
    backward: float
    saved: float
    in_chunks: bool

    @property
    def peak(self) -> float:
        return max(self.forward, self.backward)


def _loss(dims: LanguageDims, config: Config, labels: float, low: int, low_weights: bool) -> _Loss:
    """Return the memory of the loss and of the head's output."""
    frozen, width = config.lora.enable, dims.vocabulary
    output = low if low != _FLOAT32 else 0  # before it is cast to float32
    chunk = config.train_args.loss_chunk_tokens(width)
    if chunk is None or labels <= chunk:
        capped = low * width * labels if dims.softcaps_logits else 0
        saved = _FLOAT32 * width * labels  # log-probabilities
        forward = 2 * saved + output * width * labels
        return _Loss(forward + capped, 3 * saved + capped, saved + capped, in_chunks=False)
    # Gradients in float32, which the loss has already computed.
    saved = _FLOAT32 * dims.hidden * (labels + (0 if frozen else width))
    # A soft cap computes the quotient and its tanh.
    copies, in_float32 = 3 if dims.softcaps_logits else 1, _FLOAT32 * width * chunk
    if output:
        in_float32 = min(in_float32, FLOAT_LOGITS_BYTES)
    # Backward casts gradients to the dtype of the weights.
    cast = low * dims.hidden * width if low_weights and not frozen else 0
    logits = output * width * chunk + copies * in_float32
    return _Loss(saved + logits, saved + cast, saved, in_chunks=True)


def _block_sizes(
    dims: LanguageDims, config: Config, layer: float, inputs: float, low: int
) -> list[float]:
    """Return the bytes per token that each block saves for backward.

    Args:
        layer: bytes that a block saves without activation checkpointing.
        inputs: bytes of the input of a block, which every checkpointed block saves.
    """
    setting = config.train_args.gradient_checkpointing
    if setting == "none":
        return [layer] * dims.layers
    if setting == "selective":
        return [inputs + _products(dims, config, low)] * dims.layers
    every = setting if isinstance(setting, int) else 1
    return [layer if number % every else inputs for number in range(dims.layers)]


def _products(dims: LanguageDims, config: Config, low: int) -> float:
    """Return the bytes per token of the results of matrix products and attention of a layer. Of
    an adapter, the first product is stored; the second is cheap."""
    wide = dims.feed_forward * dims.experts_per_token * (2 if dims.gated else 1)
    outputs = 2 * dims.queries + 2 * dims.keys + wide + 2 * dims.hidden
    adapters = config.lora.rank * len(adapted_layers(dims, config)) if config.lora.enable else 0
    return low * (outputs + adapters) + _FLOAT32 * dims.heads

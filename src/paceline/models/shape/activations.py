"""Estimate the activation memory of a language model from its config.json. Imports no torch.

The estimate follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), section 4: each operation saves its inputs. Their formula for a layer, ``sbh(34 +
5as/h)`` bytes, assumes 2-byte activations, dropout, an ungated MLP of width 4h and attention with
stored scores. Here the widths are the model's own (gated MLP, grouped keys and values), fused
attention stores no scores (their section 5; Dao et al., "FlashAttention", 2022, section 3.1), norms
compute in float32, and a frozen weight saves no input (Hu et al., "LoRA", 2021).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from paceline.config.schema import Config
from paceline.models.shape.adapter_memory import NO_EXPERTS, MergedExperts, layer_matrices
from paceline.models.shape.block_memory import FLOAT32_BYTES, BlockMemory
from paceline.models.shape.dims import LanguageDims
from paceline.models.shape.expert_memory import ExpertMoments, ExpertRows
from paceline.models.shape.layer_memory import LayerMemory
from paceline.models.shape.loss_memory import NO_LOSS, LossMemory, loss_memory
from paceline.models.shape.record import ModelShape, modules_around


@dataclass(frozen=True)
class TrainedMatrices:
    """The trained matrices that a rank holds in full, as numbers of elements.

    Args:
        blocks, largest: sizes of all blocks, and of their largest matrix.
        largest_fused, smallest_fused: the largest and the smallest parameter of fused experts, of
             the first and of the second product. Autocast does not copy them.
        num_blocks: number of blocks with trained matrices.
        head: values of the output head.
        tied: size of the weight that the head shares with the token embedding, else 0.
    """

    blocks: int = 0
    largest: int = 0
    largest_fused: int = 0
    smallest_fused: int = 0
    num_blocks: int = 0
    head: int = 0
    tied: int = 0


def trained_matrices(shape: ModelShape) -> TrainedMatrices:
    """Return the trained matrices of a rank that holds ``shape`` in full."""
    return shape.memoize("trained matrices", lambda: _trained_matrices(shape))


def _trained_matrices(shape: ModelShape) -> TrainedMatrices:
    blocks, aliases, phases = set(shape.blocks), set(shape.aliases.values()), shape.phases or {}
    inside, around, head, tied = [0], set(), 0, 0
    fused: list[int] = []
    for tensor in shape.trained:
        if len(tensor.shape) < 2:
            continue
        if block := blocks.intersection(modules_around(tensor.name)):
            (fused if tensor.is_fused else inside).append(tensor.numel)
            around |= block
        elif tensor.name in aliases:
            head = tied = max(head, tensor.numel)
        elif "after" in phases.get(tensor.name, ()):
            head = max(head, tensor.numel)
    return TrainedMatrices(
        sum(inside),
        max(inside),
        max(fused, default=0),
        min(fused, default=0),
        len(around),
        head,
        tied,
    )


@dataclass(frozen=True)
class WeightPrecision:
    """How trained matrices are stored and computed with.

    Autocast makes a low-precision copy of each float32 matrix. All copies exist at the end of the
    forward pass; of a recomputed block, only autocast refers to them, which then releases them.

    Args:
        stored_bytes: bytes per element of a matrix and of its gradient.
        copied_bytes: bytes per element of its copy; 0 without copies.
        recomputed: share of the blocks that are recomputed.
    """

    stored_bytes: int = 0
    copied_bytes: int = 0
    recomputed: float = 0.0

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of a gradient when it is computed: in the dtype of the product, and
        cast to the dtype of the weight."""
        return self.stored_bytes + self.copied_bytes


@dataclass(frozen=True)
class Activations:
    """Activation memory in bytes for one micro-batch.

    Args:
        blocks: saved by each block from its forward pass to its backward pass.
        repeated: needed to recompute each block, and to compute one layer with a quantized weight
            or DoRA; empty without any of these.
        ends: saved by the layers outside the blocks: the last norm and the head.
        loss: needed for the loss, when all other activations exist.
        temporary: what a block allocates and frees in its forward or backward pass; of a mixture,
            outside of the experts.
        experts: what the backward pass of a layer of experts needs; None in a dense model.
        dense_layers: numbers of the layers of a mixture that have no experts.
        in_forward: what the forward pass of a block with experts allocates and frees.
        boundary: the hidden states that a block passes to the next.
        precision: precision of the trained matrices.
        offloads: whether the blocks' activations are in host memory between forward and backward,
            except the activations of the last block.
        num_unfinished: number of micro-batches that are between forward and backward.
        messages: number of hidden states between pipeline stages, or of their gradients, that exist
            in addition.
        has_embedding, has_head: whether the rank runs the first and the last pipeline stage.
    """

    blocks: tuple[int, ...] = ()
    repeated: tuple[float, ...] = ()
    ends: float = 0.0
    loss: LossMemory = NO_LOSS
    temporary: float = 0.0
    experts: ExpertMoments | None = None
    dense_layers: tuple[int, ...] = ()
    in_forward: float = 0.0
    boundary: float = 0.0
    precision: WeightPrecision = WeightPrecision()
    offloads: bool = False
    num_unfinished: int = 1
    messages: int = 0
    has_embedding: bool = True
    has_head: bool = True

    def peak(self, matrices: TrainedMatrices = TrainedMatrices()) -> int:
        """Return the peak memory of a step on a rank that holds ``matrices`` in full, with the
        copies that autocast makes of them, and gradients that are not accumulated yet."""
        precision, loss = self.precision, self.loss
        head = matrices.head if self.has_head else 0
        head_copy = precision.copied_bytes * head
        block_copies = precision.copied_bytes * matrices.blocks
        retained = block_copies * (1 - precision.recomputed)
        in_block = max(retained, block_copies / max(1, matrices.num_blocks))
        tied = precision.stored_bytes * matrices.tied
        others = self.other_micro_batches + (self.num_unfinished - 1) * (retained + head_copy)
        saved = others + self.at_loss + self.ends
        moments = (
            saved + loss.forward + block_copies + head_copy,
            saved + loss.backward + retained + (0 if loss.in_chunks else head_copy),
            # In the last layer of experts.
            others + self.at_loss + block_copies + self.in_forward,
            # The gradient of the head, and the gradient of its input.
            saved + retained + head_copy + precision.gradient_bytes * head + loss.input_gradient,
            # The first block that backward reaches. A tied head keeps its gradient until the
            # gradient of the embedding is added.
            others
            + self.in_backward
            + in_block
            + self.of_block(
                precision.gradient_bytes * matrices.largest,
                precision.stored_bytes * matrices.smallest_fused,
                precision.stored_bytes * matrices.largest_fused,
            )
            + (tied if self.has_embedding and self.has_head else 0),
            # For a tied weight: both gradients and their sum, or the gradients of two pipeline
            # stages.
            3 * tied,
        )
        return round(max(moments))

    def of_block(self, largest: float, down: float, up: float) -> float:
        """Return the peak of what the backward pass of a block needs beyond what it saved.

        Args:
            largest: bytes of the largest gradient outside of experts.
            down, up: bytes of the gradients of experts when their second and their first product
                are computed.
        """
        if self.experts is None:
            return self.temporary + max(largest, up)
        rest = self.temporary + largest - self.experts.saved
        return max(rest, self.boundary + self.experts.peak(down, up))

    def of_layer(self, number: int) -> Self:
        """Return these activations for the backward pass of a layer."""
        experts = None if number in self.dense_layers else self.experts
        here = slice(number, number + 1)
        return replace(
            self, experts=experts, blocks=self.blocks[here], repeated=self.repeated[here]
        )

    @property
    def recomputed(self) -> float:
        """What the recomputation of a block needs at most."""
        return max(self.repeated, default=0.0)

    @property
    def in_repeated_experts(self) -> float:
        """What the repeated forward pass of a layer of experts needs beyond what its block saves,
        if backward repeats the layer before it begins with it."""
        if self.experts is None or not self.experts.repeating:
            return -self.recomputed
        return self.boundary + self.experts.repeating

    @property
    def at_loss(self) -> int:
        """What the blocks have saved on the device when the loss is computed."""
        return sum(self.blocks[-1:] if self.offloads else self.blocks)

    @property
    def in_backward(self) -> float:
        """What the blocks have saved on the device when backward reaches them, and what it needs to
        recompute the block that it reaches: if activations are offloaded, the activations of a
        block, and the activations of the block before it, which are copied back."""
        if self.offloads:
            pairs = zip(self.blocks, (0, *self.blocks), strict=False)
            return max(map(sum, pairs), default=0) + self.recomputed
        if not self.blocks:
            return self.recomputed
        repeated = self.repeated or (0.0,) * len(self.blocks)
        reached = zip(self.blocks, accumulate(self.blocks), repeated, strict=True)
        return max(saved + needed for own, saved, needed in reached if own or not saved)

    @property
    def other_micro_batches(self) -> float:
        """What the micro-batches have saved that a pipeline has started before this one, and
        messages between its stages."""
        saved = sum(self.blocks) + self.ends + self.loss.saved
        return (self.num_unfinished - 1) * saved + self.messages * self.boundary

    @property
    def on_device(self) -> tuple[int, ...]:
        """The blocks' memory on the device. If activations are offloaded: when backward begins,
        the last block's memory is there, and the memory of the block before it is copied back."""
        if not self.offloads:
            return self.blocks
        return tuple(0 for _ in self.blocks[:-2]) + self.blocks[-2:]

    @property
    def on_host(self) -> int:
        """Host memory if activations are offloaded. The last block's are not."""
        return sum(self.blocks[:-1])

    @property
    def saved(self) -> int:
        """Memory that is kept from forward to backward."""
        return round(self.other_micro_batches + sum(self.blocks) + self.ends + self.loss.saved)

    def of_model(self, num_blocks: int) -> Self:
        """Return these activations for a model with this number of blocks. If it is not the number
        of layers, what the layers save counts as saved outside of blocks."""
        if len(self.blocks) == num_blocks:
            return self
        return replace(self, blocks=(), ends=self.ends + self.at_loss)

    def of_stages(
        self,
        numbers: Collection[int],
        *,
        has_embedding: bool,
        has_head: bool,
        num_unfinished: int,
        messages: int,
    ) -> Self:
        """Return the activations of the pipeline stages of a rank.

        Args:
            numbers: the blocks of the stages.
            has_embedding, has_head: whether the first and the last stage are among them.
            num_unfinished: number of micro-batches that are between forward and backward.
            messages: number of hidden states, or gradients of them, that exist in addition.
        """
        stages = replace(
            self,
            blocks=tuple(
                size if number in numbers else 0 for number, size in enumerate(self.blocks)
            ),
            num_unfinished=num_unfinished,
            messages=messages,
            has_embedding=has_embedding,
            has_head=has_head,
        )
        return stages if has_head else replace(stages, ends=0.0, loss=NO_LOSS)


NO_ACTIVATIONS = Activations()


def language_activations(
    dims: LanguageDims,
    config: Config,
    tokens: float,
    labels: float,
    *,
    mask_bytes: int = 1,
    device_type: str = "cuda",
    fused_attention: bool = True,
    row: float = 0.0,
    joined: bool = True,
    low_weights: bool = False,
    tensor_ranks: int = 1,
    splits_head: bool = False,
    sequence_parallel: bool = False,
    merged: MergedExperts = NO_EXPERTS,
    expert_ranks: int = 1,
) -> Activations:
    """Estimate the activation memory of a micro-batch of ``tokens`` tokens, ``labels`` of
    them with a loss, on a rank that runs the full model.

    Args:
        mask_bytes: bytes per element of a dropout mask: 1 on accelerators, 4 on a CPU, where torch
            stores masks in float32.
        device_type: type of the device, on which the chunks of the loss depend.
        fused_attention: whether attention is computed without storing its scores.
        row: number of tokens of a row; attention that is not fused stores all scores of a row.
        joined: whether the results of the samples of a packed row are joined by a copy, because
            they are not computed in one call.
        low_weights: whether the strategy stores or gathers trained weights in the low precision of
            the config, so that autocast makes no copies of them.
        tensor_ranks: number of ranks that split each layer.
        splits_head: whether they split the head by the rows of the vocabulary.
        sequence_parallel: whether they divide the tokens outside the split layers.
        merged: what adapters of fused experts need in a layer.
        expert_ranks: number of ranks that divide the experts.
    """
    args, dims = config.train_args, dims.split(tensor_ranks)
    head_parts = tensor_ranks if splits_head else 1
    is_pure = args.weight_dtype == "bfloat16"
    low = 2 if args.mixed_dtype or is_pure else FLOAT32_BYTES
    low_weights = is_pure or (low_weights and low != FLOAT32_BYTES)
    stored, copied = (low, 0) if low_weights or low == FLOAT32_BYTES else (FLOAT32_BYTES, low)
    merged = merged.split(tensor_ranks * expert_ranks)
    block = _block_memory(dims, config, low, low_weights, mask_bytes, tensor_ranks)
    rows = _expert_rows(block, merged, expert_ranks) if dims.experts > 1 else None
    layers = LayerMemory(
        block,
        rows,
        merged,
        tokens,
        row=None if fused_attention else row,
        joined=joined,
        # With sequence parallelism, each rank has a part of the tokens outside the split layers.
        token_parts=tensor_ranks if sequence_parallel else 1,
        # A split layer multiplies its input by its part of a mask in the dtype of the adapter.
        row_mask_bytes=mask_bytes if tensor_ranks == 1 else stored,
    )
    recomputes, matrices = args.recomputation != "none", layer_matrices(dims, config, low)
    head_input = 0 if config.lora.enable else low * dims.hidden * labels
    activations = Activations(
        blocks=tuple(map(round, layers.saved_by_layer())),
        repeated=tuple(recomputes * size + matrices for size in layers.layers),
        dense_layers=dims.dense_layers,
        ends=block.norm(dims.hidden, block.stream) * tokens + head_input,
        loss=loss_memory(dims, config, labels, low, low_weights, device_type, head_parts),
        temporary=layers.temporary(stored, tensor_ranks),
        boundary=block.stream * dims.hidden * tokens,
        precision=WeightPrecision(stored, copied, args.recomputed_share(dims.layers)),
        offloads=config.parallel.offloads_activations,
    )
    if rows is None:
        return replace(activations, temporary=activations.temporary + merged.gradient)
    # Attention is computed before the experts have saved anything.
    scores = 0.0 if fused_attention else block.scores_in_forward(row)
    in_forward = max(rows.in_forward, scores - rows.saved)
    repeated = in_forward if recomputes else None
    experts = rows.in_backward(tokens, merged, repeated, block.after_experts())
    return replace(activations, experts=experts, in_forward=in_forward * tokens)


def _block_memory(
    dims: LanguageDims,
    config: Config,
    low: int,
    low_weights: bool,
    mask_bytes: int,
    tensor_ranks: int,
) -> BlockMemory:
    args = config.train_args
    return BlockMemory(
        dims,
        config,
        low=low,
        # Autocast leaves the residual stream in the dtype of the embedding.
        stream=low if config.lora.enable or low_weights else FLOAT32_BYTES,
        autocasts=args.mixed_dtype is not None and args.weight_dtype != "bfloat16",
        mask_bytes=mask_bytes,
        is_split=tensor_ranks > 1,
    )


def _expert_rows(block: BlockMemory, merged: MergedExperts, expert_ranks: int) -> ExpertRows:
    return ExpertRows(
        block.dims,
        block.stream,
        block.low,
        are_trained=not block.frozen or merged.saved > 0,
        are_exchanged=expert_ranks > 1,
        autocasts=block.autocasts,
    )

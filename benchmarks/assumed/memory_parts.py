"""The bytes of a set-up on the rank that needs most, by their kind. Imports no torch.

The training state follows Rajbhandari et al., "ZeRO", 2020, section 3.1; activations follow
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section
4: each operation saves its inputs, and sequence parallelism divides those outside the split layers.
"""

from dataclasses import dataclass

from paceline.planner.setup import TrainingSetup

_LOW, _FLOAT32 = 2, 4
_MOMENTS = {"adamw": 8.0, "adamw-bf16": 4.0, "adamw-8bit": 2.03, "adamw-4bit": 1.06}


@dataclass(frozen=True)
class AssumedMemory:
    """Bytes on a rank. All fields are numbers, so that a fit can evaluate many set-ups at once.

    Args:
        weights, gradients, optimizer: the training state.
        gathered: weights and gradients of ZeRO-3 that exist in full at the peak.
        activations: saved from forward to backward.
        temporary: bytes of the block that is recomputed, or of the logits, which exist at
            other times.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    temporary: float


def memory_parts(setup: TrainingSetup) -> AssumedMemory:
    """Return what a rank of the first pipeline stage holds, which has most micro-batches between
    forward and backward, with a head if there is one stage."""
    layer = layer_bytes(setup)
    unfinished = float(min(setup.micro_batches, setup.pipeline)) if setup.pipeline > 1 else 1.0
    if setup.chunks > 1:
        unfinished *= 1 + (setup.pipeline - 1) / (setup.pipeline * setup.chunks)
    kept = _kept_bytes(setup, layer) * setup.tokens * setup.stage_layers * unfinished
    if "activations" in setup.offload:
        kept = 2 * layer * setup.tokens
    repeats = setup.recompute in ("full", "selective", "alternate-products")
    return AssumedMemory(
        weights=_weights(setup),
        gradients=_gradients(setup),
        optimizer=_optimizer(setup),
        gathered=_gathered(setup),
        activations=kept,
        temporary=max(layer * setup.tokens if repeats else 0.0, _logits(setup)),
    )


def _shards(setup: TrainingSetup, stage: int) -> int:
    """Return the ranks that divide what ZeRO divides from ``stage`` on."""
    return setup.shard * setup.context if setup.zero_stage >= stage else 1


def _frozen_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of the frozen weights; embedding, head and norms are not quantized."""
    layers = setup.stage_layers * (setup.layer_parameters + setup.expert_parameters) / setup.tensor
    rest = setup.stage_parameters + setup.stage_expert_parameters - layers
    each = setup.frozen_bits / 8 + (0.06 if setup.frozen_bits < 16 else 0)
    return layers * each + _LOW * rest


def _weights(setup: TrainingSetup) -> float:
    trained = setup.trained_parameters
    if setup.is_frozen:
        return (_frozen_bytes(setup) + setup.weight_bytes * trained) / _shards(setup, 3)
    if "weights" in setup.offload:
        return _LOW * 3 * trained / setup.dims.layers
    if setup.low_copy:
        return _LOW * trained / _shards(setup, 3)
    return setup.weight_bytes * trained / _shards(setup, 3)


def _gradients(setup: TrainingSetup) -> float:
    return setup.gradient_bytes * setup.trained_parameters / _shards(setup, 2)


def _optimizer(setup: TrainingSetup) -> float:
    """Return moments, and float32 weights that exist beside a copy in 16 bit."""
    if "optimizer" in setup.offload:
        return 0.0
    each = _MOMENTS[setup.optimizer] + (_FLOAT32 if setup.low_copy else 0)
    return each * setup.trained_parameters / _shards(setup, 1)


def _gathered(setup: TrainingSetup) -> float:
    """Return the blocks that ZeRO-3 has gathered (the current one and the next), the gradients of
    one, and the embedding and the head, which stay gathered."""
    if setup.zero_stage < 3 or setup.shard * setup.context == 1:
        return 0.0
    block = (setup.layer_parameters + setup.expert_parameters / setup.expert) / setup.tensor
    tables = (1 if setup.dims.tied else 2) * setup.table_parameters
    parts = setup.tensor if setup.splits_head else 1
    gradients = 0 if setup.is_frozen else setup.reduce_bytes + setup.element_bytes
    return (2 * setup.element_bytes + gradients) * block + setup.element_bytes * tables / parts


def layer_bytes(setup: TrainingSetup) -> float:
    """Return the bytes per token that a layer saves without recomputation."""
    dims, tensor = setup.dims, setup.tensor
    is_fused = setup.software in ("fused", "native", "compiled")
    token_parts = tensor if setup.sequence_parallel else 1
    wide = dims.feed_forward * dims.experts_per_token / tensor
    states = (dims.queries + 2 * dims.keys) / tensor
    hidden = dims.norms * _norm_bytes(setup, is_fused)
    if not setup.is_frozen:
        hidden += dims.norms * setup.element_bytes * dims.hidden
    attention = (
        setup.element_bytes * (states + dims.queries / tensor) + _FLOAT32 * dims.heads / tensor
    )
    if dims.rotates and not is_fused:
        attention += setup.element_bytes * (dims.queries + dims.keys) / tensor
    inner = (
        (3 if dims.gated and not is_fused else 2 if dims.gated else 1) * setup.element_bytes * wide
    )
    if not setup.is_frozen:
        inner += setup.element_bytes * wide
    adapters = 3 * setup.element_bytes * (dims.hidden + wide) if setup.is_frozen else 0.0
    return hidden / token_parts + attention + inner + adapters


def _norm_bytes(setup: TrainingSetup, is_fused: bool) -> float:
    """Return what a norm saves: its input; root-mean-square norms of several operations also save
    the input in float32 and the normed states."""
    dims = setup.dims
    if is_fused or dims.layer_norms:
        return setup.element_bytes * dims.hidden
    return (_FLOAT32 + setup.element_bytes) * dims.hidden


def _kept_bytes(setup: TrainingSetup, layer: float) -> float:
    """Return the bytes per token and layer that are kept for backward."""
    dims = setup.dims
    token_parts = setup.tensor if setup.sequence_parallel else 1
    inputs = setup.element_bytes * dims.hidden / token_parts
    if setup.recompute == "full":
        return inputs * setup.recompute_share + layer * (1 - setup.recompute_share)
    wide = dims.feed_forward * dims.experts_per_token * (2 if dims.gated else 1)
    outputs = 2 * dims.queries + 2 * dims.keys + wide
    products = (
        setup.element_bytes * outputs / setup.tensor
        + 2 * setup.element_bytes * dims.hidden / token_parts
    )
    if setup.recompute == "selective":
        return inputs + products
    if setup.recompute == "alternate-products":
        return inputs + products / 2 + setup.element_bytes * dims.queries / setup.tensor
    return layer


def _logits(setup: TrainingSetup) -> float:
    """Return the bytes of the logits, their copy in float32, and the gradients of both; a fused
    loss writes the gradient where the logits were, a compiled one computes in registers. In
    chunks, the logits of 1,024 tokens exist."""
    tokens = setup.tokens * setup.label_share
    width = setup.dims.vocabulary / (setup.tensor if setup.splits_head else 1)
    if setup.cross_entropy == "chunked":
        return 2 * _FLOAT32 * width * min(tokens, 1024)
    copies = 0 if setup.precision == "float32" else 2 * _FLOAT32
    low = setup.element_bytes
    each = {"plain": 2 * low + copies, "fused": low + copies / 2, "compiled": low}[
        setup.cross_entropy
    ]
    if setup.pipeline > 1:
        return 0.0
    return each * width * tokens

"""Estimate the activation memory and the FLOPs of a language model from its config.json. Imports no
torch.

The estimate follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), section 4: each operation saves its inputs. Their formula for a layer, ``sbh(34 +
5as/h)`` bytes, assumes 2-byte activations, dropout, an ungated MLP of width 4h and attention with
stored scores. Here the widths are those of the model (gated MLP, grouped keys and values), fused
attention stores no scores (their section 5; Dao et al., "FlashAttention", 2022, section 3.1), norms
compute in float32, and a frozen weight saves no input (Hu et al., "LoRA", 2021).
"""

import re
from dataclasses import dataclass
from functools import partial

from paceline.config.schema import Config
from paceline.models.json_config import JsonObject, first_number, language_fields

#: Model types whose MLP is two layers without a gate.
_UNGATED = {
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "codegen", "phi",
    "starcoder2", "gpt_bigcode", "xglm", "biogpt", "nemotron",
}  # fmt: skip
#: Model types that apply a norm to queries and keys.
_NORMED_QUERIES = {"qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3", "smollm3"}
_FLOAT32 = 4


@dataclass(frozen=True)
class LanguageDims:
    """Widths of a decoder-only language model.

    Args:
        queries, keys: output widths of the query projection and of the key (and value) projection:
            number of heads × head size.
        feed_forward: inner width of the MLP, or of one expert.
        experts, experts_per_token: number of experts, and of those that process a token; 1 and 1 in
            a dense model.
        gated: whether the MLP has a gate in addition to its up projection.
        tied: whether the output head shares its weight with the token embedding.
        positions: number of learned position embeddings, or 0.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    feed_forward: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    experts: int = 1
    experts_per_token: int = 1
    positions: int = 0
    normed_queries: bool = False

    @property
    def attention_weights(self) -> int:
        """Number of parameters of the attention projections of one layer, without biases."""
        return 2 * self.hidden * (self.queries + self.keys)

    @property
    def expert_weights(self) -> int:
        """Number of parameters of one MLP (or one expert), without biases."""
        return (3 if self.gated else 2) * self.hidden * self.feed_forward

    @property
    def parameters_at_most(self) -> int:
        """Upper bound on the number of parameters, including biases and norms."""
        layer = self.attention_weights + self.experts * (self.expert_weights + self.hidden)
        small = (
            8 * self.hidden
            + 4 * self.queries
            + 4 * self.keys
            + 2 * self.feed_forward * self.experts
        )
        tables = (1 if self.tied else 2) * self.vocabulary + self.positions + 2
        return self.layers * (layer + small) + tables * self.hidden


def dims_of(config: JsonObject) -> LanguageDims | None:
    """Return the widths in a config.json, or None if it does not describe a supported decoder."""
    config = language_fields(config)
    number = partial(first_number, config)
    hidden = number("hidden_size", "n_embd", "d_model")
    layers = number("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads, vocabulary = number("num_attention_heads", "n_head", "n_heads"), number("vocab_size")
    if hidden is None or layers is None or heads is None or vocabulary is None:
        return None
    kind = str(config.get("model_type", ""))
    key_heads = number("num_key_value_heads") or heads
    size = number("head_dim") or hidden // heads or 1
    experts = number("num_local_experts", "num_experts", "n_routed_experts") or 1
    inner = number("intermediate_size", "n_inner", "ffn_dim", "inner_dim") or 4 * hidden
    tied = config.get("tie_word_embeddings")
    return LanguageDims(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        queries=heads * size,
        keys=key_heads * size,
        feed_forward=(number("moe_intermediate_size") or inner) if experts > 1 else inner,
        vocabulary=vocabulary,
        gated=kind not in _UNGATED,
        tied=bool(tied) if tied is not None else kind in ("gpt2", "gemma", "gemma2", "gemma3_text"),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", "num_experts_per_token") or 1,
        positions=(
            (number("n_positions", "max_position_embeddings") or 0)
            if kind in ("gpt2", "opt")
            else 0
        ),
        normed_queries=kind in _NORMED_QUERIES,
    )


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
    """

    blocks: tuple[int, ...]
    recomputed: float
    ends: float
    logits: float
    logits_saved: float

    @property
    def total(self) -> int:
        """Peak memory: at the start of backward, or during the recomputation of the last block,
        when the logits have been freed."""
        return round(sum(self.blocks) + self.ends + max(self.logits, self.recomputed))

    @property
    def saved(self) -> int:
        """Memory that is kept from forward to backward."""
        return round(sum(self.blocks) + self.ends + self.logits_saved)


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
    """
    args = config.train_args
    is_pure = args.weight_dtype == "bfloat16"
    low = 2 if args.mixed_dtype or is_pure else _FLOAT32
    frozen = config.lora.enable
    # Autocast leaves the residual stream in float32; with frozen weights in low precision it is in
    # low precision too, as with trained weights in low precision.
    stream = low if frozen or is_pure else _FLOAT32
    # Liger's kernel saves the input of a norm as it is.
    liger = args.use_liger_kernel
    norm = stream * dims.hidden if liger else _norm(dims.hidden, frozen)
    # Inputs of the projections: in float32 one copy for all of them; autocast casts one for each.
    copies = 2 if is_pure or low == _FLOAT32 else 5 if dims.gated else 4
    inputs = 0 if frozen else low * dims.hidden * copies
    # queries, keys, values, result; row sums
    attention: float = low * (2 * dims.queries + 2 * dims.keys) + _FLOAT32 * dims.heads
    if joined and args.packing is not False:
        attention += low * dims.queries  # the samples' results, joined
    if dims.normed_queries:
        width = dims.queries + dims.keys
        attention += low * width if liger else _norm(width, frozen)
    if not fused_attention:
        # Scores after the softmax, and a copy of them in the dtype of the inputs.
        attention += dims.heads * longest * 2 * low
    wide = dims.feed_forward * dims.experts_per_token
    inner = (3 if frozen else 4) if dims.gated else (1 if frozen else 2)
    if dims.gated and liger:
        inner -= 1  # the activation of the gate is computed again in backward
    layer: float = 2 * norm + inputs + attention + low * inner * wide
    if frozen:
        layer += _adapters(dims, config, low, mask_bytes)
    sizes = _block_sizes(dims, config, layer, stream * dims.hidden, low)
    recomputed = 0.0 if args.gradient_checkpointing == "none" else layer
    head_input = 0 if frozen else low * dims.hidden * labels
    ends = norm * tokens + head_input
    chunk = args.loss_chunk_tokens(dims.vocabulary)
    if chunk is None or labels <= chunk:
        logits_saved: float = _FLOAT32 * dims.vocabulary * labels  # log-probabilities
        logits = 3 * logits_saved
    else:
        # The gradients that the loss has already computed.
        logits_saved = _FLOAT32 * dims.hidden * (labels + (0 if frozen else dims.vocabulary))
        # A chunk in float32 and, for matrix products, in the dtype of the inputs.
        per_logit = _FLOAT32 + (low if low != _FLOAT32 else 0)
        logits = logits_saved + per_logit * dims.vocabulary * chunk
    blocks = tuple(round(size * tokens) for size in sizes)
    recomputed = recomputed * tokens + _matrices(dims, config, low)
    return Activations(blocks, recomputed, ends, logits, logits_saved)


def _matrices(dims: LanguageDims, config: Config, low: int) -> float:
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


def language_flops(
    dims: LanguageDims,
    config: Config,
    tokens: float,
    labels: float,
    sample_tokens: float,
    *,
    with_recomputation: bool = True,
) -> float:
    """Estimate the FLOPs of forward and backward over a micro-batch.

    A weight that multiplies each token takes 2 FLOPs in the forward pass, 2 for the gradient of its
    input and 2 for its own gradient (Kaplan et al., "Scaling Laws for Neural Language Models",
    2020, section 2.1: 6 per parameter and token). With adapters, frozen weights have no gradient
    (4); recomputation adds a forward pass (8; Korthikanti et al., 2022, appendix A). The two matrix
    products of attention take 4 × queries × attended tokens (on average half of the sample), and
    twice that in the backward pass.

    Args:
        tokens: number of tokens in the micro-batch.
        labels: number of tokens that the head processes.
        sample_tokens: number of tokens in a sample.
        with_recomputation: whether to count the forward pass that activation checkpointing repeats.
    """
    weights = dims.attention_weights + dims.experts_per_token * dims.expert_weights
    args = config.train_args
    again = 0.0  # selective checkpointing repeats no large matrix product
    if with_recomputation and args.gradient_checkpointing != "selective":
        again = args.recomputed_share(dims.layers)
    passes = (2 if config.lora.enable else 3) + again
    attention = 4 * dims.queries * sample_tokens / 2 * (3 + again)
    head = 2 * dims.hidden * dims.vocabulary * (2 if config.lora.enable else 3)
    return dims.layers * tokens * (2 * weights * passes + attention) + labels * head


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
    adapters = config.lora.rank * len(_adapted(dims, config)) if config.lora.enable else 0
    return low * (outputs + adapters) + _FLOAT32 * dims.heads


def _norm(width: int, frozen: bool) -> int:
    """Return the bytes per token that a root-mean-square norm saves in float32: its input and its
    result before scaling, or only its input if it is frozen."""
    return _FLOAT32 * width * (1 if frozen else 2)


def _adapted(dims: LanguageDims, config: Config) -> dict[str, int]:
    """Return the input width of each linear layer of a block that has an adapter."""
    layers = {
        "q_proj": dims.hidden, "k_proj": dims.hidden, "v_proj": dims.hidden, "o_proj": dims.queries,
        "up_proj": dims.hidden, "gate_proj": dims.hidden,
        "down_proj": dims.feed_forward * dims.experts_per_token,
    }  # fmt: skip
    named = config.lora.target_modules
    if isinstance(named, str) and named != "all-linear":
        places = [
            f"model.layers.{index}.{part}."
            for index in range(dims.layers)
            for part in ("self_attn", "mlp")
        ]
        named = [
            name for name in layers if any(re.fullmatch(named, place + name) for place in places)
        ]
    if isinstance(named, list):
        targets = {target.rpartition(".")[2] for target in named}
        selected = {name: width for name, width in layers.items() if name in targets}
        layers = selected or layers
    return layers


def _adapters(dims: LanguageDims, config: Config, low: int, mask_bytes: int) -> float:
    """Return the bytes per token that the adapters of one layer save: each saves its input (with
    dropout, a separate copy and a mask) and ``lora.rank`` numbers."""
    lora, layers = config.lora, _adapted(dims, config)
    if lora.dropout > 0:
        inputs = sum((low + mask_bytes) * width for width in layers.values())
    else:  # q, k and v share one input, and so do gate and up
        groups = (
            {"q_proj", "k_proj", "v_proj"},
            {"up_proj", "gate_proj"},
            {"o_proj"},
            {"down_proj"},
        )
        inputs = sum(
            low * max(layers[name] for name in group & layers.keys())
            for group in groups
            if group & layers.keys()
        )
    # DoRA scales the results of the layer and of the adapter; VeRA scales two results of its own.
    outputs = {
        "q_proj": dims.queries, "k_proj": dims.keys, "v_proj": dims.keys, "o_proj": dims.hidden,
        "up_proj": dims.feed_forward, "gate_proj": dims.feed_forward, "down_proj": dims.hidden,
    }  # fmt: skip
    scaled = (2 if lora.use_dora else 0) + (1 if lora.method == "vera" else 0)
    ranks = lora.rank * (2 if lora.method == "vera" else 1)
    return inputs + low * ranks * len(layers) + low * scaled * sum(outputs[name] for name in layers)

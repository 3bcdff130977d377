"""What a language model keeps for backward and computes, from the numbers in its config.json.
No torch here.

The model is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), section 4: each operation keeps its inputs. Their layer of ``sbh(34 + 5as/h)`` bytes
is one of 2-byte activations, dropout, an ungated MLP of width 4h and attention whose scores are
stored. Here the widths are the model's own (gated MLP, grouped keys and values), fused attention
stores no scores (their section 5; Dao et al., "FlashAttention", 2022, section 3.1), the norms
compute in float32, and a frozen weight keeps no input of its own (Hu et al., "LoRA", 2021).
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
#: Model types that normalise queries and keys.
_NORMED_QUERIES = {"qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3", "smollm3"}
_FLOAT32 = 4


@dataclass(frozen=True)
class LanguageDims:
    """Widths of a decoder-only language model.

    Args:
        queries, keys: outputs of the query projection, and of the key (and value) projection: heads
            × head size.
        feed_forward: inner width of the MLP, of one expert where there are several.
        experts, experts_per_token: 1 and 1 in a dense model.
        gated: the MLP has a gate beside its up projection.
        tied: the output head is the token embedding.
        positions: rows of a learned table of positions, 0 without one.
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
        """Parameters of the projections of one layer's attention, without biases."""
        return 2 * self.hidden * (self.queries + self.keys)

    @property
    def expert_weights(self) -> int:
        """Parameters of one MLP (one expert), without biases."""
        return (3 if self.gated else 2) * self.hidden * self.feed_forward

    @property
    def parameters_at_most(self) -> int:
        """Parameters, with room for biases and norms."""
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
    """The widths in the content of a config.json; None where it is not that of a decoder this
    module knows how to read."""
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
    """Bytes for one micro-batch on a rank that holds the whole model.

    Args:
        block: kept of each block from its forward to its backward.
        recomputed: of one block while it is computed again; 0 without activation checkpointing.
        ends: of what is not in a block: the last norm, the head.
        logits: of the head's output and the two gradients beside it at the start of backward, all
            float32 (the rest of a micro-batch's activations is still there at that moment).
    """

    block: float
    recomputed: float
    ends: float
    logits: float
    layers: int

    @property
    def total(self) -> int:
        """At the fullest moment: the start of backward, or the last block's recomputation, when the
        logits are gone."""
        return round(self.layers * self.block + self.ends + max(self.logits, self.recomputed))

    @property
    def kept(self) -> int:
        """From forward to backward: of the logits the log-probabilities alone."""
        return round(self.layers * self.block + self.ends + self.logits / 3)

    @property
    def blocks(self) -> tuple[int, ...]:
        return (round(self.block),) * self.layers


def language_activations(
    dims: LanguageDims,
    config: Config,
    tokens: float,
    labels: float,
    *,
    mask_bytes: int = 1,
    fused_attention: bool = True,
    longest: float = 0.0,
) -> Activations:
    """Activations of a micro-batch of ``tokens`` tokens, of which ``labels`` carry loss.

    Args:
        mask_bytes: of an element's dropout mask: 1 on accelerators; 4 on a CPU, where torch keeps
            it in float32.
        fused_attention: False where the model stores the attention's scores: ``longest`` is then
            the tokens of its longest sample.
    """
    args = config.train_args
    low = 2 if args.mixed_dtype else _FLOAT32
    frozen = config.lora.enable
    # Autocast leaves the sums of the residual stream in float32; frozen weights in low precision
    # make them low too.
    stream = low if frozen else _FLOAT32
    norm = _norm(dims.hidden, frozen)
    # What the projections take: one copy for all in float32; autocast makes one for each (it keeps
    # copies of weights alone).
    inputs = 0 if frozen else low * dims.hidden * (2 if low == _FLOAT32 else 5 if dims.gated else 4)
    # queries, keys, values, result; row sums
    attention: float = low * (2 * dims.queries + 2 * dims.keys) + _FLOAT32 * dims.heads
    if args.packing is not False:
        attention += low * dims.queries  # the samples' results, joined
    if dims.normed_queries:
        attention += _norm(dims.queries + dims.keys, frozen)
    if not fused_attention:
        # scores after softmax, and their copy in the inputs' precision
        attention += dims.heads * longest * 2 * low
    wide = dims.feed_forward * dims.experts_per_token
    kept_inner = (3 if frozen else 4) if dims.gated else (1 if frozen else 2)
    layer: float = 2 * norm + inputs + attention + low * kept_inner * wide
    if frozen:
        layer += _adapters(dims, config, low, mask_bytes)
    block, recomputed = (
        (stream * dims.hidden, layer) if args.gradient_checkpointing else (layer, 0.0)
    )
    head_input = 0 if frozen else low * dims.hidden * labels
    ends = norm * tokens + head_input
    logits = 3 * _FLOAT32 * dims.vocabulary * labels
    return Activations(block * tokens, recomputed * tokens, ends, logits, dims.layers)


def language_flops(
    dims: LanguageDims, config: Config, tokens: float, labels: float, sample_tokens: float
) -> float:
    """Operations of forward and backward over a micro-batch.

    A weight that multiplies each token costs 2 forward, 2 for the gradient of its input and 2 for
    its own (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1: 6 a
    parameter and token); with adapters the frozen weights have no gradient of their own (4), and
    recomputation adds a forward (Korthikanti et al., 2022, appendix A: 8). Attention's two products
    cost 4 × queries × tokens looked back at, half of the sample on average, and twice that
    backward.

    Args:
        tokens: of the micro-batch; labels: those that go through the head; sample_tokens: of a
            sample.
    """
    weights = dims.attention_weights + dims.experts_per_token * dims.expert_weights
    again = 1 if config.train_args.gradient_checkpointing else 0
    passes = (2 if config.lora.enable else 3) + again
    attention = 4 * dims.queries * sample_tokens / 2 * (3 + again)
    head = 2 * dims.hidden * dims.vocabulary * (2 if config.lora.enable else 3)
    return dims.layers * tokens * (2 * weights * passes + attention) + labels * head


def _norm(width: int, frozen: bool) -> int:
    """Bytes a token of a root-mean-square norm: its input and its result before scaling, in
    float32; frozen, the input alone."""
    return _FLOAT32 * width * (1 if frozen else 2)


def _adapters(dims: LanguageDims, config: Config, low: int, mask_bytes: int) -> float:
    """Bytes a token of one layer's adapters: each keeps its input (with dropout one of its own, and
    a mask) and rank numbers."""
    lora = config.lora
    layers = {
        "q_proj": dims.hidden, "k_proj": dims.hidden, "v_proj": dims.hidden, "o_proj": dims.queries,
        "up_proj": dims.hidden, "gate_proj": dims.hidden,
        "down_proj": dims.feed_forward * dims.experts_per_token,
    }  # fmt: skip
    named = lora.target_modules
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
        result = {
            name: width
            for name, width in layers.items()
            if any(name == target.rpartition(".")[2] for target in named)
        }
        layers = result or layers
    if lora.dropout > 0:
        kept = sum((low + mask_bytes) * width for width in layers.values())
    else:  # q, k and v share one input, so do gate and up
        groups = (
            {"q_proj", "k_proj", "v_proj"},
            {"up_proj", "gate_proj"},
            {"o_proj"},
            {"down_proj"},
        )
        kept = sum(
            low * max(layers[name] for name in group & layers.keys())
            for group in groups
            if group & layers.keys()
        )
    return kept + low * lora.rank * len(layers)

"""Read the widths of a language model from its config.json. Imports no torch."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self, TypedDict

from paceline.models.json_config import JsonObject, first_number, language_fields
from paceline.models.shape.linear_attention import LinearAttention

#: Model types whose MLP is two layers without a gate.
_UNGATED = {
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "codegen", "phi",
    "starcoder2", "gpt_bigcode", "xglm", "biogpt", "nemotron",
}  # fmt: skip
#: Model types that apply a norm to queries and keys.
_NORMED_QUERIES = {
    "qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3", "smollm3", "olmoe", "flex_olmo",
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
}  # fmt: skip
#: Model types whose layers are dense before the first mixture → number of these layers, if the
#: config does not tell.
_FIRST_DENSE = {"deepseek_v3": 3, "glm4_moe": 1, "glm4_moe_lite": 1}
#: Model types that multiply the result of the experts for every token by a learned gate.
_GATED_SHARED = {"qwen2_moe", "qwen3_next", "qwen3_5_moe_text"}
#: Model types with torch's LayerNorm; the others have root-mean-square norms.
_LAYER_NORMS = _UNGATED - {"nemotron"} | {"stablelm"}
#: Model types whose norms multiply by their weight in float32.
_FLOAT32_NORMS = {
    "gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
}  # fmt: skip
#: Model type → number of norms of the hidden states in a block; 2 for the others.
_NORMS = {"gemma2": 4, "gemma3_text": 4, "phi": 1, "gptj": 1, "codegen": 1, "cohere": 1}
#: Model types with one linear layer for queries, keys and values.
_FUSED_QKV = {
    "gpt2", "gpt_neox", "bloom", "falcon", "mpt", "codegen", "gpt_bigcode", "phi3",
}  # fmt: skip
#: Model types without rotary position embeddings.
_UNROTATED = {"gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "mpt", "xglm", "biogpt"}
#: Model types with one linear layer for the gate and the up projection.
_FUSED_GATE = {"phi3", "glm"}
#: Model types whose routers return the weights of a token's experts in the dtype of their linear
#: layer; the others return float32.
_LOW_ROUTING = {
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "olmoe", "flex_olmo", "gpt_oss",
    "hunyuan_v1_moe",
}  # fmt: skip
#: Model types whose routers compute sigmoids of a product that autocast computes in the low
#: precision, though its factors are cast to float32.
_AUTOCAST_ROUTING = {
    "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
}  # fmt: skip
#: Model types whose experts have biases, and clamp the gate and the up projection.
_CLAMPED_GATE = {"gpt_oss"}
#: Model types whose attention adds a learned score to each row, and computes the softmax in the
#: dtype of the scores.
_SINKS = {"gpt_oss"}
#: Model types whose attention multiplies its result by a learned gate, which the query projection
#: also computes.
_GATED_ATTENTION = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
#: Activation functions that transformers computes in several operations.
_COMPOSED = ("gelu_new", "gelu_fast", "gelu_accurate")


class _LinearLayers(TypedDict, total=False):
    """Fields of :class:`LanguageDims` about linear attention."""

    linear_attention: LinearAttention
    linear_layers: tuple[int, ...]


@dataclass(frozen=True)
class LatentAttention:
    """Widths of multi-head latent attention (DeepSeek-V2, 2024, section 2.1): queries, and keys
    with values, are computed from narrow vectors, and only a part of a head is rotated.

    Args:
        query_rank: width of the vector from which queries are computed; 0 if they are computed from
            the hidden states.
        key_rank: width of the vector from which keys and values are computed.
        rotated: width of the rotated part of a key, which all heads share.
        values: width of the values of all heads.
    """

    query_rank: int
    key_rank: int
    rotated: int
    values: int

    def linears(self, hidden: int, queries: int, heads: int) -> dict[str, tuple[int, int]]:
        """Return the input and output width of each linear layer of attention."""
        unrotated = queries - heads * self.rotated
        into = (
            {"q_a_proj": (hidden, self.query_rank), "q_b_proj": (self.query_rank, queries)}
            if self.query_rank
            else {"q_proj": (hidden, queries)}
        )
        return into | {
            "kv_a_proj_with_mqa": (hidden, self.key_rank + self.rotated),
            "kv_b_proj": (self.key_rank, unrotated + self.values),
            "o_proj": (self.values, hidden),
        }


@dataclass(frozen=True)
class LanguageDims:
    """Widths of a decoder-only language model.

    Args:
        queries, keys: output widths of the query projection and of the key (and value) projection:
            number of heads × head size.
        feed_forward: inner width of the MLP, or of one expert.
        experts, experts_per_token: number of experts, and of those that process a token; 1 and 1 in
            a dense model.
        shared_feed_forward: inner width of the experts that process every token, or 0.
        gated_shared: whether their result is multiplied by a learned gate.
        dense_layers: numbers of the layers of a mixture that have no experts.
        dense_feed_forward: inner width of the MLP of these layers.
        latent: widths of multi-head latent attention, if the model has it.
        linear_attention: widths of linear attention, if the model has it.
        linear_layers: numbers of the layers with linear attention.
        is_linear: whether these are the widths of such a layer (:meth:`of_layer`).
        gated_attention: whether attention multiplies its result by a learned gate.
        float32_routing: whether the weights of a token's experts are in float32.
        autocast_routing: whether autocast computes them in the low precision nevertheless.
        clamped_gate: whether experts have biases, and clamp the gate and the up projection.
        gated: whether the MLP has a gate in addition to its up projection.
        tied: whether the output head shares its weight with the token embedding.
        positions: number of learned position embeddings, or 0.
        normed_queries: whether queries and keys are normed.
        norms: number of norms of the hidden states in a block.
        layer_norms: whether norms are torch's LayerNorm, instead of root-mean-square norms.
        float32_norms: whether norms multiply by their weight in float32.
        fused_qkv, fused_gate: whether queries, keys and values (gate and up projection) have one
            linear layer.
        rotates: whether queries and keys are rotated by their position.
        composed_activation: whether the activation of the MLP is a chain of operations.
        has_sinks: whether attention adds a learned score to each row.
        softcaps_scores, softcaps_logits: whether ``cap · tanh(x / cap)`` of attention scores (of
            the head's output) is computed.
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
    shared_feed_forward: int = 0
    gated_shared: bool = False
    dense_layers: tuple[int, ...] = ()
    dense_feed_forward: int = 0
    latent: LatentAttention | None = None
    linear_attention: LinearAttention | None = None
    linear_layers: tuple[int, ...] = ()
    is_linear: bool = False
    gated_attention: bool = False
    float32_routing: bool = True
    autocast_routing: bool = False
    clamped_gate: bool = False
    positions: int = 0
    normed_queries: bool = False
    norms: int = 2
    layer_norms: bool = False
    float32_norms: bool = False
    fused_qkv: bool = False
    fused_gate: bool = False
    rotates: bool = True
    composed_activation: bool = False
    has_sinks: bool = False
    softcaps_scores: bool = False
    softcaps_logits: bool = False

    @property
    def attention_weights(self) -> int:
        """Number of parameters of the attention projections of one layer, without biases."""
        return sum(width * output for width, output in self.attention_linears.values())

    @property
    def mixer(self) -> LinearAttention | None:
        """Widths of linear attention, if these are the widths of a layer with it."""
        return self.linear_attention if self.is_linear else None

    @property
    def values(self) -> int:
        """Width of the values of all query heads."""
        return self.queries if self.latent is None else self.latent.values

    @property
    def cached(self) -> int:
        """Number of elements per token that the cache of a layer has while text is generated."""
        if self.latent is None:
            return 2 * self.keys
        return self.latent.key_rank + self.latent.rotated

    @property
    def expert_weights(self) -> int:
        """Number of parameters of one MLP (or one expert), without biases."""
        return (3 if self.gated else 2) * self.hidden * self.feed_forward

    @property
    def weights_per_token(self) -> int:
        """Number of parameters of all layers that multiply a token, without biases and routers."""
        mixtures = self.layers - len(self.dense_layers)
        wide = self.feed_forward * self.experts_per_token + self.shared_feed_forward
        wide = mixtures * wide + len(self.dense_layers) * self.dense_feed_forward
        linear = len(self.linear_layers)
        attention = (self.layers - linear) * self.attention_weights
        if linear:
            attention += linear * replace(self, is_linear=True).attention_weights
        return attention + (3 if self.gated else 2) * self.hidden * wide

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the input and output width of each linear layer of a block."""
        wide = self.feed_forward
        into = self.attention_linears
        if self.gated and self.fused_gate:
            into["gate_up_proj"] = self.hidden, 2 * wide
        else:
            into["up_proj"] = self.hidden, wide
            if self.gated:
                into["gate_proj"] = self.hidden, wide
        return into | {"down_proj": (wide * self.experts_per_token, self.hidden)}

    @property
    def attention_linears(self) -> dict[str, tuple[int, int]]:
        """The input and output width of each linear layer of attention."""
        if self.mixer is not None:
            return self.mixer.linears(self.hidden)
        if self.latent is not None:
            return self.latent.linears(self.hidden, self.queries, self.heads)
        if self.fused_qkv:
            into = {"qkv_proj": (self.hidden, self.queries + 2 * self.keys)}
        else:
            gates = self.queries if self.gated_attention else 0
            into = {"q_proj": (self.hidden, self.queries + gates)}
            into["k_proj"] = into["v_proj"] = self.hidden, self.keys
        return into | {"o_proj": (self.queries, self.hidden)}

    @property
    def attention_kinds(self) -> tuple[Self, ...]:
        """The widths of layers with attention, and of layers with linear attention, if the model
        has both."""
        return (self, replace(self, is_linear=True)) if self.linear_layers else (self,)

    def of_layer(self, number: int) -> Self:
        """Return the widths of a layer: without experts if it has none, with linear attention if it
        has it."""
        dims = self.dense if number in self.dense_layers else self
        return replace(dims, is_linear=True) if number in self.linear_layers else dims

    @property
    def dense(self) -> Self:
        """Return the widths of the layers without experts."""
        return replace(
            self,
            feed_forward=self.dense_feed_forward,
            experts=1,
            experts_per_token=1,
            shared_feed_forward=0,
        )

    def split(self, ranks: int) -> Self:
        """Return the widths of the layers on one of ``ranks`` tensor-parallel ranks: each computes
        a part of the attention heads and of the inner features of the MLP."""
        return replace(
            self,
            heads=self.heads // ranks,
            key_heads=self.key_heads // ranks,
            queries=self.queries // ranks,
            keys=self.keys // ranks,
            feed_forward=self.feed_forward // ranks,
            shared_feed_forward=self.shared_feed_forward // ranks,
            dense_feed_forward=self.dense_feed_forward // ranks,
            latent=self.latent and replace(self.latent, values=self.latent.values // ranks),
        )

    @property
    def parameters_at_most(self) -> int:
        """Upper bound on the number of parameters, including biases and norms."""
        weights = max(kind.attention_weights for kind in self.attention_kinds)
        layer = weights + self.experts * (self.expert_weights + self.hidden)
        layer += (
            (3 if self.gated else 2)
            * self.hidden
            * (self.shared_feed_forward + self.dense_feed_forward)
        )
        small = (
            8 * self.hidden
            + 4 * self.queries
            + 4 * self.keys
            + (16 * self.linear_attention.mixed if self.linear_attention else 0)
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
    inner = number("intermediate_size", "n_inner", "ffn_dim", "inner_dim") or 4 * hidden
    tied = config.get("tie_word_embeddings")
    latent = _latent_attention(config, heads)
    queries = heads * size
    if latent is not None:
        queries = heads * ((number("qk_nope_head_dim") or 0) + latent.rotated)
    dims = LanguageDims(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        queries=queries,
        keys=queries if latent is not None else key_heads * size,
        feed_forward=inner,
        vocabulary=vocabulary,
        gated=kind not in _UNGATED,
        tied=bool(tied) if tied is not None else kind in ("gpt2", "gemma", "gemma2", "gemma3_text"),
        experts_per_token=number("num_experts_per_tok", "num_experts_per_token") or 1,
        latent=latent,
        **_linear_attention(config, layers),
        gated_attention=kind in _GATED_ATTENTION,
        positions=(
            (number("n_positions", "max_position_embeddings") or 0)
            if kind in ("gpt2", "opt")
            else 0
        ),
        normed_queries=kind in _NORMED_QUERIES
        or (kind == "glm4_moe" and config.get("use_qk_norm") is True),
        norms=_NORMS.get(kind, 2),
        layer_norms=kind in _LAYER_NORMS,
        float32_norms=kind in _FLOAT32_NORMS,
        fused_qkv=kind in _FUSED_QKV,
        fused_gate=kind in _FUSED_GATE,
        rotates=kind not in _UNROTATED,
        composed_activation=any(
            config.get(name) in _COMPOSED for name in ("hidden_act", "activation_function")
        ),
        has_sinks=kind in _SINKS,
        softcaps_scores=bool(config.get("attn_logit_softcapping")),
        softcaps_logits=bool(config.get("final_logit_softcapping")),
    )
    experts = number("num_local_experts", "num_experts", "n_routed_experts") or 1
    return _with_experts(dims, config, kind, experts) if experts > 1 else dims


def _with_experts(dims: LanguageDims, config: JsonObject, kind: str, experts: int) -> LanguageDims:
    """Return the widths of a mixture from the widths of its layers without experts."""
    number = partial(first_number, config)
    narrow = number("moe_intermediate_size") or dims.feed_forward
    shared = number("shared_expert_intermediate_size") or (
        narrow * (number("n_shared_experts", "moe_num_shared_experts") or 0)
    )
    return replace(
        dims,
        feed_forward=narrow,
        experts=experts,
        shared_feed_forward=shared,
        gated_shared=kind in _GATED_SHARED,
        dense_layers=_dense_layers(config, dims.layers),
        dense_feed_forward=dims.feed_forward,
        float32_routing=kind not in _LOW_ROUTING,
        autocast_routing=kind in _AUTOCAST_ROUTING,
        clamped_gate=kind in _CLAMPED_GATE,
    )


def _latent_attention(config: JsonObject, heads: int) -> LatentAttention | None:
    number = partial(first_number, config)
    key_rank, values = number("kv_lora_rank"), number("v_head_dim")
    if not key_rank or not values:
        return None
    rotated = number("qk_rope_head_dim") or 0
    return LatentAttention(number("q_lora_rank") or 0, key_rank, rotated, heads * values)


def _linear_attention(config: JsonObject, layers: int) -> _LinearLayers:
    """Return the widths of linear attention, and the layers that have it."""
    number = partial(first_number, config)
    heads, key_heads = number("linear_num_value_heads"), number("linear_num_key_heads")
    value_size, key_size = number("linear_value_head_dim"), number("linear_key_head_dim")
    if not (heads and key_heads and value_size and key_size):
        return {}
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):  # as transformers fills it in
        every = number("full_attention_interval") or 4
        kinds = ["linear_attention" if (at + 1) % every else "" for at in range(layers)]
    return {
        "linear_attention": LinearAttention(
            key_heads,
            heads,
            key_size,
            value_size,
            joins_projections=config.get("model_type") == "qwen3_next",
        ),
        "linear_layers": tuple(
            at for at, kind in enumerate(kinds[:layers]) if kind == "linear_attention"
        ),
    }


def _dense_layers(config: JsonObject, layers: int) -> tuple[int, ...]:
    """Return the numbers of the layers of a mixture that have no experts."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return tuple(number for number, kind in enumerate(kinds[:layers]) if kind == "dense")
    first = config.get("first_k_dense_replace")
    if not isinstance(first, int):
        first = _FIRST_DENSE.get(str(config.get("model_type", "")), 0)
    named = config.get("mlp_only_layers")
    only = named if isinstance(named, list) else []
    step = first_number(config, "decoder_sparse_step") or 1
    return tuple(
        number
        for number in range(layers)
        if number < first or number in only or (number + 1) % step
    )

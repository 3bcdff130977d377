"""What context parallelism needs to know of a model's attention, from its config.json. Imports no
torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from paceline.models.json_config import JsonObject, first_number, language_fields

#: Model types whose attention has scores without a key.
_SINKS = {
    "gpt_oss", "granite_swa", "granitemoe_swa", "flint", "mimo_v2_flash", "deepseek_v4", "hy_v4",
}  # fmt: skip
#: Names of the dropout rate of attention weights.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout")
#: Rotary embeddings whose frequencies depend on the longest position that a rank computes.
_CHANGING_ROPES = ("dynamic", "longrope")
#: Model type → number of layers in a group, the last of them attends to the whole sample and the
#: others to a window; for configs that do not name the kinds of layers.
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}


@dataclass(frozen=True)
class AttentionFacts:
    """The attention layers of a language model.

    Args:
        query_heads, key_heads: numbers of heads on one tensor-parallel rank.
        head_size, value_size: head sizes of queries and keys, and of values.
        windows: for each layer, number of tokens that a token attends to; None: all before it.
        caps_scores: whether scores are soft-capped.
        has_sinks: whether there are scores without a key.
        has_dropout: whether attention weights have dropout.
        has_chunks: whether layers attend within chunks of a row.
        fixed_positions: number of tokens of a sample up to which position embeddings do not depend
            on the longest position in the tokens that are computed together; None: they never do.
        largest_head_size: largest size of a head, if some layers have larger heads; else 0.
        common_heads: greatest common divisor of the numbers of query heads of the layers, if they
            differ; else 0.
    """

    query_heads: int
    key_heads: int
    head_size: int
    value_size: int
    windows: tuple[int | None, ...] = (None,)
    caps_scores: bool = False
    has_sinks: bool = False
    has_dropout: bool = False
    has_chunks: bool = False
    fixed_positions: int | None = None
    largest_head_size: int = 0
    common_heads: int = 0

    @property
    def max_head_size(self) -> int:
        """Largest size of a head of any layer."""
        return max(self.head_size, self.value_size, self.largest_head_size)

    @property
    def divisible_heads(self) -> int:
        """Number whose divisors are the numbers of ranks that can divide the query heads."""
        return self.common_heads or self.query_heads


def attention_facts(config: JsonObject, tensor_size: int = 1) -> AttentionFacts:
    """Return the facts of the language model that a config.json describes.

    Args:
        tensor_size: number of tensor-parallel ranks.
    """
    fields = language_fields(config)
    number = partial(first_number, fields)
    heads = number("num_attention_heads", "n_head", "n_heads", "num_heads") or 1
    key_heads = number("num_key_value_heads", "n_kv_heads", "num_kv_heads") or heads
    if fields.get("multi_query") is True:
        key_heads = 1
    hidden = number("hidden_size", "n_embd", "d_model") or heads
    head_size = number("head_dim") or hidden // heads or 1
    value_size = head_size
    if number("kv_lora_rank"):  # multi-head latent attention: each query head has a key head
        key_heads = heads
        parts = number("qk_nope_head_dim"), number("qk_rope_head_dim")
        head_size = number("qk_head_dim") or sum(part or 0 for part in parts) or head_size
        value_size = number("v_head_dim") or head_size
    return AttentionFacts(
        max(heads // tensor_size, 1),
        max(key_heads // tensor_size, 1),
        head_size,
        value_size,
        _windows(fields),
        bool(fields.get("attn_logit_softcapping")),
        fields.get("model_type") in _SINKS,
        any(_is_positive(fields.get(name)) for name in _DROPOUTS),
        bool(fields.get("attention_chunk_size")),
        _fixed_positions(fields),
        *_differing_layers(fields, head_size, heads, tensor_size),
    )


def _differing_layers(
    fields: JsonObject, head_size: int, heads: int, tensor_size: int
) -> tuple[int, int]:
    """Return the largest head size and the common number of heads of a model whose layers differ; 0
    for each in which they do not."""
    layers = fields.get("per_layer_config")
    changes = [each for each in layers.values() if isinstance(each, Mapping)] if isinstance(
        layers, Mapping) else []  # fmt: skip
    sizes = [first_number(each, "head_dim") or head_size for each in (*changes, fields)]
    sizes.append(first_number(fields, "global_head_dim") or head_size)
    numbers = [first_number(each, "num_attention_heads") or heads for each in changes]
    listed = fields.get("num_attention_heads_per_layer")
    if isinstance(listed, list):
        numbers += [each for each in listed if isinstance(each, int) and each > 0]
    largest = max(sizes) if max(sizes) > head_size else 0
    differ = any(each != heads for each in numbers)
    return largest, math.gcd(heads, *numbers) // tensor_size if differ else 0


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _windows(fields: JsonObject) -> tuple[int | None, ...]:
    layers = first_number(fields, "num_hidden_layers", "n_layer", "n_layers", "num_layers") or 1
    window = first_number(fields, "sliding_window")
    if window is None or fields.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    kind = fields.get("model_type")
    pattern = first_number(fields, "sliding_window_pattern")
    pattern = pattern or (_WINDOW_PATTERNS.get(kind) if isinstance(kind, str) else None)
    if pattern:
        return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    first = 0
    if fields.get("use_sliding_window") is True:
        first = first_number(fields, "max_window_layers") or 0
    return tuple(window if layer >= first else None for layer in range(layers))


def _fixed_positions(fields: JsonObject) -> int | None:
    embeddings = [fields.get("rope_parameters"), fields.get("rope_scaling")]
    for each in embeddings[:]:
        if isinstance(each, Mapping):  # by kind of layer, in some models
            embeddings.extend(each.values())
    changing = [
        each
        for each in embeddings
        if isinstance(each, Mapping)
        and any(each.get(name) in _CHANGING_ROPES for name in ("rope_type", "type"))
    ]
    if not changing:
        return None
    limits = [
        first_number({**fields, **each}, "original_max_position_embeddings")
        or first_number(fields, "max_position_embeddings")
        or 0
        for each in changing
    ]
    return min(limits)

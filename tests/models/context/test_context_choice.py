"""The choice of a method of context parallelism."""

from dataclasses import replace

import pytest
from raised import raises_error

from paceline.core.errors import ConfigError
from paceline.models.context.choice import (
    GATHER,
    METHODS,
    RING,
    ULYSSES,
    choose_method,
    method_cost,
)
from paceline.models.context.facts import AttentionFacts, attention_facts
from paceline.models.hub_configs import read_raw_config

LLAMA = AttentionFacts(32, 8, 128, 128, (None,) * 32)


def chosen(
    facts: AttentionFacts, requested="auto", size=4, device="cuda", dtype="bfloat16", **more
):
    return choose_method(requested, size, facts, device, dtype, 1, **more).name


@pytest.mark.parametrize("method", METHODS)
def test_wish_is_granted(method: str) -> None:
    assert chosen(LLAMA, method) == method


@pytest.mark.parametrize(
    ("feature", "code"),
    [
        ("caps_scores", "context-softcap"),
        ("has_sinks", "context-sinks"),
        ("has_dropout", "context-dropout"),
    ],
)
def test_only_gather_has_features_of_own_attention(feature: str, code: str) -> None:
    facts = replace(LLAMA, **{feature: True})
    choice = choose_method("auto", 4, facts, "cuda", "bfloat16", 1)
    assert choice.name == GATHER
    assert choice.why.values["reason.code"] == code
    for method in (RING, ULYSSES):
        with raises_error(ConfigError, code="context-method-not-possible") as raised:
            choose_method(method, 4, facts, "cuda", "bfloat16", 1)
        assert raised.value.values["reason.code"] == code
        assert raised.value.allowed == "auto, gather"


def test_heads_that_ranks_cannot_share() -> None:
    facts = replace(LLAMA, query_heads=14, key_heads=2)
    assert chosen(facts, size=4) in (RING, GATHER)
    with raises_error(ConfigError, code="context-method-not-possible"):
        chosen(facts, ULYSSES, size=4)
    assert chosen(facts, ULYSSES, size=7) == ULYSSES


@pytest.mark.parametrize(
    ("device", "dtype", "more"),
    [
        ("cuda", "float32", {}),
        ("cuda", "bfloat16", {"has_varlen": False}),
        ("xpu", "bfloat16", {}),
    ],
)
def test_ring_needs_a_kernel(device: str, dtype: str, more: dict[str, bool]) -> None:
    assert chosen(LLAMA, device=device, dtype=dtype, **more) in (ULYSSES, GATHER)
    with raises_error(ConfigError, code="context-method-not-possible"):
        chosen(LLAMA, RING, device=device, dtype=dtype, **more)


def test_costs_are_the_bytes_of_the_exchanges() -> None:
    facts = AttentionFacts(8, 2, 16, 8)
    tokens, size, item = 64, 4, 2
    own, keys = tokens // size, 2 * (16 + 8)
    gather = method_cost(GATHER, size, facts, None, tokens, item)
    assert gather.sent_bytes == 3 * own * keys * (2 + 4)
    ulysses = method_cost(ULYSSES, size, facts, None, tokens, item)
    # Each key head is repeated twice: four ranks have two heads.
    assert ulysses.sent_bytes == 2 * own * (8 * 24 + 4 * 24) * 3 // 4 * item
    ring = method_cost(RING, size, facts, None, tokens, item)
    # The last rank sends both of its chunks to three ranks, twice, and receives one from each.
    assert ring.sent_bytes == (2 * 3 * own + 3 * own // 2) * keys * item
    windowed = method_cost(RING, size, facts, 5, tokens, item)
    assert windowed.sent_bytes == 3 * 2 * 4 * keys * item  # 4 tokens for each of two chunks
    assert windowed.pairs < ring.pairs


def test_few_key_heads_favour_the_ring_and_many_do_not_between_hosts() -> None:
    many = replace(LLAMA, key_heads=32)
    for facts, method in ((LLAMA, RING), (many, ULYSSES)):
        assert choose_method("auto", 16, facts, "cuda", "bfloat16", 2).name == method


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen2.5-3B", AttentionFacts(16, 2, 128, 128, (None,) * 36)),
        ("mistralai/Mistral-7B-v0.1", AttentionFacts(32, 8, 128, 128, (4096,) * 32)),
        (
            "google/gemma-2-2b",
            AttentionFacts(8, 4, 256, 256, (4096, None) * 13, caps_scores=True),
        ),
        (
            "google/gemma-3-1b-pt",
            AttentionFacts(4, 1, 256, 256, (*((*(512,) * 5, None) * 4), 512, 512)),
        ),
    ],
)
def test_facts_of_known_models(model: str, expected: AttentionFacts) -> None:
    config = read_raw_config(model)
    assert config is not None
    assert attention_facts(config) == expected


def test_layers_that_differ_from_the_first_fields() -> None:
    config = {"num_attention_heads": 8, "hidden_size": 512, "num_hidden_layers": 2}
    large = [
        attention_facts({**config, "head_dim": 256, "global_head_dim": 512}),
        attention_facts({**config, "per_layer_config": {"1": {"head_dim": 512}}}),
    ]
    for facts in large:
        assert facts.max_head_size == 512
        assert chosen(facts, device="cpu", requested=RING) == RING
        with raises_error(ConfigError, code="context-method-not-possible") as raised:
            chosen(facts, RING)
        assert raised.value.values["reason.code"] == "context-ring-head-size"
    heads = attention_facts({**config, "num_attention_heads_per_layer": [8, 6]})
    assert chosen(heads, ULYSSES, size=2) == ULYSSES
    with raises_error(ConfigError, code="context-method-not-possible") as raised:
        chosen(heads, ULYSSES, size=4)
    assert raised.value.values["reason.code"] == "context-heads"
    same = attention_facts({**config, "num_attention_heads_per_layer": [8, 8]})
    assert chosen(same, ULYSSES, size=4) == ULYSSES

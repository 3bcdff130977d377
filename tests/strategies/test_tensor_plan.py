"""Tensor-parallel plans: of the model, of the user and for plain chains, and errors for plans and
sizes that do not fit."""

from itertools import pairwise

import pytest
import torch
from raised import raises_error
from torch import nn

from paceline.core.errors import ConfigError
from paceline.models.tensor_plan.plan import check_sizes, find_tensor_plan, fitting_sizes
from paceline.models.tensor_plan.style import cut_dim


def make_chain(*widths):
    layers = [
        layer
        for before, after in pairwise(widths)
        for layer in (nn.Linear(before, after), nn.ReLU())
    ]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make_small_qwen(**overrides):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(**{**sizes, **heads, **overrides}))


def test_transformers_model_uses_its_own_plan_and_splits_the_vocabulary():
    plan = find_tensor_plan(make_small_qwen(), {})
    assert plan.pop("model.embed_tokens") == "vocabulary_embedding"
    assert plan.pop("lm_head") == "vocabulary_head"
    assert plan["model.layers.1.self_attn.k_proj"] == "colwise"
    assert plan["model.layers.0.mlp.down_proj"] == "rowwise"
    assert len(plan) == 14
    assert list(plan)[:4] == [f"model.layers.0.self_attn.{letter}_proj" for letter in "qkvo"]


def test_user_plan_overrides_model_plan_and_accepts_short_names():
    plan = find_tensor_plan(make_small_qwen(), {"layers.1.mlp.down_proj": "rowwise_split_input"})
    assert plan["model.layers.1.mlp.down_proj"] == "rowwise_split_input"
    assert find_tensor_plan(Stack(), {"layers.*.up": "colwise", "layers.*.down": "rowwise"}) == {
        "layers.0.up": "colwise",
        "layers.0.down": "rowwise",
        "layers.1.up": "colwise",
        "layers.1.down": "rowwise",
    }


def test_chain_is_sharded_in_pairs_and_ambiguous_models_are_rejected():
    assert find_tensor_plan(make_chain(8, 16, 16, 4), {}) == {"1": "colwise", "3": "rowwise"}
    assert find_tensor_plan(make_chain(8, 16, 16, 16, 4), {}) == {
        "1": "colwise",
        "3": "rowwise",
        "5": "colwise",
        "7": "rowwise",
    }
    reused = nn.Linear(8, 8)
    for unsupported in (
        nn.Sequential(reused, nn.ReLU(), reused),
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
        Stack(),
    ):
        with raises_error(ConfigError, code="no-tensor-plan"):
            find_tensor_plan(unsupported, {})


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({"layers.*.upp": "colwise"}, ("tensor-plan-matches-nothing", "")),
        ({"layers.*.up": "packed_colwise"}, ("incomplete-tensor-plan", "packed_colwise")),
        ({"layers.*.up": "colwise"}, ("incomplete-tensor-plan", "layers.0.up")),
    ],
)
def test_rejects_invalid_plan(plan, error):
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        find_tensor_plan(Stack(), plan)


def test_rejects_unknown_style_in_model_plan():
    model = make_small_qwen()
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.gate_proj": "grouped_gemm"}
    with raises_error(ConfigError, code="unsupported-style"):
        find_tensor_plan(model, {})


def test_sharded_dimension_of_layers_and_adapters():
    plan = {"a.q": "colwise", "a.o": "rowwise"}
    assert [cut_dim(f"a.q.{leaf}", dims, plan) for leaf, dims in (("weight", 2), ("bias", 1))] == [
        0,
        0,
    ]
    assert [cut_dim(f"a.o.{leaf}", dims, plan) for leaf, dims in (("weight", 2), ("bias", 1))] == [
        1,
        None,
    ]
    assert [
        cut_dim(f"a.q.{matrix}.default.weight", 2, plan) for matrix in ("lora_A", "lora_B")
    ] == [
        None,
        0,
    ]
    assert [
        cut_dim(f"a.o.{matrix}.default.weight", 2, plan) for matrix in ("lora_A", "lora_B")
    ] == [
        1,
        None,
    ]
    assert cut_dim("a.norm.weight", 1, plan) is None


def test_rejects_indivisible_sizes_before_loading():
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 4096}
    check_sizes(sizes, 4)
    check_sizes({}, 3)
    with raises_error(ConfigError, code="tensor-not-divisible") as error:
        check_sizes({"text_config": sizes}, 8)
    assert "1, 2, 4" in str(error.value)
    assert "`parallel.tensor: 4`" in str(error.value)
    assert fitting_sizes([12, 18]) == [1, 2, 3, 6]

"""Tracing a forward pass shows which parameters are used before, inside and after the blocks,
regardless of their names and order."""

from typing import Any

import pytest
import torch
from raised import raises_error
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.blocks import find_blocks
from paceline.models.shape.outline import Probe, outline
from paceline.models.shape.trace import trace, trace_model
from paceline.strategies.pipeline.model_check import check_blocks
from paceline.strategies.pipeline.partition import drop
from paceline.strategies.pipeline.runner import divide_model

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def make_small_model(kind: str, device: str = "cpu", **numbers: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **numbers}))


def make_lfm2(device: str = "cpu") -> Any:
    return make_small_model(
        "lfm2",
        device,
        intermediate_size=24,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_phases_do_not_depend_on_parameter_names(device: str) -> None:
    model = make_lfm2(device)
    probe = (
        Probe(lambda module: module(input_ids=torch.arange(3).unsqueeze(0)), 1)
        if device == "cpu"
        else None
    )
    assert outline(model, Config(model="m", dataset="d"), probe).phases == {
        "model.embed_tokens.weight": ("before",),
        "lm_head.weight": ("after",),
        "model.embedding_norm.weight": ("after",),
    }
    bloom = trace_model(make_small_model("bloom", device, n_layer=2, n_head=4))
    assert bloom is not None
    assert bloom.phases["transformer.word_embeddings_layernorm.weight"] == {"before"}
    assert bloom.phases["transformer.ln_f.weight"] == {"after"}


def test_final_norm_of_lfm2_belongs_to_last_stage() -> None:
    model = make_lfm2()
    blocks = find_blocks(model)
    division = divide_model(model, blocks, 2, check_blocks(model, blocks)[1])
    assert division.regions["model.embedding_norm"] == "after"
    assert division.stages["model.embedding_norm.weight"] == (1,)
    # The embedding and the output layer share their weight.
    assert (
        division.stages["model.embed_tokens.weight"] == division.stages["lm_head.weight"] == (0, 1)
    )


def test_model_with_experts_is_traced_up_to_blocks_on_meta_device() -> None:
    shape = outline(
        make_small_model("mixtral", "meta", intermediate_size=24), Config(model="m", dataset="d")
    )
    assert shape.phases is not None
    assert shape.phases["model.embed_tokens.weight"] == ("before",)
    assert "before" not in shape.phases.get("model.norm.weight", ())


class TiedFunctional(nn.Module):
    """Uses weights without calling their modules, and registers its parameters out of order."""

    def __init__(self, uses_shared: bool = False) -> None:
        super().__init__()
        self.embedding_scale = nn.Parameter(torch.ones(4))
        self.tokens = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.shared = nn.Linear(4, 4)
        self.uses_shared = uses_shared

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.uses_shared and number == 0:
                x.add_(self.shared(x))
        return functional.linear(x * self.embedding_scale, self.tokens.weight)


def run_forward(model: nn.Module) -> object:
    return model(torch.arange(5))


def test_weight_used_before_and_after_blocks_is_on_both_stages() -> None:
    model = TiedFunctional()
    result = trace(model, run_forward)
    assert result.phases == {"tokens.weight": {"before", "after"}, "embedding_scale": {"after"}}
    blocks = find_blocks(model)
    division = divide_model(model, blocks, 2, check_blocks(model, blocks, run_forward)[1])
    assert division.regions == {"tokens": "both", "embedding_scale": "after", "shared": "after"}
    assert division.stages["tokens.weight"] == (0, 1)
    assert division.stages["embedding_scale"] == (1,)


def test_error_states_why_model_cannot_be_partitioned() -> None:
    model = TiedFunctional(uses_shared=True)
    with raises_error(ConfigError, code="not-a-pipeline", naming="shared.weight"):
        check_blocks(model, find_blocks(model), run_forward)
    with raises_error(ConfigError, code="not-a-pipeline", naming="RuntimeError"):
        check_blocks(model, find_blocks(model), lambda module: module(torch.ones(2, 3)))


class Rescaled(nn.Module):
    """Modifies its weights in the forward pass, as RWKV does in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with torch.no_grad():
                layer.weight.div_(1.0)
            x = layer(x)
        return x


def test_rejects_forward_that_modifies_weights() -> None:
    model = Rescaled()
    with raises_error(ConfigError, code="not-a-pipeline", naming="layers.0.weight"):
        check_blocks(model, find_blocks(model), lambda module: module(torch.ones(2, 4)))


def test_dropped_parameters_keep_dtype_and_free_memory() -> None:
    model = make_lfm2()
    blocks = find_blocks(model)
    drop(model, divide_model(model, blocks, 2, check_blocks(model, blocks)[1]), [1])
    weight = model.model.layers[0].feed_forward.w1.weight
    assert (weight.shape, weight.dtype, weight.untyped_storage().nbytes()) == (
        (24, 16),
        torch.float32,
        4,
    )
    assert bool(weight.isnan().all())
    assert "model.layers.0.feed_forward.w1.weight" not in dict(model.named_parameters())

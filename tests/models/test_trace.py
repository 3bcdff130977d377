"""A traced forward shows which parameters are used before, inside and after the blocks, whatever
their names and order."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.blocks import find_blocks
from paceline.models.shape.outline import Probe, outline
from paceline.models.shape.trace import trace, trace_model
from paceline.parallel.pipeline.check import check_blocks
from paceline.parallel.pipeline.partition import drop
from paceline.parallel.pipeline.runner import divide_model

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def small(kind: str, device: str = "cpu", **numbers: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **numbers}))


def lfm2(device: str = "cpu") -> Any:
    return small(
        "lfm2",
        device,
        intermediate_size=24,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_do_not_mislead(device: str) -> None:
    model = lfm2(device)
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
    bloom = trace_model(small("bloom", device, n_layer=2, n_head=4))
    assert bloom is not None
    assert bloom.phases["transformer.word_embeddings_layernorm.weight"] == {"before"}
    assert bloom.phases["transformer.ln_f.weight"] == {"after"}


def test_the_final_norm_of_lfm2_belongs_to_the_last_stage() -> None:
    model = lfm2()
    blocks = find_blocks(model)
    division = divide_model(model, blocks, 2, check_blocks(model, blocks)[1])
    assert division.regions["model.embedding_norm"] == "after"
    assert division.stages["model.embedding_norm.weight"] == (1,)
    # tied
    assert (
        division.stages["model.embed_tokens.weight"] == division.stages["lm_head.weight"] == (0, 1)
    )


def test_experts_on_the_meta_device_still_show_what_comes_before_the_blocks() -> None:
    shape = outline(small("mixtral", "meta", intermediate_size=24), Config(model="m", dataset="d"))
    assert shape.phases is not None
    assert shape.phases["model.embed_tokens.weight"] == ("before",)
    assert "before" not in shape.phases.get("model.norm.weight", ())


class Functional(nn.Module):
    """Uses weights without calling their modules; registers what comes last first."""

    def __init__(self, within: bool = False) -> None:
        super().__init__()
        self.embedding_scale = nn.Parameter(torch.ones(4))
        self.tokens = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.shared = nn.Linear(4, 4)
        self.within = within

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.within and number == 0:
                x.add_(self.shared(x))
        return functional.linear(x * self.embedding_scale, self.tokens.weight)


def run_forward(model: nn.Module) -> object:
    return model(torch.arange(5))


def test_a_weight_used_at_both_ends_is_held_at_both_ends() -> None:
    model = Functional()
    result = trace(model, run_forward)
    assert result.phases == {"tokens.weight": {"before", "after"}, "embedding_scale": {"after"}}
    blocks = find_blocks(model)
    division = divide_model(model, blocks, 2, check_blocks(model, blocks, run_forward)[1])
    assert division.regions == {"tokens": "both", "embedding_scale": "after", "shared": "after"}
    assert division.stages["tokens.weight"] == (0, 1)
    assert division.stages["embedding_scale"] == (1,)


def test_the_true_reason_is_given_for_what_cannot_be_cut() -> None:
    model = Functional(within=True)
    with pytest.raises(
        ConfigError,
        match=r"`shared\.weight` lies outside the blocks and is used between two blocks",
    ):
        check_blocks(model, find_blocks(model), run_forward)
    with pytest.raises(ConfigError, match=r"the order of its modules failed .RuntimeError: "):
        check_blocks(model, find_blocks(model), lambda module: module(torch.ones(2, 3)))


class Rescaled(nn.Module):
    """Changes its weights as it runs, as RWKV does in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with torch.no_grad():
                layer.weight.div_(1.0)
            x = layer(x)
        return x


def test_a_forward_that_changes_its_weights_is_refused() -> None:
    model = Rescaled()
    with pytest.raises(ConfigError, match=r"changes its own weights .`layers\.0\.weight`"):
        check_blocks(model, find_blocks(model), lambda module: module(torch.ones(2, 4)))


def test_what_other_stages_hold_keeps_its_type_and_takes_no_memory() -> None:
    model = lfm2()
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

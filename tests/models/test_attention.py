"""Packed attention gives the same result as attention on each sample separately."""

import pytest
import torch
from families import build_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from paceline.config.schema import Config
from paceline.data.collate import segment_inputs
from paceline.models.checks.packing import choose_packing

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
}
LENGTHS = (9, 1, 14, 5, 9, 5, 9)
CONFIG = Config(model="m", dataset="d")


def chosen_rows(model):
    return choose_packing(model, torch.device("cpu"), CONFIG).rows


def make_models():
    torch.manual_seed(0)
    yield "grouped heads", Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2))
    yield (
        "sliding window",
        MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=4, sliding_window=4)),
    )
    yield (
        "learned positions",
        GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    )


@pytest.mark.parametrize(
    ("name", "model"),
    list(make_models()),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_packed_logits_and_gradients_match_separate_samples(name, model):
    model.eval()
    samples = [torch.randint(0, 97, (1, length)) for length in LENGTHS]
    separate = torch.cat(
        [model(input_ids=sample, use_cache=False).logits for sample in samples], dim=1
    )
    separate.square().sum().backward()
    expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    assert chosen_rows(model) == "segments"
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    packed = model(
        input_ids=torch.cat(samples, dim=1),
        position_ids=positions,
        **segment_inputs(LENGTHS),
        use_cache=False,
    ).logits
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    packed.square().sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-3, atol=1e-4)


def test_eager_attention_is_packed_by_positions():
    model = Qwen2ForCausalLM(
        Qwen2Config(**SIZES, num_key_value_heads=2, attn_implementation="eager")
    )
    assert chosen_rows(model) == "positions"
    assert model.config._attn_implementation == "eager"


def test_saved_config_does_not_name_custom_attention(tmp_path):
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2))
    assert chosen_rows(model) == "segments"
    model.save_pretrained(tmp_path)
    assert "paceline" not in (tmp_path / "config.json").read_text()


def test_unknown_recurrent_layers_are_not_packed():
    assert chosen_rows(build_model("rwkv")) == "none"


def test_chunked_attention_is_not_packed():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {
        **SIZES,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
    }
    model = Llama4ForCausalLM(
        Llama4TextConfig(
            **sizes, attention_chunk_size=64, pad_token_id=0, bos_token_id=0, eos_token_id=0
        )
    )
    assert chosen_rows(model) == "none"

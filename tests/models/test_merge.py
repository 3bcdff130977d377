"""`paceline export --merge` with adapters on the embeddings or the head of a model that shares
their weight."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import make_family
from merged_models import some_logits, write_merged
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from paceline.models.builtin import resolve_model
from paceline.models.language import copy_tokenizer


def write_adapted(folder: Path, tie: bool = True, **settings: Any) -> PeftModel:
    """Write adapters with random weights to ``folder/model``; return the model with them."""
    base = make_family("qwen2", folder / "base", tie_word_embeddings=tie)
    model = AutoModelForCausalLM.from_pretrained(base)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    adapted = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter))
    adapted.save_pretrained(str(folder / "model"), save_embedding_layers=False)
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), folder / "model")
    return adapted.eval()


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"]},
        {"target_modules": ["lm_head"], "use_dora": True},
    ],
    ids=str,
)
def test_merged_model_has_the_logits_of_the_adapters(
    settings: dict[str, Any], tie: bool, tmp_path: Path
) -> None:
    adapted = write_adapted(tmp_path, tie, **settings)
    expected = some_logits(adapted)
    exported = write_merged(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(exported)
    torch.testing.assert_close(some_logits(merged), expected, rtol=1e-5, atol=1e-5)
    is_tied = json.loads((exported / "config.json").read_text())["tie_word_embeddings"]
    assert is_tied == (tie and settings == {"target_modules": ["q_proj"]})

"""`paceline export --merge` with adapters on the embeddings or the head of a model that shares
their weight."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import make_family
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.cli import main
from paceline.core.errors import RunError
from paceline.inference.export import export
from paceline.inference.merge import compare_logits, some_logits
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
    exported = export(tmp_path, merge=True)
    merged = AutoModelForCausalLM.from_pretrained(exported.path)
    torch.testing.assert_close(some_logits(merged), expected, rtol=1e-3, atol=1e-3)
    assert exported.comparison is not None
    assert exported.comparison.max_difference < 1e-3
    is_tied = json.loads((exported.path / "config.json").read_text())["tie_word_embeddings"]
    assert is_tied == (tie and settings == {"target_modules": ["q_proj"]})


def test_merge_that_changes_the_logits_is_an_error(tmp_path: Path) -> None:
    adapted = write_adapted(tmp_path, target_modules=["q_proj"])
    expected = some_logits(adapted)
    exported = export(tmp_path, merge=True)
    file = exported.path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, file, {"format": "pt"})
    changed = AutoModelForCausalLM.from_pretrained(exported.path)
    with pytest.raises(RunError, match="not equal to the model with its adapters"):
        compare_logits(expected, changed)


def test_command_prints_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_adapted(tmp_path, target_modules=["lm_head"])
    assert main(["export", str(tmp_path), "--merge", "--output", str(tmp_path / "a")]) == 0
    assert "checked: logits of the merged model differ by at most" in capsys.readouterr().out
    arguments = ["--merge", "--dtype", "bfloat16", "--output", str(tmp_path / "b"), "--json"]
    assert main(["export", str(tmp_path), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["max_logit_difference"] > 0

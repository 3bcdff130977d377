"""`paceline export --adapter`: what vLLM rejects is refused, and what it loads is copied and
checked."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import make_family
from peft import LoraConfig, PeftModel, VeraConfig, get_peft_model
from raised import raises_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.core.errors import ConfigError, RunError
from paceline.inference.exports.adapter import AdapterForm, check_config
from paceline.inference.exports.core.forms import ExportSource
from paceline.inference.exports.export import export
from paceline.inference.exports.source import open_source
from paceline.models.builtin import resolve_model
from paceline.models.kinds import save_classes
from paceline.models.language import copy_tokenizer

LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def write_adapter(folder: Path, settings: Any = None, kind: str = "qwen2") -> Path:
    """Write adapters with random weights to ``folder/model``; return ``folder``."""
    base = make_family(kind, folder / "base")
    torch.manual_seed(1)
    settings = settings or LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    adapted.save_pretrained(str(folder / "model"), save_embedding_layers=False)
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), folder / "model")
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "VERA"},
        {"use_dora": True},
        {"bias": "lora_only"},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"lora_bias": True},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"fan_in_fan_out": True},
        {"r": 1024},
        {"r": None},
    ],
    ids=str,
)
def test_what_vllm_does_not_load_is_refused(fields: dict[str, Any]) -> None:
    assert check_config({**LORA, "use_rslora": True}) == 8
    with raises_error(ConfigError, code="adapter-not-for-vllm", naming="--merge"):
        check_config({**LORA, **fields})


@pytest.mark.parametrize(
    "fields", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [8191]}], ids=str
)
def test_modules_that_are_trained_in_full_are_refused(fields: dict[str, Any]) -> None:
    with raises_error(ConfigError, code="adapter-with-full-modules", naming="--merge"):
        check_config({**LORA, **fields})


@pytest.mark.parametrize(
    ("settings", "kind", "code"),
    [
        (
            LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]),
            "qwen2",
            "adapter-not-for-vllm",
        ),
        (VeraConfig(r=4, target_modules=["q_proj"]), "qwen2", "adapter-not-for-vllm"),
        (
            LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
            "qwen2",
            "adapter-with-full-modules",
        ),
        (
            LoraConfig(r=4, target_parameters=["experts.down_proj"]),
            "qwen3_moe",
            "adapter-not-for-vllm",
        ),
        (
            LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True),
            "gpt2",
            "adapter-not-for-vllm",
        ),
    ],
)
def test_adapters_of_peft_are_refused(settings: Any, kind: str, code: str, tmp_path: Path) -> None:
    source = open_source(write_adapter(tmp_path, settings, kind))
    with raises_error(ConfigError, code=code, naming="--merge"):
        AdapterForm().check(source)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    run = write_adapter(tmp_path)
    base = run / "base"
    with raises_error(ConfigError, code="adapter-export-without-adapter"):
        AdapterForm().check(ExportSource(base, base, None, False, str(base)))
    source = open_source(run)
    file = run / "model" / "adapter_model.safetensors"
    stored = load_file(file)
    save_file({**stored, "base_model.model.lm_head.weight": torch.ones(2, 2)}, file)
    with raises_error(ConfigError, code="adapter-not-for-vllm", naming="lm_head"):
        AdapterForm().check(source)
    file.unlink()
    with raises_error(ConfigError, code="adapter-export-without-weights"):
        AdapterForm().check(source)
    save_file(stored, file)
    AdapterForm().check(source)
    save_classes({"id2label": {0: "no", 1: "yes"}}, run / "model")
    with raises_error(ConfigError, code="adapter-not-for-vllm", naming="text classifier"):
        AdapterForm().check(source)


def test_notices_name_the_options_of_vllm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = LoraConfig(r=20, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
    run = write_adapter(tmp_path, settings)
    with caplog.at_level(logging.INFO, "paceline"):
        AdapterForm().check(open_source(run))
    assert f"vllm serve {run / 'base'} --enable-lora --max-lora-rank 32" in caplog.text
    assert "adapters on embed_tokens" in caplog.text


@pytest.mark.soak
def test_exported_adapter_is_what_peft_loads(tmp_path: Path) -> None:
    run = write_adapter(tmp_path)
    (run / "model" / "README.md").write_text("template")
    exported = export(run, AdapterForm())
    assert exported.path == run / "adapter"
    check = exported.check.record()
    assert check["ok"]
    assert check["max_logit_diff"] == 0
    names = {file.name for file in exported.path.iterdir()}
    assert names == {file.name for file in (run / "model").iterdir()} - {"README.md"}
    base = AutoModelForCausalLM.from_pretrained(run / "base")
    loaded = PeftModel.from_pretrained(base, str(exported.path))
    stored = load_file(run / "model" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert torch.equal(loaded.state_dict()[key.replace(".weight", ".default.weight")], stored[key])


class DamagedAdapter(AdapterForm):
    """Adapters one of whose weights is wrong."""

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        super().write(source, model, folder)
        file = folder / "adapter_model.safetensors"
        stored = load_file(file)
        stored[next(iter(stored))] *= 2
        save_file(stored, file)


@pytest.mark.soak
def test_damaged_adapter_fails_its_proof(tmp_path: Path) -> None:
    run = write_adapter(tmp_path)
    with raises_error(RunError, code="export-not-equal"):
        export(run, DamagedAdapter())
    assert not (run / "adapter").exists()


@pytest.mark.soak
def test_difference_on_the_unquantized_base_is_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("bitsandbytes")
    run = write_adapter(tmp_path)
    config = {
        "model": str(run / "base"), "task": "sft", "dataset": "builtin:small-questions",
        "output_dir": str(run), "lora": {"enable": True, "quantize": "nf4"},
    }  # fmt: skip
    (run / "config.yaml").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "paceline"):
        check = export(run, AdapterForm()).check.record()
    assert "rounded to nf4" in caplog.text
    assert check["ok"]
    assert check["limit"] == 0.3
    assert float(check["mean_kl"] or 0) > 0

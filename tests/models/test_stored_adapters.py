"""`lora.adapter`: an adapter that does not fit the model is refused, and the run has its rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import make_family
from peft import IA3Config, LoraConfig, get_peft_model
from raised import raises_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.files import fit_to_model
from paceline.models.language import language_model_on_meta, load_language_model

Tensors = dict[str, torch.Tensor]


def write_adapter(base: Path, folder: Path, settings: Any = None) -> Path:
    settings = settings or LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def config_for(base: Path, adapter: Path) -> Config:
    lora = {"enable": True, "adapter": str(adapter)}
    return Config(model=str(base), dataset="d", lora=lora, train_args={"max_length": 64})


def without_second_layer(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if "layers.1." not in name}


def of_another_model(tensors: Tensors) -> Tensors:
    return {name.replace(".layers.", ".h."): value for name, value in tensors.items()}


def with_more_layers(tensors: Tensors) -> Tensors:
    third_layer = {name.replace(".1.", ".2."): value.clone() for name, value in tensors.items()}
    return tensors | third_layer


def of_another_rank(tensors: Tensors) -> Tensors:
    return {
        name: torch.zeros(8, value.shape[1])
        if "layers.0.self_attn.q_proj.lora_A" in name
        else value
        for name, value in tensors.items()
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_second_layer, "no weights for 4 tensors of 8 (model.layers.1.self_attn.q_proj"),
        (of_another_model, "no place for 8 tensors of it (model.h.0"),
        (with_more_layers, "no place for 4 tensors of it (model.layers.2"),
        (of_another_rank, "lora_A.weight: [8, 32] in the file, [4, 32] in the model"),
    ],
)
def test_adapter_of_another_model_is_refused(
    change: Callable[[Tensors], Tensors], expected: str, tmp_path: Path
) -> None:
    base = make_family("qwen2", tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")
    config = config_for(base, adapter)
    language_model_on_meta(config)
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    for build in (language_model_on_meta, load_language_model):  # of a dry run, and of training
        with pytest.raises(ConfigError) as caught:
            build(config)
        assert expected in caught.value.paragraph()
        assert "does not fit the model" in caught.value.paragraph()


def without_an_expert(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if ".experts.3." not in name}


def of_wider_experts(tensors: Tensors) -> Tensors:
    return {
        name: torch.zeros(4, 64) if name.endswith("w2.lora_A.weight") else value
        for name, value in tensors.items()
    }


def single_experts(rank: int = 4) -> Tensors:
    """Return an adapter on the experts of a tiny Mixtral as peft wrote it before transformers
    stacked experts."""
    sizes = {"w1": (32, 48), "w2": (48, 32), "w3": (32, 48)}
    prefix = "base_model.model.model.layers.{}.block_sparse_moe.experts.{}.{}.lora_{}.weight"
    return {
        prefix.format(layer, expert, name, letter): torch.rand(
            (rank, inputs) if letter == "A" else (outputs, rank)
        )
        for layer in range(2)
        for expert in range(4)
        for name, (inputs, outputs) in sizes.items()
        for letter in "AB"
    }


@pytest.mark.parametrize(
    ("is_stacked", "change", "expected"),
    [
        (False, without_second_layer, "no weights for 4 tensors of 8 (model.layers.1"),
        (True, without_second_layer, "no weights for 4 tensors of 8 (model.layers.1"),
        (False, of_another_model, "no place for "),
        (True, of_another_model, "no place for 8 tensors of it (model.h.0"),
        (False, without_an_expert, "[24, 32] in the file, [32, 32] in the model"),
        (False, of_wider_experts, "[16, 64] in the file, [16, 48] in the model"),
    ],
)
def test_adapter_on_experts_of_another_model_is_refused(
    is_stacked: bool, change: Callable[[Tensors], Tensors], expected: str, tmp_path: Path
) -> None:
    base = make_family("mixtral", tmp_path / "base")
    adapter = tmp_path / "adapter"
    LoraConfig(r=4, target_modules=["w1", "w2", "w3"], task_type="CAUSAL_LM").save_pretrained(
        adapter
    )
    file = adapter / "adapter_model.safetensors"
    save_file(single_experts(), file, {"format": "pt"})
    config = config_for(base, adapter)
    language_model_on_meta(config)
    model: Any = load_language_model(config)
    if is_stacked:  # as the installed versions write it
        model.save_pretrained(str(adapter), save_embedding_layers=False)
        language_model_on_meta(config)
    save_file(change(load_file(file)), file, {"format": "pt"})
    for build in (language_model_on_meta, load_language_model):
        with pytest.raises(ConfigError) as caught:
            build(config)
        assert "does not fit the model" in caught.value.paragraph()
        assert expected in caught.value.paragraph()


def test_adapter_of_another_type_is_refused(tmp_path: Path) -> None:
    base = make_family("qwen2", tmp_path / "base")
    settings = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    adapter = write_adapter(base, tmp_path / "adapter", settings)
    with raises_error(ConfigError, code="unknown-adapter-type"):
        language_model_on_meta(config_for(base, adapter))


def test_adapter_determines_rank_and_targets(tmp_path: Path) -> None:
    base = make_family("qwen2", tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model: {base}\ndataset: d\ntrain_args: {{max_length: 64}}\n"
        f"lora: {{enable: true, rank: 64, use_rslora: false, adapter: {adapter}}}\n"
    )
    fitted = fit_to_model(load_config(file, {}))
    lora = fitted.config.lora
    assert (lora.rank, lora.alpha, lora.dropout) == (4, 6, 0.0)
    assert lora.target_modules == ["q_proj", "v_proj"]
    texts = [text for _, text in fitted.notices if text.startswith("lora.adapter")]
    assert texts == [
        "lora.adapter: it keeps its own settings, so these are not used: `lora.rank: 64`"
        " (it has 4)",
        "lora.adapter: rank 4, alpha 6",
    ]
    model: Any = load_language_model(fitted.config)
    assert {p.shape[0] for name, p in model.named_parameters() if "lora_A" in name} == {lora.rank}

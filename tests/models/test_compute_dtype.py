"""The types in which a language model is loaded: frozen weights in the compute type, trained ones
in float32."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.builtin import resolve_model
from paceline.models.language import load_language_model


def config(model: str, precision: str, lora: bool) -> Config:
    values = {
        "model": model,
        "dataset": "d",
        "train_args": {"precision": precision},
        "lora": {"enable": lora, "rank": 4},
    }
    return Config.model_validate(values)


@pytest.mark.parametrize(
    ("precision", "frozen"),
    [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16), ("32", torch.float32)],
)
def test_lora(precision: str, frozen: torch.dtype) -> None:
    model = load_language_model(config("builtin:qwen2-micro", precision, lora=True))
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {(False, frozen), (True, torch.float32)}


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "32"])
def test_full_training(precision: str) -> None:
    model = load_language_model(config("builtin:qwen2-micro", precision, lora=False))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.fixture
def large_weight(tmp_path: Path) -> str:
    """A model with a weight beyond float16's range."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("builtin:qwen2-micro"), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e5
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def test_a_weight_beyond_float16_is_refused_by_name(large_weight: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_language_model(config(large_weight, "fp16-mixed", lora=True))
    text = error.value.paragraph()
    assert "model.layers.1.mlp.down_proj.weight" in text
    assert "65,504" in text
    assert "bf16-mixed" in text


@pytest.mark.parametrize(
    ("precision", "lora"), [("bf16-mixed", True), ("32", True), ("fp16-mixed", False)]
)
def test_it_is_fine_in_other_types(large_weight: str, precision: str, lora: bool) -> None:
    load_language_model(config(large_weight, precision, lora))

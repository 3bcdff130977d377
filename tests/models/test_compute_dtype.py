"""Data types of a loaded language model: frozen weights use the compute dtype, trained ones
float32."""

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
    ("precision", "frozen_dtype"),
    [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16), ("32", torch.float32)],
)
def test_lora_loads_frozen_weights_in_compute_dtype(
    precision: str, frozen_dtype: torch.dtype
) -> None:
    model = load_language_model(config("builtin:qwen2-micro", precision, lora=True))
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {(False, frozen_dtype), (True, torch.float32)}


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "32"])
def test_full_training_loads_float32(precision: str) -> None:
    model = load_language_model(config("builtin:qwen2-micro", precision, lora=False))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.fixture
def model_with_large_weight(tmp_path: Path) -> str:
    """The folder of a model with a weight outside the range of float16."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("builtin:qwen2-micro"), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e5
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def test_rejects_weight_beyond_float16(model_with_large_weight: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_language_model(config(model_with_large_weight, "fp16-mixed", lora=True))
    text = error.value.paragraph()
    assert "model.layers.1.mlp.down_proj.weight" in text
    assert "65,504" in text
    assert "bf16-mixed" in text


@pytest.mark.parametrize(
    ("precision", "lora"), [("bf16-mixed", True), ("32", True), ("fp16-mixed", False)]
)
def test_accepts_large_weight_in_other_dtypes(
    model_with_large_weight: str, precision: str, lora: bool
) -> None:
    load_language_model(config(model_with_large_weight, precision, lora))

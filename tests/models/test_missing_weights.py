"""A model whose files lack weights is refused, because training would start from random values."""

from pathlib import Path

import pytest
from families import make_model
from raised import raises_error
from safetensors.torch import load_file, save_file

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.language import load_language_model


@pytest.mark.parametrize("has_lora", [False, True])
def test_missing_weight_is_an_error(tmp_path: Path, has_lora: bool) -> None:
    folder = make_model("llama", tmp_path)
    config = Config.model_validate(
        {
            "model": str(folder),
            "dataset": "rows.jsonl",
            "lora": {"enable": has_lora},
            "train_args": {"max_length": 64},
        }
    )
    load_language_model(config)
    weights = load_file(folder / "model.safetensors")
    name = next(each for each in weights if "q_proj" in each)
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with raises_error(ConfigError, code="weights-not-in-files", naming=name):
        load_language_model(config)

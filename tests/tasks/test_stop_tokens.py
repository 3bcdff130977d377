"""The saved model ends its answers with the token that it was trained to end them with."""

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_families import make_family

import paceline
from paceline.inference.generate import load_model
from paceline.models.builtin import builtin_tokenizer

END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2


def write_base_model(folder: Path, eos_token_id: object = END_OF_TEXT) -> Path:
    """Write a model as base models are: its tokenizer has the tokens of chats, and it ends texts
    only with the end-of-text token."""
    make_family("qwen2", folder)
    settings = json.loads((builtin_tokenizer() / "tokenizer_config.json").read_text())
    settings["eos_token"] = "<|endoftext|>"
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes((builtin_tokenizer() / "tokenizer.json").read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    return folder


def train(folder: Path, **settings: Any) -> Path:
    args = {"max_steps": 1, "max_length": 64, "per_device_train_batch_size": 1}
    fixed = {"dataset": "builtin:python-docs#4", "train_args": args}
    parallel = {"device": "cpu", "num_gpus": 1}
    run = folder / "run"
    config = {**fixed, "parallel": parallel, "output_dir": str(run), **settings}
    paceline.train({"model": str(folder / "base"), **config})
    return run


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"chat_template": "chatml"}, [END_OF_TEXT, TURN_END]),
        ({"chat_template": "alpaca"}, END_OF_TEXT),
        ({"task": "pretrain"}, END_OF_TEXT),
    ],
)
def test_model_stops_at_the_token_that_ends_its_answers(
    settings: dict[str, Any], expected: object, lora: bool, tmp_path: Path
) -> None:
    write_base_model(tmp_path / "base")
    run = train(tmp_path, lora={"enable": lora}, **settings)
    saved = json.loads((run / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == expected
    assert load_model(run)[0].generation_config.eos_token_id == expected


def test_stop_tokens_of_the_model_are_kept(tmp_path: Path) -> None:
    write_base_model(tmp_path / "base", [7, END_OF_TEXT])
    run = train(tmp_path, chat_template="chatml")
    saved = json.loads((run / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [7, END_OF_TEXT, TURN_END]

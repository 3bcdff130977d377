"""Tokens that the model has no embedding for are found before training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_families import make_family
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import paceline
from paceline.core.errors import ConfigError
from paceline.data.text.token_dataset import TokenDataset, TokenWriter
from paceline.models.builtin import builtin_tokenizer

PAIR = {"prompt": "One?", "chosen": "Two. " * 9, "rejected": "Three."}
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"prompt": "One?", "completion": "Two. " * 9},
    "pretrain": {"text": "One? Two. " * 9},
    "dpo": PAIR,
    "reward": PAIR,
    "kto": {"prompt": "One?", "completion": "Two. " * 9, "label": True},
    "classify": {"text": "One? Two. " * 9, "label": "a"},
}


def config_for(task: str, folder: Path, vocabulary: int, **settings: Any) -> dict[str, Any]:
    make_family("qwen2", folder / "model", vocab_size=vocabulary)
    rows = [ROWS[task], {**ROWS[task], "label": "b"} if task == "classify" else ROWS[task]]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    return {
        "task": task, "model": str(folder / "model"), "tokenizer": "builtin:qwen2-micro",
        "dataset": str(folder / "data.jsonl"), "output_dir": str(folder / "run"),
        "train_args": {"max_length": 64, "max_steps": 1},
        "parallel": {"device": "cpu", "num_gpus": 1}, **settings,
    }  # fmt: skip


@pytest.mark.parametrize("task", ROWS)
def test_token_without_an_embedding_is_refused(task: str, tmp_path: Path) -> None:
    config = config_for(task, tmp_path, vocabulary=100)
    with pytest.raises(ConfigError) as caught:
        paceline.train(config)
    message = caught.value.paragraph()
    assert "`dataset` has the token " in message
    assert "embeddings for tokens 0 to 99 only" in message
    assert not (tmp_path / "run").exists()


def test_larger_tokenizer_is_accepted_if_the_data_do_not_use_its_last_tokens(
    tmp_path: Path,
) -> None:
    config = config_for("sft", tmp_path, vocabulary=8191)
    assert paceline.train(config)["steps"] == 1


def test_streamed_rows_are_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for("sft", tmp_path, vocabulary=8191, streaming=True)
    paceline.train(config)
    assert "the tokenizer has 8192 tokens" in capsys.readouterr().err


def test_largest_token_is_stored(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path)
    tokens, mask = np.array([3, 9, 4], np.int32), np.ones(3, np.bool_)
    columns = {"input_ids": [tokens.tobytes()], "labels_mask": [mask.tobytes()]}
    writer.extend(columns, [3], [3])
    writer.close()
    assert TokenDataset(tmp_path).largest_token() == 9
    (tmp_path / "tokens.bin").write_bytes(np.zeros(3, np.int32).tobytes())
    assert TokenDataset(tmp_path).largest_token() == 9


def test_model_with_more_embeddings_than_its_config_says(tmp_path: Path) -> None:
    """Tokens beyond `vocab_size` are accepted in a prompt, and have no logits."""
    rows = tmp_path / "data.jsonl"
    model, tokenizer = make_model_with_extra_rows(tmp_path)
    extra = tokenizer.convert_ids_to_tokens(model.config.vocab_size)
    assert model.get_input_embeddings().weight.shape[0] > model.config.vocab_size
    args = {"max_length": 64, "max_steps": 1, "per_device_train_batch_size": 1}
    config = {
        "model": str(tmp_path / "model"), "dataset": str(rows), "train_args": args,
        "output_dir": str(tmp_path / "run"), "parallel": {"device": "cpu", "num_gpus": 1},
    }  # fmt: skip
    answer = {"prompt": "One?", "completion": f" Two{extra}."}
    rows.write_text(json.dumps(answer) + "\n")
    with pytest.raises(ConfigError) as caught:
        paceline.train(config)
    size = model.config.vocab_size
    assert f"token {size} (`{extra}`)" in caught.value.what
    assert f"has logits for tokens 0 to {size - 1} only" in caught.value.what
    rows.write_text(json.dumps({"prompt": f"{extra}One{extra}?", "completion": " Two."}) + "\n")
    assert paceline.train(config)["steps"] == 1


def make_model_with_extra_rows(folder: Path) -> tuple[Any, Any]:
    """Write a model whose tokenizer has a token after the last one of its config."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_tokenizer())
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model("moshi", **sizes, ffn_dim=48, sliding_window=256)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    tokenizer.save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    return model, tokenizer

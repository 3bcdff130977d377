"""Tokens that the model has no embedding for are found before training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_families import make_family

import paceline
from paceline.core.errors import ConfigError
from paceline.data.text.token_dataset import TokenDataset, TokenWriter

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
    writer.extend([tokens.tobytes()], [mask.tobytes()], [3], [3], [None])
    writer.close()
    assert TokenDataset(tmp_path).largest_token() == 9
    (tmp_path / "tokens.bin").write_bytes(np.zeros(3, np.int32).tobytes())
    assert TokenDataset(tmp_path).largest_token() == 9

"""`paceline data prepare` fills the cache from which a run reads."""

import json
from pathlib import Path

import pytest
from commands import parse

from paceline.commands.data_prepare import run as run_prepare
from paceline.config.schema import Config
from paceline.data.encoding.prepare import prepare_tokens
from paceline.models.builtin import resolve_model


def write_rows(path: Path, count: int) -> Path:
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}. " * 20} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_run_reads_what_was_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.core.user_code.hide_packages", lambda names: None)
    path = write_rows(tmp_path / "a.jsonl", 50)
    settings = [f"dataset={path}", "model=builtin:qwen2-micro", "split_dataset_ratio=5"]
    assert run_prepare(parse("data", "prepare", *settings, "--json", "--workers", "1")) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["train_samples"], result["eval_samples"]) == (45, 5)
    assert result["rows"] == {"read": 50, "kept": 50, "truncated": 0, "dropped": {}}
    config = Config(model="builtin:qwen2-micro", dataset=str(path), split_dataset_ratio=5)
    prepared = prepare_tokens(config, "sft", resolve_model)
    assert "read from the token cache" in prepared.notices[-2].message
    assert prepared.train_tokens == result["train_tokens"]
    assert run_prepare(parse("data", "prepare", *settings)) == 0
    assert "45 samples" in capsys.readouterr().out

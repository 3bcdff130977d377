"""Fixtures for the data tests."""

import json
from pathlib import Path

import pytest

from paceline.models.builtin import builtin_tokenizer


@pytest.fixture
def bare_tokenizer(tmp_path: Path) -> str:
    """A copy of the built-in tokenizer without its chat template."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((builtin_tokenizer() / name).read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return str(folder)

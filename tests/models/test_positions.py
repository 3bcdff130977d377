"""The maximum sample length, from the number of positions in a model's config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from raised import raises_error

from paceline.cli import main
from paceline.config.load import load_config
from paceline.core.errors import ConfigError
from paceline.models.positions import fit_length, position_limit


@pytest.mark.parametrize(
    ("content", "tokens", "key", "is_fixed"),
    [
        ({"model_type": "gpt2", "n_positions": 512, "n_ctx": 512}, 512, "n_positions", True),
        (
            {"model_type": "opt", "max_position_embeddings": 2048},
            2048,
            "max_position_embeddings",
            True,
        ),
        (
            {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1},
            512,
            "max_position_embeddings",
            True,
        ),
        (
            {"model_type": "gemma3", "text_config": {"max_position_embeddings": 4096}},
            4096,
            "max_position_embeddings",
            True,
        ),
        ({"model_type": "mpt", "max_seq_len": 2048}, 2048, "max_seq_len", False),
        (
            {"model_type": "falcon", "alibi": True, "max_position_embeddings": 2048},
            2048,
            "max_position_embeddings",
            False,
        ),
        (
            {"model_type": "falcon", "alibi": False, "max_position_embeddings": 2048},
            2048,
            "max_position_embeddings",
            True,
        ),
        ({"model_type": "bloom", "seq_length": 2048}, 2048, "seq_length", False),
        ({"model_type": "rwkv", "context_length": 1024}, 1024, "context_length", False),
    ],
)
def test_position_limit_of_config(
    content: dict[str, Any], tokens: int, key: str, is_fixed: bool
) -> None:
    limit = position_limit(content)
    assert limit is not None
    assert (limit.tokens, limit.key, limit.is_fixed) == (tokens, key, is_fixed)


def test_model_without_positions_has_no_limit() -> None:
    assert position_limit({"model_type": "mamba", "hidden_size": 64}) is None
    assert position_limit({"model_type": "xlnet", "max_position_embeddings": -1}) is None


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        (None, 4096),
        ({"rope_type": "default", "factor": 8.0}, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}, 4096),
        (
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default"},
            },
            32768,
        ),
    ],
)
def test_rope_scaling_extends_the_limit(scaling: dict[str, Any] | None, tokens: int) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        limit = position_limit(
            {"model_type": "llama", "max_position_embeddings": 4096, key: scaling}
        )
        assert limit is not None
        assert limit.tokens == tokens


def make_folder(path: Path, **content: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(content))
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_default_length_is_reduced_and_explicit_length_is_rejected(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "m", model_type="gpt2", n_positions=512)
    args = [f"model={model}", "dataset=builtin:python-docs#4"]
    reduced = fit_length(load_config(None, args))
    assert reduced.config.train_args.max_length == 512
    assert "max_length: 1024 (the default) → 512" in reduced.notices[-1][1]
    with raises_error(ConfigError, code="too-long"):
        fit_length(load_config(None, [*args, "max_length=1024"]))
    assert (
        fit_length(load_config(None, [*args, "max_length=512"])).notices
        == load_config(None, args).notices
    )


def test_warns_if_length_exceeds_soft_limit(tmp_path: Path) -> None:
    model = make_folder(tmp_path / "m", model_type="bloom", seq_length=512)
    loaded = fit_length(load_config(None, [f"model={model}", "dataset=d", "max_length=700"]))
    assert loaded.config.train_args.max_length == 700
    level, text = loaded.notices[-1]
    assert level == "warning"
    assert "exceeds the 512 tokens" in text


@pytest.mark.parametrize(
    "command",
    [["sft"], ["sft", "--dry-run"], ["plan"], ["verify"], ["data", "preview"], ["data", "stats"]],
)
def test_every_command_rejects_excessive_length(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_folder(tmp_path / "m", model_type="gpt2", n_positions=512)
    args = [
        f"model={model}",
        "tokenizer=builtin:qwen2-micro",
        "dataset=builtin:python-docs#4",
        "max_length=600",
    ]
    assert main([*command, *args, f"output_dir={tmp_path / 'run'}"]) == 2
    assert "set `train_args.max_length: 512`" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

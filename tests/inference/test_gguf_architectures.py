"""GGUF files of each architecture: llama.cpp loads them and computes what transformers does."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import mount_tmpfs
from families import make_model
from raised import raises_error

from paceline.core.errors import ConfigError, RunError
from paceline.inference.exports.gguf.architectures import ARCHITECTURES
from paceline.inference.exports.gguf.llama_cpp_engine import LlamaCppEngine
from paceline.inference.exports.gguf.write import write_gguf

#: Larger than in training, so that attention, experts and states matter for the logits.
SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "initializer_range": 0.15}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
#: family → settings that differ from tests/families.py
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": None},
    "smollm3": {"num_hidden_layers": 4},
    "qwen2": {},
    "qwen3": {"rope_parameters": YARN, "tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"num_hidden_layers": 6, "query_pre_attn_scalar": 8},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "gpt_oss": {"rope_parameters": YARN | {"truncate": True}},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {},
}
#: llama.cpp computes GELU from a table in float16.
LIMITS = {"gemma": 1e-3, "gemma2": 1e-3, "gemma3_text": 1e-3}


def tokens() -> list[int]:
    return torch.randint(300, 8000, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def expected_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens()])).logits[0, 4:]


def log_probabilities(file: Path) -> torch.Tensor:
    engine = LlamaCppEngine(file)
    try:
        return engine.scores(tokens(), 4)
    finally:
        engine.close()


def difference(logits: torch.Tensor, scores: torch.Tensor) -> float:
    return float((scores - logits.log_softmax(-1)).abs().max() / logits.abs().max())


def divergence(logits: torch.Tensor, scores: torch.Tensor) -> float:
    expected = logits.double().log_softmax(-1)
    return float((expected.exp() * (expected - scores.double())).sum(-1).mean())


def test_every_architecture_is_tested() -> None:
    assert FAMILIES.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_model(family: str, tmp_path: Path) -> None:
    """In float32, in which nothing is rounded to fewer bits than transformers does; and in float16,
    whose rounding these random weights enlarge."""
    folder = make_model(family, tmp_path, **{**SIZES, **FAMILIES[family]})
    logits = expected_logits(folder)
    write_gguf(folder, tmp_path / "exact.gguf", "f32", "test")
    assert difference(logits, log_probabilities(tmp_path / "exact.gguf")) < LIMITS.get(family, 2e-5)
    write_gguf(folder, tmp_path / "half.gguf", "f16", "test")
    assert divergence(logits, log_probabilities(tmp_path / "half.gguf")) < 1e-5


@pytest.mark.parametrize(("kind", "limit"), [("bf16", 1e-3), ("q8_0", 0.01), ("q4_k_m", 0.3)])
def test_quantized_models_are_close(kind: str, limit: float, tmp_path: Path) -> None:
    """Rows of 256 numbers have the K-quants, shorter ones their replacements."""
    sizes = {"hidden_size": 256, "intermediate_size": 96, "initializer_range": 0.06}
    folder = make_model("qwen3", tmp_path, **sizes)
    write_gguf(folder, tmp_path / "model.gguf", kind, "test")
    scores = log_probabilities(tmp_path / "model.gguf")
    assert divergence(expected_logits(folder), scores) < limit


def test_a_damaged_file_differs(tmp_path: Path) -> None:
    """A hundred bytes that a fault has changed, in the middle of the weights."""
    folder = make_model("qwen2", tmp_path, **SIZES)
    file = tmp_path / "model.gguf"
    write_gguf(folder, file, "q8_0", "test")
    with file.open("r+b") as opened:
        opened.seek(-20_000, os.SEEK_END)
        opened.write(b"\x7b" * 100)
    assert not divergence(expected_logits(folder), log_probabilities(file)) < 0.01


def test_a_truncated_file_is_not_loaded(tmp_path: Path) -> None:
    folder = make_model("qwen2", tmp_path, **SIZES)
    file = tmp_path / "model.gguf"
    write_gguf(folder, file, "f16", "test")
    os.truncate(file, file.stat().st_size // 2)
    with raises_error(RunError, code="gguf-not-loaded"):
        LlamaCppEngine(file)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_full_disk_is_named(kind: str, tmp_path: Path) -> None:
    folder = make_model("qwen2", tmp_path, **SIZES)
    with mount_tmpfs(tmp_path / "small", "size=1m") as is_mounted:
        if is_mounted:
            with pytest.raises(OSError, match="No space left on device") as raised:
                write_gguf(folder, tmp_path / "small" / "model.gguf", kind, "test")
            assert raised.value.errno == errno.ENOSPC


def test_a_failed_llama_quantize_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool is used if it is on the PATH; here it fails after it has begun to write."""
    folder = make_model("qwen2", tmp_path, **SIZES)
    tool = tmp_path / "bin" / "llama-quantize"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\ntest $3 = Q4_K_M && head -c 4 $1 && echo no memory >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    (tmp_path / "out").mkdir()
    with raises_error(RunError, code="gguf-quantize-failed") as raised:
        write_gguf(folder, tmp_path / "out" / "model.gguf", "q4_k_m", "test")
    assert "no memory" in str(raised.value)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("family", "settings", "code"),
    [
        ("gpt2", {}, "gguf-unsupported-model"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "gguf-unsupported-setting"),
        ("qwen3_moe", {}, "gguf-unsupported-setting"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 2}, "gguf-unsupported-setting"),
    ],
)
def test_other_models_are_refused(
    family: str, settings: dict[str, Any], code: str, tmp_path: Path
) -> None:
    folder = make_model(family, tmp_path, **settings)
    with raises_error(ConfigError, code=code) as raised:
        write_gguf(folder, tmp_path / "model.gguf", "f16", "test")
    assert json.loads((folder / "config.json").read_text())["model_type"] in str(raised.value)
    assert not (tmp_path / "model.gguf").exists()


def test_a_window_of_attention_limits_the_context(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import gguf

    folder = make_model("mistral", tmp_path)
    write_gguf(folder, tmp_path / "model.gguf", "f16", "test")
    field = gguf.GGUFReader(tmp_path / "model.gguf").get_field("llama.context_length")
    assert field is not None
    assert field.contents() == 16
    assert "up to 16 tokens" in caplog.text

"""Test that a dry run rejects the models that training would reject, and that the rejection
interrupts a long tokenization."""

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_families import write_config
from safetensors.numpy import save_file

import paceline
from paceline.cli import main
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.launch import model_check
from paceline.models.language import language_model_on_meta
from paceline.parallel.registry import ParallelLayout


def make_args(model: Path, output: Path, *extra_args: str) -> list[str]:
    fixed = [
        f"model={model}",
        "tokenizer=builtin:qwen2-micro",
        "dataset=builtin:python-docs#16",
        "lora.enable=true",
    ]
    return ["sft", *fixed, f"output_dir={output}", *extra_args]


@pytest.mark.parametrize(
    ("kind", "extra_args", "expected"),
    [
        (
            "mixtral",
            ["lora.target_modules=[wq]"],
            "gate, k_proj, o_proj, q_proj, v_proj, w1, w2, w3",
        ),
        ("mamba", ["lora.target_modules=[out_proj]"], "dt_proj, in_proj, out_proj, x_proj"),
        ("mixtral", ["lora.modules_to_save=[head]"], "lm_head"),
    ],
)
def test_dry_run_rejects_invalid_lora_targets(
    kind: str,
    extra_args: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = write_config(kind, tmp_path / "model")
    save_file({}, model / "model.safetensors")  # the weights are never read
    assert main([*make_args(model, tmp_path / "run", *extra_args), "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert "tokenized" not in captured.err
    assert not (tmp_path / "run").exists()


def test_dry_run_reports_peft_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_config("mixtral", tmp_path / "model")
    save_file({}, model / "model.safetensors")
    for _ in range(2):  # the second result comes from the cache
        assert main([*make_args(model, tmp_path / "run"), "--dry-run"]) == 0
        assert "peft cannot apply dropout to mlp.experts.down_proj" in capsys.readouterr().err


@pytest.mark.soak
def test_rejected_model_interrupts_tokenization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_check, "_START_AFTER_S", 0.0)
    model = write_config("mixtral", tmp_path / "model")
    save_file({}, model / "model.safetensors")
    data = tmp_path / "data.jsonl"
    row = {
        "messages": [
            {"role": "user", "content": "word " * 60},
            {"role": "assistant", "content": "answer " * 60},
        ]
    }
    data.write_text((json.dumps(row) + "\n") * 200_000)
    config = {
        "model": str(model), "tokenizer": "builtin:qwen2-micro", "dataset": str(data),
        "output_dir": str(tmp_path / "run"),
        "lora": {"enable": True, "target_modules": ["wq"]},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="`wq`"):
        paceline.train(config)
    assert not list((tmp_path / "cache").glob("paceline/tokens/*"))
    assert not (tmp_path / "run").exists()


def test_check_stages_traces_model_once(tmp_path: Path) -> None:
    config = Config(model=str(write_config("gpt2", tmp_path / "gpt2")), dataset="d")
    model = language_model_on_meta(config)
    forwards: list[Any] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(_))
    model_check.check_stages(model, config, 2)
    assert len(forwards) == 1


def test_dry_run_partitions_model_into_stages(tmp_path: Path) -> None:
    # The forward pass of mixtral needs real values and fails on the meta device, which is not an
    # error.
    for kind in ("gpt2", "mixtral"):
        config = Config(
            model=str(write_config(kind, tmp_path / kind)),
            dataset="d",
            lora={"enable": True},
            train_args={"max_length": 64},
        )
        model = language_model_on_meta(config)
        model_check.check_stages(model, config, 2)
        model_check.check_model(config, ParallelLayout("pipeline", ParallelDims(pipeline=2), 2))
    model = language_model_on_meta(Config(model=str(tmp_path / "gpt2"), dataset="d"))
    with pytest.raises(ConfigError, match="pipeline"):
        model_check.check_stages(model, config, 8)

"""Runs that keep weights of the base model that transformers does not load."""

import json
from pathlib import Path

import pytest
import torch
from adapter_families import make_family
from commands import losses, run
from safetensors.torch import load_file, save_file
from text_parts import make_text_part
from transformers import AutoModelForImageTextToText

from paceline.models.builtin import resolve_model
from paceline.models.language import copy_tokenizer

pytestmark = pytest.mark.slow

ARGS = (
    "dataset=builtin:python-docs#48",
    "parallel.device=cpu",
    "per_device_train_batch_size=2",
    "max_length=48",
    "learning_rate=1e-3",
    "max_steps=2",
    "packing=false",
)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        result |= load_file(file)
    return result


@pytest.mark.parametrize("mode", ["single", "zero3"])
def test_full_run_keeps_dropped_tensors(mode: str, tmp_path: Path) -> None:
    base = make_family("qwen3_next", tmp_path / "base")
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), base)
    (base / "LICENSE").write_text("free")
    dropped = {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.norm.weight": torch.randn(32)}
    stored = load_file(base / "model.safetensors")
    save_file(stored | dropped, base / "model.safetensors", {"format": "pt"})
    args = [] if mode == "single" else ["parallel.mode=zero3", "parallel.num_gpus=2"]
    run(f"model={base}", f"output_dir={tmp_path / 'run'}", *ARGS, *args)
    saved = tensors(tmp_path / "run" / "model")
    assert saved.keys() == stored.keys() | dropped.keys()
    for name, values in dropped.items():
        assert saved[name].dtype == values.dtype
        assert torch.equal(saved[name], values)
    assert not torch.equal(saved["lm_head.weight"], stored["lm_head.weight"])
    assert (tmp_path / "run" / "model" / "LICENSE").is_file()


@pytest.mark.parametrize("kind", ["llama4", "qwen3_5"])
def test_run_on_text_writes_a_vision_language_model(kind: str, tmp_path: Path) -> None:
    base = make_text_part(tmp_path / "base", kind)
    output = tmp_path / "run"
    text_only = "vision.text_only=true"
    run(f"model={base}", f"output_dir={output}", *ARGS, text_only)
    saved, stored = tensors(output / "model"), tensors(base)
    assert saved.keys() == stored.keys()
    vision = [name for name in stored if "vision" in name or "visual" in name]
    assert vision
    assert all(torch.equal(saved[name], stored[name]) for name in vision)
    whole, info = AutoModelForImageTextToText.from_pretrained(
        output / "model", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    content = json.loads((output / "model" / "config.json").read_text())
    assert content["architectures"] == [type(whole).__name__]
    assert (output / "model" / "preprocessor_config.json").is_file()
    # Paceline reads the model as the one that it has trained.
    result = run(str(output), "What?", "--max-new-tokens", "2", verb="generate")
    assert "Traceback" not in result.stderr
    run(str(output), "--dtype", "bfloat16", verb="export")
    assert tensors(output / "exported").keys() == stored.keys()
    run(f"model={output / 'model'}", f"output_dir={tmp_path / 'next'}", *ARGS, text_only)
    assert losses(tmp_path / "next")[0] < losses(output)[0]
    assert tensors(tmp_path / "next" / "model").keys() == stored.keys()

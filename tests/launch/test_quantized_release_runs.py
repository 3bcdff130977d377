"""Runs that train quantized releases: as the plain model of the same weights, with several ranks,
and with an output that needs no quantization."""

import json
from pathlib import Path

import pytest
from commands import digest, events, losses, run
from quantized_releases import make_release
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

ARGS = (
    "dataset=builtin:python-docs#48",
    "parallel.device=cpu",
    "per_device_train_batch_size=2",
    "max_length=48",
    "learning_rate=1e-3",
    "packing=false",
)


def train_model(model: Path, output: Path, *args: str, steps: int = 3) -> list[float]:
    run(f"model={model}", f"output_dir={output}", f"max_steps={steps}", *ARGS, *args)
    return losses(output)


def check_plain_output(folder: Path, dtype: str) -> None:
    """Check that a saved model has all weights in a dtype, and nothing of a quantized release."""
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == dtype
    assert "quantization_config" not in config
    tensors = load_file(folder / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
    assert not [name for name in tensors if "scale" in name or "blocks" in name]


def notices_of(output: Path) -> list[str]:
    return [event.get("code", "") for event in events(output, "notice")]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_full_training_equals_the_plain_model(family: str, tmp_path: Path) -> None:
    release, plain = make_release(family, tmp_path)
    expected = train_model(plain, tmp_path / "plain")
    assert train_model(release, tmp_path / "single") == expected
    assert digest(tmp_path / "single") == digest(tmp_path / "plain")
    assert "weights-dequantized" in notices_of(tmp_path / "single")
    assert "weights-dequantized" not in notices_of(tmp_path / "plain")
    check_plain_output(tmp_path / "single" / "model", "float32")
    again = train_model(tmp_path / "single" / "model", tmp_path / "continued", steps=1)
    assert again[0] < expected[0]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_ranks_equal_one(family: str, mode: str, tmp_path: Path) -> None:
    release, _ = make_release(family, tmp_path)
    batch = "global_batch_size=4"
    single = train_model(release, tmp_path / "single", batch)
    args = [f"parallel.mode={mode}", "parallel.num_gpus=2", batch]
    assert train_model(release, tmp_path / mode, *args) == pytest.approx(single, rel=1e-6)
    check_plain_output(tmp_path / mode / "model", "float32")


def test_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    release, _ = make_release("gpt_oss", tmp_path)
    args = ["precision=bf16-mixed", "lr_scheduler_type=constant", "lora.enable=true"]
    train_model(release, tmp_path / "whole", *args)
    train_model(release, tmp_path / "parts", *args, steps=2)
    train_model(release, tmp_path / "parts", *args, "--allow-config-change")
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


# Rounding to bfloat16 makes the router of a random model choose other experts.
@pytest.mark.parametrize(("family", "dtype"), [("gpt_oss", "float32"), ("qwen3", "bfloat16")])
def test_adapters_are_merged_into_a_plain_model(family: str, dtype: str, tmp_path: Path) -> None:
    release, _ = make_release(family, tmp_path)
    output = tmp_path / "out"
    train_model(release, output, "lora.enable=true", "precision=bf16-mixed")
    run(str(output), "--merge", "--dtype", dtype, verb="export")
    check_plain_output(output / "exported", dtype)
    for folder in (output, release):
        options = ["Sort a list.", "--max-new-tokens", "2"]
        assert run(str(folder), *options, verb="generate").returncode == 0


def test_4_bit_weights_of_a_release(tmp_path: Path) -> None:
    """The dequantized weights of linear layers are quantized again, the experts' are not."""
    pytest.importorskip("bitsandbytes")
    release, plain = make_release("gpt_oss", tmp_path)
    args = ["lora.enable=true", "lora.quantize=nf4", "precision=bf16-mixed"]
    expected = train_model(plain, tmp_path / "plain", *args)
    assert train_model(release, tmp_path / "out", *args) == expected
    assert "quantize-not-applied" in notices_of(tmp_path / "out")


def test_dry_run_refuses_what_training_refuses(tmp_path: Path) -> None:
    from quantized_releases import edit_config

    release, _ = make_release("qwen3", tmp_path)
    edit_config(release, quantization_config={"quant_method": "gptq", "bits": 4})
    for extra in ([], ["--dry-run"]):
        args = [f"model={release}", f"output_dir={tmp_path / 'out'}", *ARGS, *extra]
        result = run(*args, expect=2)
        assert "stored in the format gptq" in " ".join(result.stderr.split())
        assert not (tmp_path / "out").exists()

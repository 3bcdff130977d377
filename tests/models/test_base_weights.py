"""Weights of the base model that transformers does not load, and the rest of a vision-language
model that was trained as text: in trained models and in exports."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_families import make_family
from huggingface_hub import constants
from merged_models import some_logits, write_merged
from peft import LoraConfig, get_peft_model
from quantized_releases import make_release
from raised import raises_error
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from text_parts import make_text_part
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from vision_models import make_model

from paceline.cli import main
from paceline.core.errors import ConfigError
from paceline.inference.exports.export import export
from paceline.inference.exports.full import FullForm
from paceline.inference.loading import load_model
from paceline.models.builtin import resolve_model
from paceline.models.language import copy_tokenizer, save_language_model
from paceline.models.weights.load import load_pretrained

#: Tensors that transformers does not load, by the type of the model.
DROPPED = {"qwen3_next": "mtp", "deepseek_v3": "model.layers.61"}
#: Constants that older checkpoints store, and the shape of each.
CONSTANTS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
    "model.layers.0.attn.masked_bias": (),
    "model.layers.0.attn.bias": (1, 1, 8, 8),
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in a folder's safetensors files."""
    result: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        result |= load_file(file)
    return result


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def shard(folder: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Store tensors in two files with an index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    weight_map = {}
    for number, part in enumerate((first, second), start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_base(folder: Path, kind: str, sharded: bool = False) -> dict[str, torch.Tensor]:
    """Write a model with tensors that transformers does not load, constants, and a licence; return
    these tensors."""
    make_family(kind, folder)
    stored = load_file(folder / "model.safetensors")
    stored |= {name: torch.ones(shape) for name, shape in CONSTANTS.items()}
    prefix = DROPPED[kind]
    dropped = {
        f"{prefix}.mlp.experts.0.gate_proj.weight": torch.randn(24, 32).bfloat16(),
        f"{prefix}.eh_proj.weight": torch.randn(32, 64).half(),
        f"{prefix}.norm.weight": torch.randn(3),
        f"{prefix}.steps": torch.arange(5),
    }
    if sharded:
        shard(folder, stored, dropped)
    else:
        save_file(stored | dropped, folder / "model.safetensors", {"format": "pt"})
    (folder / "LICENSE.txt").write_text("free")
    return dropped


def write_adapter(base: Path, run: Path) -> None:
    """Write adapters of a base model to the ``model`` folder of a run."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    get_peft_model(model, settings).save_pretrained(str(run / "model"), save_embedding_layers=False)
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), run / "model")


def save_trained_model(base: Path, folder: Path, auto_class: Any = AutoModelForCausalLM) -> Any:
    """Save a model whose weights differ from its base model's weights; return it."""
    model = load_pretrained(auto_class, str(base), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    folder.mkdir(parents=True)
    save_language_model(model, resolve_model("builtin:qwen2-micro"), folder, str(base))
    return model


def check_index(folder: Path) -> None:
    """Check that the index lists each tensor in the file that has it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dictionary)
                assert index["weight_map"].pop(name) == file.name
                total += opened.get_tensor(name).nbytes
    assert not index["weight_map"]
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("kind", DROPPED)
@pytest.mark.parametrize("sharded", [False, True])
def test_trained_model_has_the_dropped_tensors(kind: str, sharded: bool, tmp_path: Path) -> None:
    dropped = make_base(tmp_path / "base", kind, sharded)
    model = save_trained_model(tmp_path / "base", tmp_path / "run" / "model")
    folder = tmp_path / "run" / "model"
    saved = tensors(folder)
    assert all(same_bytes(saved[name], values) for name, values in dropped.items())
    assert not CONSTANTS.keys() & saved.keys()
    assert saved.keys() == tensors(tmp_path / "base").keys() - CONSTANTS.keys()
    check_index(folder)
    assert (folder / "LICENSE.txt").read_text() == "free"
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(some_logits(loaded), some_logits(model))
    # The trained model is the base of the next one.
    save_trained_model(folder, tmp_path / "next")
    again = tensors(tmp_path / "next")
    assert all(same_bytes(again[name], values) for name, values in dropped.items())


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_merged_export_has_the_dropped_tensors(dtype: str, tmp_path: Path) -> None:
    dropped = make_base(tmp_path / "base", "qwen3_next", sharded=True)
    write_adapter(tmp_path / "base", tmp_path)
    exported = write_merged(tmp_path, dtype=dtype)
    saved = tensors(exported)
    for name, values in dropped.items():
        is_cast = dtype != "auto" and values.is_floating_point()
        assert same_bytes(saved[name], values.bfloat16() if is_cast else values)
    assert saved.keys() == tensors(tmp_path / "base").keys() - CONSTANTS.keys()
    assert (exported / "LICENSE.txt").is_file()
    info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)[1]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_export_of_a_full_model_has_the_dropped_tensors(tmp_path: Path) -> None:
    dropped = make_base(tmp_path / "base", "qwen3_next")
    save_trained_model(tmp_path / "base", tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "base")  # the run's model has them
    exported = write_merged(tmp_path / "run", dtype="float16")
    saved = tensors(exported)
    for name, values in dropped.items():
        assert same_bytes(saved[name], values.half() if values.is_floating_point() else values)
    assert saved.keys() == tensors(tmp_path / "run" / "model").keys()
    assert (exported / "LICENSE.txt").is_file()


def test_model_without_dropped_tensors_stays_one_file(tmp_path: Path) -> None:
    base = make_family("gpt2", tmp_path / "base")
    stored = load_file(base / "model.safetensors")
    older = {name.removeprefix("transformer."): values for name, values in stored.items()}
    older |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(older, base / "model.safetensors", {"format": "pt"})
    save_trained_model(base, tmp_path / "model")
    assert [file.name for file in (tmp_path / "model").glob("*.safetensors*")] == [
        "model.safetensors"
    ]
    assert not [
        name for name in tensors(tmp_path / "model") if name.endswith((".attn.bias", "_bias"))
    ]


def test_pickled_base_keeps_its_dropped_tensors(tmp_path: Path) -> None:
    dropped = make_base(tmp_path / "base", "qwen3_next")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "model.safetensors").unlink()
    torch.save(stored, tmp_path / "base" / "pytorch_model.bin")
    save_trained_model(tmp_path / "base", tmp_path / "model")
    saved = tensors(tmp_path / "model")
    assert all(same_bytes(saved[name], values) for name, values in dropped.items())


def test_base_of_the_hub_is_read_from_the_cache(tmp_path: Path) -> None:
    repository = Path(constants.HF_HUB_CACHE) / "models--paceline--base-weights"
    dropped = make_base(repository / "snapshots" / "abc", "qwen3_next", sharded=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    model = load_pretrained(AutoModelForCausalLM, "paceline/base-weights", dtype=torch.float32)
    save_language_model(model, None, tmp_path, "paceline/base-weights")
    saved = tensors(tmp_path)
    assert all(same_bytes(saved[name], values) for name, values in dropped.items())
    assert (tmp_path / "LICENSE.txt").is_file()


# -- vision-language models that were trained as text
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5", "qwen3_5_moe", "llama4", "mllama"])
def test_text_part_is_saved_as_the_whole_model(kind: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_model(base, kind) if kind == "gemma3" else make_text_part(base, kind)
    trained = save_trained_model(base, tmp_path / "model")
    saved, stored = tensors(tmp_path / "model"), tensors(base)
    assert saved.keys() == stored.keys()
    whole, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    contents = [
        json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "model")
    ]
    assert contents[0]["architectures"] == contents[1]["architectures"] == [type(whole).__name__]
    if kind != "gemma3":  # trained with its vision tower
        vision = [name for name in stored if "vision" in name or "visual" in name]
        assert vision
        assert all(same_bytes(saved[name], stored[name]) for name in vision)
    text = load_pretrained(AutoModelForCausalLM, str(tmp_path / "model"), dtype=torch.float32)
    assert type(text) is type(trained)
    for name, values in trained.state_dict().items():
        assert torch.equal(text.state_dict()[name], values), name


def test_adapters_on_a_text_part_are_merged_into_the_whole_model(tmp_path: Path) -> None:
    base = make_text_part(tmp_path / "base", "llama4")
    write_adapter(base, tmp_path)
    (tmp_path / "config.yaml").write_text(
        f"model: {base}\ndataset: builtin:python-docs\noutput_dir: {tmp_path}\n"
        "vision: {text_only: true}\nlora: {enable: true}\n"
    )
    expected = some_logits(load_model(tmp_path, "float32")[0])
    exported = write_merged(tmp_path, tmp_path / "out" / "merged", dtype="float32")
    whole, info = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(some_logits(whole), expected, rtol=1e-4, atol=1e-4)
    saved, stored = tensors(exported), tensors(base)
    assert saved.keys() == stored.keys()
    changed = {name for name in saved if not same_bytes(saved[name], stored[name].float())}
    assert changed
    assert all(name.endswith("self_attn.o_proj.weight") for name in changed)


# -- files of the base model that are gone
def test_merge_without_the_base_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_base(tmp_path / "base", "qwen3_next")
    write_adapter(tmp_path / "base", tmp_path)
    shutil.rmtree(tmp_path / "base")
    with raises_error(ConfigError, code="base-files-missing", naming=str(tmp_path / "base")):
        export(tmp_path, FullForm(merges=True))
    assert main(["export", str(tmp_path), "--merge", "--allow-missing"]) == 2
    assert str(tmp_path / "base") in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


def test_merge_without_the_file_of_dropped_tensors_needs_permission(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped = make_base(tmp_path / "base", "qwen3_next", sharded=True)
    write_adapter(tmp_path / "base", tmp_path)
    (tmp_path / "base" / "model-00002-of-00002.safetensors").unlink()
    assert main(["export", str(tmp_path), "--merge"]) == 2
    assert "model-00002-of-00002.safetensors" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--merge", "--allow-missing"]) == 0
    assert "4 weights of the base model" in capsys.readouterr().err
    saved = tensors(tmp_path / "exported")
    assert saved.keys() == tensors(tmp_path / "base").keys() - CONSTANTS.keys()
    assert not saved.keys() & dropped.keys()
    info = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)[1]
    assert not info["missing_keys"]


def test_merge_without_the_file_of_used_tensors_is_refused(tmp_path: Path) -> None:
    make_base(tmp_path / "base", "qwen3_next", sharded=True)
    write_adapter(tmp_path / "base", tmp_path)
    (tmp_path / "base" / "model-00001-of-00002.safetensors").unlink()
    with raises_error(ConfigError, code="base-weights-gone", naming=str(tmp_path / "base")):
        export(tmp_path, FullForm(merges=True), allow_missing=True)


def test_run_whose_base_disappears_saves_its_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped = make_base(tmp_path / "base", "qwen3_next")
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    model = load_pretrained(AutoModelForCausalLM, str(tmp_path / "base"), dtype=torch.float32)
    shutil.rmtree(tmp_path / "base")
    (run / "model").mkdir(parents=True)
    tokenizer = resolve_model("builtin:qwen2-micro")
    save_language_model(model, tokenizer, run / "model", str(tmp_path / "base"))
    assert [r.msg.code for r in caplog.records if r.name.startswith("paceline")] == [
        "base-weights-not-saved"
    ]
    (run / "config.yaml").write_text(
        f"model: {tmp_path / 'base'}\ndataset: builtin:python-docs\noutput_dir: {run}\n"
    )
    assert main(["export", str(run)]) == 2
    assert str(tmp_path / "base") in capsys.readouterr().err
    assert main(["export", str(run), "--allow-missing", "--output", str(run / "a")]) == 0
    assert "lacks weights of its base model" in capsys.readouterr().err
    assert not tensors(run / "a").keys() & dropped.keys()
    shutil.move(tmp_path / "copy", tmp_path / "base")
    assert main(["export", str(run), "--output", str(run / "b")]) == 0
    saved = tensors(run / "b")
    assert all(same_bytes(saved[name], values) for name, values in dropped.items())


# -- quantized releases
def test_dropped_weights_of_a_release_are_dequantized(tmp_path: Path) -> None:
    release, _ = make_release("qwen3", tmp_path)
    stored = load_file(release / "model.safetensors")
    numbers = torch.randn(32, 32).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2)
    added = {
        "mtp.fc.weight": numbers,
        "mtp.fc.weight_scale_inv": scales,
        "mtp.norm.weight": torch.randn(32).bfloat16(),
    }
    save_file(stored | added, release / "model.safetensors", {"format": "pt"})
    save_trained_model(release, tmp_path / "model")
    saved = tensors(tmp_path / "model")
    assert {name for name in saved if name.startswith("mtp")} == {
        "mtp.fc.weight",
        "mtp.norm.weight",
    }
    assert same_bytes(saved["mtp.norm.weight"], added["mtp.norm.weight"])
    expected = numbers.float() * scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert same_bytes(saved["mtp.fc.weight"], expected)
    assert "quantization_config" not in json.loads((tmp_path / "model/config.json").read_text())

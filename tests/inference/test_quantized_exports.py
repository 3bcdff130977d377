"""`paceline export --quantize`: layers, calibration, complete files, refusals, and real exports
through auto-round, which transformers loads again."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_families import make_family, write_config
from disks import mount_tmpfs
from peft import LoraConfig, get_peft_model
from raised import raises_error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, RunError
from paceline.inference.exports.core.forms import ExportSource
from paceline.inference.exports.export import export
from paceline.inference.exports.quantized.calibration import joined, read_calibration
from paceline.inference.exports.quantized.files import complete_files
from paceline.inference.exports.quantized.form import QuantizedForm
from paceline.inference.exports.quantized.layers import Scheme, unquantized_layers
from paceline.inference.exports.quantized.worker import QuantizeResult
from paceline.inference.exports.source import open_source
from paceline.models.builtin import resolve_model
from paceline.models.language import copy_tokenizer

pytest.importorskip("auto_round")

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
QUESTIONS = [f"What is {number} plus one?" for number in range(200)]


def make_base(folder: Path, kind: str = "qwen2", **overrides: Any) -> Path:
    """Write a model in bfloat16 whose logits vary, so that damage is seen in them."""
    make_family(kind, folder, **SIZES, **overrides)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(5)
    model.save_pretrained(str(folder))
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), folder)
    return folder


def make_run(folder: Path) -> Path:
    """Write a run with a full model and with data of its own; return its folder."""
    make_base(folder / "model")
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "?"}]}
        for question in QUESTIONS
    ]
    data = folder / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    config = {
        "model": str(folder / "model"), "task": "sft", "dataset": str(data),
        "output_dir": str(folder), "train_args": {"max_length": 64},
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        result |= load_file(file)
    return result


def source_of(folder: Path) -> ExportSource:
    return ExportSource(folder, folder, None, False, str(folder))


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of an export, as transformers dequantizes them."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return dict(model.state_dict())


# -- parts
def test_layers_that_stay_in_16_bits() -> None:
    shapes = {
        "model.layers.0.self_attn.q_proj": (256, 256),
        "model.layers.0.self_attn.k_proj": (32, 256),  # too few outputs for 4 bits
        "model.layers.0.self_attn.v_proj": (64, 256),
        "model.layers.0.self_attn.o_proj": (256, 256),
        "model.layers.0.mlp.gate_proj": (512, 256),
        "model.layers.0.mlp.down_proj": (256, 192),  # not a multiple of 128 inputs
        "model.layers.1.mlp.gate": (64, 256),
        "model.layers.1.mlp.shared_expert_gate": (64, 256),
        "model.layers.1.linear_attn.out_proj": (256, 256),
        "model.visual.blocks.0.mlp.up_proj": (256, 256),
        "lm_head": (8192, 256),
    }
    sensitive = {name for name in shapes if "layers.0" not in name}
    assert unquantized_layers(shapes, "fp8") == sensitive
    assert unquantized_layers(shapes, "w4a16") == sensitive | {
        "model.layers.0.self_attn.q_proj",  # servers join it with k_proj
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.0.mlp.down_proj",
    }


def test_rows_are_joined_to_sequences() -> None:
    rows = [np.arange(3), np.arange(3, 7), np.arange(7, 10)]
    assert joined(rows, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert joined(rows, 100).tolist() == [list(range(10))]
    assert joined(rows, 2).shape == (3, 2)  # at most as many sequences as rows
    assert joined([], 4).shape == (0, 0)


def test_calibration_reads_the_rows_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    config = open_source(run).config
    assert config is not None
    model = AutoModelForCausalLM.from_pretrained(run / "model").config
    calibration = read_calibration(config, model)
    assert calibration.num_rows == 128
    text = AutoTokenizer.from_pretrained(run / "model").decode(calibration.tokens.reshape(-1))
    found = [question for question in QUESTIONS if question in text]
    assert len(found) > 100
    assert found != QUESTIONS[: len(found)]  # in the order of the run, which is shuffled
    again = read_calibration(config, model)
    assert np.array_equal(again.tokens, calibration.tokens)


def test_calibration_reads_streamed_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    stored = json.loads((run / "config.yaml").read_text())
    config = Config(
        **{**stored, "streaming": True, "train_args": {"max_length": 64, "max_steps": 5}}
    )
    calibration = read_calibration(
        config, AutoModelForCausalLM.from_pretrained(run / "model").config
    )
    assert calibration.num_rows == 128
    text = AutoTokenizer.from_pretrained(run / "model").decode(calibration.tokens.reshape(-1))
    assert QUESTIONS[0] in text


# -- files
def write_stored(folder: Path, names: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(names, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "dtype": "bfloat16"}))


def write_quantized(folder: Path, method: str, **extra: torch.Tensor) -> Path:
    """Write what auto-round writes for a layer, a router and an embedding."""
    part = "scales" if method != "compressed-tensors" else "weight_scale"
    value = {f"model.layers.0.mlp.up_proj.{part}": torch.ones(2, 1)}
    router = {"model.layers.0.mlp.gate.weight": torch.ones(2, 2)}
    write_stored(folder, {**value, **router, "model.norm.weight": torch.ones(2), **extra})
    settings = {"quant_method": method, "ignore": ["lm_head"]}
    (folder / "config.json").write_text(
        json.dumps({"dtype": "bfloat16", "quantization_config": settings})
    )
    return folder


STORED = {
    "model.layers.0.mlp.up_proj.weight": torch.ones(2, 2),
    "model.layers.0.mlp.gate.weight": torch.ones(2, 2),
    "model.norm.weight": torch.ones(2),
    "mtp.fc.weight": torch.randn(3, 3).half(),
    "model.layers.61.eh_proj.weight": torch.randn(2, 4).bfloat16(),
    "model.layers.0.rotary_emb.inv_freq": torch.ones(4),
}
DROPPED = ["mtp.fc.weight", "model.layers.61.eh_proj.weight"]
RESULT = QuantizeResult(
    DROPPED,
    ["model.layers.0.rotary_emb.inv_freq"],
    {"model.layers.0.mlp.gate.weight": "model.text.layers.0.mlp.gate.weight"},
    [],
)


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq"])
def test_weights_that_are_not_loaded_are_kept_and_excluded(method: str, tmp_path: Path) -> None:
    write_stored(tmp_path / "model", STORED)
    (tmp_path / "model" / "LICENSE").write_text("free")
    (tmp_path / "export").mkdir()
    written = write_quantized(tmp_path / "written", method)
    count = complete_files(written, tmp_path / "model", tmp_path / "export", RESULT)
    assert (count.num_layers, count.num_unquantized, count.num_copied) == (1, 1, 2)
    stored = tensors(tmp_path / "export")
    for name in DROPPED:
        assert stored[name].dtype == STORED[name].dtype
        assert torch.equal(stored[name], STORED[name])
    assert (tmp_path / "export" / "LICENSE").read_text() == "free"
    content = json.loads((tmp_path / "export" / "config.json").read_text())
    assert content["model_type"] == "qwen2"
    settings = content["quantization_config"]
    gates = ["model.layers.0.mlp.gate", "model.text.layers.0.mlp.gate"]
    if method == "compressed-tensors":
        layer = r"re:^model\.layers\.61(\..*)?$"
        assert settings["ignore"] == [*gates, layer, r"re:^mtp(\..*)?$"]
    elif method == "awq":
        assert settings["modules_to_not_convert"] == [*gates, "model.layers.61", "mtp"]
    else:
        escaped = [gate.replace(".", r"\.") for gate in gates]
        skipped = [*(f"-:^{gate}$" for gate in escaped), r"-:^model\.layers\.61\.", r"-:^mtp\."]
        assert settings["dynamic"] == {pattern: {} for pattern in skipped}


def test_missing_and_renamed_weights_are_errors(tmp_path: Path) -> None:
    write_stored(tmp_path / "model", {**STORED, "model.layers.0.experts.w1.weight": torch.ones(2)})
    for number, extra in enumerate(
        [{}, {"model.layers.0.experts.gate_proj.weight": torch.ones(2)}]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        written = write_quantized(tmp_path / f"written-{number}", "compressed-tensors", **extra)
        with raises_error(RunError, code="quantized-weights-missing"):
            complete_files(written, tmp_path / "model", folder, RESULT)


# -- refusals
def test_models_that_cannot_be_quantized(tmp_path: Path) -> None:
    form = QuantizedForm("fp8")
    for kind in ("gpt_oss", "mixtral", "granitemoe"):
        folder = make_family(kind, tmp_path / kind)
        with raises_error(ConfigError, code="quantize-experts", naming=kind):
            form.check(source_of(folder))
    form.check(source_of(make_family("qwen3_moe", tmp_path / "experts")))
    quantized = write_config("qwen2", tmp_path / "quantized")
    content = json.loads((quantized / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "fp8"}
    (quantized / "config.json").write_text(json.dumps(content))
    with raises_error(ConfigError, code="quantize-quantized"):
        form.check(source_of(quantized))
    content = {**content, "architectures": ["Qwen2ForSequenceClassification"]}
    (quantized / "config.json").write_text(json.dumps(content))
    with raises_error(ConfigError, code="quantize-with-kind"):
        form.check(source_of(quantized))


def test_estimate_is_the_size_of_the_files(tmp_path: Path) -> None:
    base = make_family("qwen2", tmp_path / "base", **SIZES)
    stored = (base / "model.safetensors").stat().st_size
    sizes = {
        scheme: QuantizedForm(scheme).estimate(source_of(base)).num_bytes
        for scheme in ("fp8", "w4a16")
    }
    assert sizes["w4a16"] < sizes["fp8"] < stored


# -- real exports
@pytest.mark.soak
def test_fp8_export_is_loaded_and_keeps_what_is_not(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    kept = {"mtp.layers.0.mlp.up_proj.weight": torch.randn(256, 128).bfloat16()}
    save_file(
        load_file(base / "model.safetensors") | kept, base / "model.safetensors", {"format": "pt"}
    )
    exported = export(base, QuantizedForm("fp8"), output=str(tmp_path / "fp8"))
    check = exported.check.record()
    assert check["ok"]
    assert 0 < float(check["mean_kl"] or 0) < 0.05
    before, stored = load_file(base / "model.safetensors"), tensors(exported.path)
    assert torch.equal(
        stored["mtp.layers.0.mlp.up_proj.weight"], before["mtp.layers.0.mlp.up_proj.weight"]
    )
    assert torch.equal(stored["lm_head.weight"], before["lm_head.weight"])
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    weights = dequantized(exported.path)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, before[name].float(), rtol=0.07, atol=2e-3)
    names = sorted(path.name for path in exported.path.iterdir())
    assert {"tokenizer.json", "generation_config.json", "config.json"} <= set(names)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    estimated = QuantizedForm("fp8").estimate(source_of(base)).num_bytes
    weights_bytes = sum(file.stat().st_size for file in exported.path.glob("*.safetensors"))
    assert estimated == pytest.approx(weights_bytes, rel=0.02)


@pytest.mark.soak
def test_head_that_shares_its_weight_is_not_quantized(tmp_path: Path) -> None:
    base = make_family("qwen2", tmp_path / "base", tie_word_embeddings=True, **SIZES)
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), base)
    exported = export(base, QuantizedForm("fp8"), output=str(tmp_path / "fp8"))
    assert exported.check.record()["ok"]
    content = json.loads((exported.path / "config.json").read_text())
    assert "lm_head" in content["quantization_config"]["ignore"]


def test_models_without_layers_that_fit_are_refused(tmp_path: Path) -> None:
    base = make_family("qwen2", tmp_path / "base")
    with raises_error(ConfigError, code="quantize-small-layers"):
        QuantizedForm("w4a16").check(source_of(base))


@pytest.mark.soak
def test_w4a16_export_is_calibrated_with_the_rows_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run")
    with caplog.at_level(logging.INFO, "paceline"):
        exported = export(run, QuantizedForm("w4a16"))
    assert exported.path == run / "w4a16"
    check = exported.check.record()
    assert check["ok"]
    assert 0 < float(check["mean_kl"] or 0) < 0.3
    assert "128 rows of the run's own data" in caplog.text
    before, weights = load_file(run / "model" / "model.safetensors"), dequantized(exported.path)
    for name, weight in weights.items():
        error = (weight - before[name].float()).norm() / before[name].float().norm()
        assert error < (0.15 if name.endswith("proj.weight") else 1e-6)


def unpacked_gptq(stored: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    packed, scales = stored[f"{layer}.qweight"], stored[f"{layer}.scales"].float()
    shifts = torch.arange(0, 32, 4).view(1, -1, 1)
    numbers = ((packed.unsqueeze(1) >> shifts) & 15).reshape(-1, packed.shape[1]).float()
    return ((numbers - 8) * scales.repeat_interleave(128, 0)).T


def unpacked_awq(stored: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        return ((packed.unsqueeze(-1) >> shifts) & 15).reshape(len(packed), -1).float()

    scales = stored[f"{layer}.scales"].float().repeat_interleave(128, 0)
    zeros = unpack(stored[f"{layer}.qzeros"]).repeat_interleave(128, 0)
    return ((unpack(stored[f"{layer}.qweight"]) - zeros) * scales).T


@pytest.mark.soak
@pytest.mark.parametrize(("scheme", "unpacked"), [("gptq", unpacked_gptq), ("awq", unpacked_awq)])
def test_formats_that_no_engine_reads_are_not_called_checked(
    scheme: Scheme, unpacked: Any, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    check = export(run, QuantizedForm(scheme)).check
    assert check.is_ok is None
    assert "gptqmodel" in str(check.record()["reason"])
    before, stored = load_file(run / "model" / "model.safetensors"), tensors(run / scheme)
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        expected = before[f"{layer}.weight"].float()
        assert (unpacked(stored, layer) - expected).norm() / expected.norm() < 0.15
    content = json.loads((run / scheme / "config.json").read_text())
    assert content["quantization_config"]["quant_method"] == scheme


@pytest.mark.soak
def test_experts_are_quantized_and_routers_are_not(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3_moe")
    exported = export(base, QuantizedForm("fp8"), output=str(tmp_path / "fp8"))
    assert exported.check.is_ok
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    for name, weight in dequantized(exported.path).items():
        torch.testing.assert_close(weight, before[name], rtol=0.07, atol=2e-3)
    stored = tensors(exported.path)
    assert stored["model.layers.0.mlp.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    settings = json.loads((exported.path / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in settings["ignore"]


@pytest.mark.soak
def test_merged_adapter_is_quantized(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    copy_tokenizer(resolve_model("builtin:qwen2-micro"), tmp_path / "adapter")
    exported = export(tmp_path / "adapter", QuantizedForm("fp8"), output=str(tmp_path / "fp8"))
    assert exported.check.is_ok
    merged = adapted.merge_and_unload().state_dict()["model.layers.0.self_attn.q_proj.weight"]
    weight = dequantized(exported.path)["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(weight, merged.float(), rtol=0.08, atol=5e-3)


class DamagedScales(QuantizedForm):
    """Quantized weights, the scales of one of whose layers are wrong."""

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        super().write(source, model, folder)
        stored = load_file(folder / "model.safetensors")
        stored["model.layers.0.mlp.down_proj.weight_scale"] *= 3
        save_file(stored, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.soak
def test_damaged_export_fails_its_proof(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    with raises_error(RunError, code="export-not-equal"):
        export(base, DamagedScales("fp8"), output=str(tmp_path / "fp8"))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.soak
def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    with mount_tmpfs(tmp_path / "disk", "size=3m") as is_mounted:
        if not is_mounted:
            pytest.skip("tests may not mount")
        source, folder = source_of(base), tmp_path / "disk" / "export"
        folder.mkdir()
        with pytest.raises(OSError, match="No space left"):
            QuantizedForm("w4a16").write(source, base, folder)
        assert not (folder / ".quantize").exists()


@pytest.mark.soak
def test_killed_export_ends_its_process_and_leaves_no_target(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    code = (
        "import sys; from pathlib import Path\n"
        "from paceline.inference.exports.export import export\n"
        "from paceline.inference.exports.quantized.form import QuantizedForm\n"
        "export(Path(sys.argv[1]), QuantizedForm('fp8'), output=sys.argv[2])"
    )
    target = tmp_path / "fp8"
    process = subprocess.Popen([sys.executable, "-c", code, str(base), str(target)])
    work: list[Path] = []
    while not work:
        assert process.poll() is None
        work = list(tmp_path.glob(".paceline-export-*/export/.quantize/job.json"))
        time.sleep(0.1)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while workers(work[0]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not workers(work[0])
    assert not target.exists()
    shutil.rmtree(work[0].parents[2])


def workers(job: Path) -> list[int]:
    """Return the processes that run a job."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_worker = str(job).encode() in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if is_worker and entry.name.isdigit() and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found

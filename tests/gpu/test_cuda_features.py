"""Test the settings whose code runs only on CUDA devices: kernels, compilation, checkpointing,
offloading, precisions, optimizers and quantization."""

from pathlib import Path

import pytest
import torch
from commands import digest, events, losses, report
from test_cuda import cuda, on_cpu, train, visible

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
__all__ = ["cuda", "on_cpu"]  # fixtures

LORA = ("lora.enable=true", "lora.dropout=0")
#: Largest relative difference to the losses in float32 on a CPU.
FLOAT32, LOW, QUANTIZED = 1e-3, 2e-2, 5e-2


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability(0)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        (("precision=bf16-mixed",), LOW),
        (("precision=bf16-mixed", "attn_implementation=sdpa"), LOW),
        (("precision=bf16-mixed", "packing=false"), LOW),
        (("precision=bf16-mixed", "loss_chunk_size=64"), LOW),
        (("precision=32", "loss_chunk_size=64"), FLOAT32),
        (("precision=32", "tf32=true"), LOW),
        (("precision=bf16-true",), QUANTIZED),
        (("precision=32", "gradient_checkpointing=full"), FLOAT32),
        (("precision=32", "gradient_checkpointing=selective"), FLOAT32),
        (("precision=bf16-mixed", "gradient_checkpointing=2"), LOW),
        (("precision=32", "torch_compile=true"), FLOAT32),
        (("precision=bf16-mixed", "torch_compile=true", "gradient_checkpointing=full"), LOW),
        (("precision=bf16-mixed", "parallel.mode=zero2", "torch_compile=true"), LOW),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_setting_has_the_losses_of_the_cpu(
    settings: tuple[str, ...], tolerance: float, on_cpu: dict[str, list[float]], tmp_path: Path
) -> None:
    train(tmp_path / "run", 1, *settings, env=visible(0))
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["full"], rel=tolerance)


def test_packed_rows_are_computed_by_the_fused_kernel(tmp_path: Path) -> None:
    stderr = train(tmp_path / "run", 1, "precision=bf16-mixed", env=visible(0))
    expected = "varlen_attn" if capability()[0] >= 8 else "sdpa"
    assert f"attention: {expected}" in stderr


def test_compiled_blocks_are_not_compiled_again(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, "precision=bf16-mixed", "torch_compile=true", env=visible(0))
    compiled = report(tmp_path / "run")["compile"]
    assert compiled["graphs"] > 0
    assert compiled["recompilations"] == 0


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_liger_kernels(precision: str, on_cpu: dict[str, list[float]], tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    args = (f"precision={precision}", "use_liger_kernel=true")
    train(tmp_path / "run", 1, *args, env=visible(0))
    tolerance = FLOAT32 if precision == "32" else LOW
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["full"], rel=tolerance)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8(recipe: str, on_cpu: dict[str, list[float]], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    if capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    args = ("precision=bf16-mixed", f"fp8={recipe}", "torch_compile=true")
    train(tmp_path / "run", 1, *args, env=visible(0))
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["full"], rel=QUANTIZED)


@pytest.mark.parametrize("quantize", ["nf4", "fp4", "int8"])
def test_quantized_weights(quantize: str, on_cpu: dict[str, list[float]], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    train(tmp_path / "run", 1, *LORA, f"lora.quantize={quantize}", env=visible(0))
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["lora"], rel=QUANTIZED)
    memory = report(tmp_path / "run")["state_memory_bytes"]
    assert memory["measured"] == pytest.approx(memory["predicted"], rel=0.02)


@pytest.mark.parametrize(
    ("optim", "package"),
    [
        ("adamw_8bit", "bitsandbytes"),
        ("paged_adamw_8bit", "bitsandbytes"),
        ("adamw_torchao_8bit", "torchao"),
        ("schedule_free_adamw", "schedulefree"),
        ("muon", None),
        ("lion", None),
        ("sgd", None),
        ("adafactor", None),
    ],
)
def test_optimizer_has_the_losses_of_the_cpu(
    optim: str, package: str | None, tmp_path: Path
) -> None:
    if package is not None:
        pytest.importorskip(package)
    args = ("precision=32", f"optim={optim}", "learning_rate=1e-3")
    train(tmp_path / "cpu", 1, *args, "parallel.device=cpu", "parallel.num_gpus=1")
    train(tmp_path / "cuda", 1, *args, env=visible(0))
    tolerance = LOW if "8bit" in optim else FLOAT32
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=tolerance)


@pytest.mark.parametrize(
    ("mode", "offload"),
    [("single", "activations"), ("single", "optimizer"), ("ddp", "optimizer,activations"),
     ("zero3", "activations")],
)  # fmt: skip
def test_offloading_does_not_change_a_bit(mode: str, offload: str, tmp_path: Path) -> None:
    args = (f"parallel.mode={mode}", "deterministic=true")
    train(tmp_path / "plain", 1, *args, env=visible(0))
    train(tmp_path / "run", 1, *args, f"parallel.cpu_offload={offload}", env=visible(0))
    assert digest(tmp_path / "run") == digest(tmp_path / "plain")
    if "optimizer" in offload:
        on_device = [
            events(tmp_path / name, "memory")[-1]["ranks"][0]["optimizer"]
            for name in ("run", "plain")
        ]
        assert on_device[0] < 0.6 * on_device[1]


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16-true"])
def test_resumed_run_has_the_digest_of_an_uninterrupted_run(precision: str, tmp_path: Path) -> None:
    args = (
        "parallel.mode=single", f"precision={precision}", "deterministic=true",
        "lr_scheduler_type=constant",
    )  # fmt: skip
    train(tmp_path / "whole", 1, *args, env=visible(0))
    for step in (3, 6):
        steps = (f"max_steps={step}", "--allow-config-change")
        train(tmp_path / "resumed", 1, *args, *steps, env=visible(0))
    assert report(tmp_path / "resumed")["resumed_from_step"] == 3
    assert digest(tmp_path / "resumed") == digest(tmp_path / "whole")


def test_profile_has_kernels_and_a_memory_snapshot(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, "train_args.profile={start_step: 3, num_steps: 2}", env=visible(0))
    (event,) = events(tmp_path / "run", "profile")
    (snapshot,) = event["memory_snapshots"]
    assert (tmp_path / "run" / snapshot).stat().st_size > 0
    assert (tmp_path / "run" / event["traces"][0]).stat().st_size > 0


def test_events_have_the_utilization_of_the_peak_rate(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, "precision=bf16-mixed", env=visible(0))
    result = report(tmp_path / "run")
    assert 0 < result["mfu"] < 1
    assert result["peak"]

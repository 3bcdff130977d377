"""Test runs on CUDA devices. Deselected on machines without one."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import digest, events, losses, report, run

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ARGS = (
    "model=builtin:qwen2-micro", "dataset=builtin:python-docs#240", "max_length=128", "max_steps=6",
    "learning_rate=3e-3", "split_dataset_ratio=0.1",
)  # fmt: skip
BATCH = 16


@pytest.fixture(scope="module", autouse=True)
def cuda() -> None:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    assert kind.type == "cuda", "these tests are for CUDA devices"


def visible(*indices: int) -> dict[str, str]:
    """Return an environment with only these of the session's devices visible."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        visible_devices.split(",")
        if visible_devices
        else [str(index) for index in range(torch.cuda.device_count())]
    )
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names[index] for index in indices)}


def train(folder: Path, ranks: int, *args: str, **settings: Any) -> str:
    """Train with a global batch of 16 samples; return standard error. The last value of a key in
    ``args`` replaces those before it."""
    arguments = (*ARGS, f"per_device_train_batch_size={BATCH // ranks}", *args)
    last = dict(argument.partition("=")[::2] for argument in arguments if "=" in argument)
    switches = [argument for argument in arguments if "=" not in argument]
    values = [f"{key}={value}" for key, value in last.items()]
    return run(*values, *switches, f"output_dir={folder}", **settings).stderr


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Return the losses in float32 on one CPU rank, of full fine-tuning and of LoRA."""
    losses_of = {}
    for name, args in {"full": (), "lora": ("lora.enable=true", "lora.dropout=0")}.items():
        folder = tmp_path_factory.mktemp(name) / "run"
        train(folder, 1, "parallel.device=cpu", "parallel.num_gpus=1", *args)
        losses_of[name] = losses(folder)
    return losses_of


def test_gpu_float32_losses_match_cpu(on_cpu: dict[str, list[float]], tmp_path: Path) -> None:
    stderr = train(tmp_path / "run", 1, "precision=32", env=visible(0))
    result = report(tmp_path / "run")
    assert (result["status"], result["device"], result["world_size"]) == ("done", "cuda", 1)
    assert "cuda:0" in stderr
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["full"], rel=1e-3)
    assert result["peak_memory_bytes"][0] > 0


def test_lora_in_default_precision(on_cpu: dict[str, list[float]], tmp_path: Path) -> None:
    stderr = train(tmp_path / "run", 1, "lora.enable=true", "lora.dropout=0", env=visible(0))
    precision = (
        "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16-mixed"
    )
    assert f"precision: {precision}, chosen by `precision: auto`" in stderr
    assert report(tmp_path / "run")["precision"] == precision
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["lora"], rel=2e-2)
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()


def test_float16_with_loss_scaling(on_cpu: dict[str, list[float]], tmp_path: Path) -> None:
    train(tmp_path / "run", 1, "fp16=true", env=visible(0))
    values = losses(tmp_path / "run")
    assert values[0] == pytest.approx(on_cpu["full"][0], rel=2e-2)
    assert values[-1] < values[0]


def test_activation_checkpointing_with_padding_and_loader_workers(
    on_cpu: dict[str, list[float]], tmp_path: Path
) -> None:
    args = (
        "gradient_checkpointing=true",
        "packing=false",
        "dataloader_num_workers=1",
        "precision=32",
    )
    train(tmp_path / "run", 1, *args, env=visible(0))
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["full"], rel=1e-3)


def test_uses_all_visible_gpus_by_default(on_cpu: dict[str, list[float]], tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    ranks = max(index for index in (1, 2, 4, 8, 16) if index <= count)
    env = visible(*range(ranks))
    stderr = train(tmp_path / "run", ranks, "precision=32", env=env)
    result = report(tmp_path / "run")
    assert (result["device"], result["world_size"], len(result["peak_memory_bytes"])) == (
        "cuda",
        ranks,
        ranks,
    )
    assert (
        f"devices: {ranks} of {ranks} visible"
        f" (CUDA_VISIBLE_DEVICES='{env['CUDA_VISIBLE_DEVICES']}')" in stderr
    )
    for rank in range(ranks):
        assert f"cuda:{rank} {torch.cuda.get_device_name(rank)}" in stderr
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["full"], rel=1e-3)
    assert events(tmp_path / "run", "eval")


def test_rejects_more_gpus_than_visible(tmp_path: Path) -> None:
    done = run(
        *ARGS, f"output_dir={tmp_path / 'run'}", "parallel.num_gpus=2", expect=2, env=visible(0)
    )
    assert "`parallel.num_gpus: 2`: only 1 × cuda visible" in done.stderr
    assert "parallel.device=cpu" in done.stderr
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run(
        *ARGS, f"output_dir={tmp_path / 'run'}", "parallel.device=cuda", expect=2, env=hidden
    )
    assert "no accelerator was found (CUDA_VISIBLE_DEVICES='')" in done.stderr
    assert not (tmp_path / "run").exists()


def test_resumed_run_is_bitwise_equal(tmp_path: Path) -> None:
    args = (
        "parallel.mode=single",
        "lora.enable=true",
        "lora.dropout=0.1",
        "bf16=true",
        "deterministic=true",
        "save_steps=3",
        "lr_scheduler_type=constant",
    )
    train(tmp_path / "uninterrupted", 1, *args, env=visible(0))
    train(tmp_path / "resumed", 1, *args, "max_steps=3", env=visible(0))
    train(tmp_path / "resumed", 1, *args, "--allow-config-change", env=visible(0))
    assert report(tmp_path / "resumed")["resumed_from_step"] == 3
    assert digest(tmp_path / "resumed") == digest(tmp_path / "uninterrupted")

"""Test each strategy on one CUDA device, and on two with NCCL if the machine has them."""

import json
from pathlib import Path

import pytest
import torch
from commands import losses, report, run
from test_cuda import ARGS, cuda, on_cpu, train, visible

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
__all__ = ["cuda", "on_cpu"]  # fixtures

MODES = ["dp", "ddp", "zero1", "zero2", "zero3", "deepspeed", "tensor", "pipeline"]


@pytest.mark.parametrize("mode", MODES)
def test_strategy_on_one_device(mode: str, on_cpu: dict[str, list[float]], tmp_path: Path) -> None:
    train(tmp_path / "run", 1, f"parallel.mode={mode}", env=visible(0))
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["full"], rel=1e-3)
    assert report(tmp_path / "run")["strategy"] == mode
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_async_save_is_a_snapshot_of_its_step(tmp_path: Path) -> None:
    """Training changes the weights while the checkpoint is written in the background."""
    args = (
        "parallel.mode=single",
        "max_steps=12",
        "save_steps=1",
        "save_total_limit=null",
        "--allow-config-change",
    )
    train(tmp_path / "async", 1, *args, env=visible(0))
    train(tmp_path / "sync", 1, *args, "async_save=false", env=visible(0))
    for step in (1, 6, 11):
        name = f"checkpoints/step-{step:08d}"
        contents = [
            json.loads(run(str(tmp_path / folder / name), "--json", verb="inspect").stdout)
            for folder in ("async", "sync")
        ]
        assert contents[0]["digest"] == contents[1]["digest"]


def test_cpu_offload(on_cpu: dict[str, list[float]], tmp_path: Path) -> None:
    train(tmp_path / "run", 1, "parallel.mode=zero3", "parallel.cpu_offload=all", env=visible(0))
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["full"], rel=1e-3)


if torch.cuda.device_count() >= 2:

    def test_verify_on_two_devices(tmp_path: Path) -> None:
        done = run(
            *ARGS,
            "per_device_train_batch_size=4",
            "--world-size",
            "2",
            "--steps",
            "6",
            "--json",
            verb="verify",
        )
        results = {result["mode"]: result for result in json.loads(done.stdout)["modes"]}
        assert {name for name, result in results.items() if result["ok"]} >= {
            "ddp",
            "zero1",
            "zero2",
            "zero3",
            "tensor",
            "pipeline",
        }

"""Runs with float8 layers, emulated on a CPU: losses close to those of float32, the same checkpoint
from an interrupted run, compiled blocks."""

from pathlib import Path

import pytest
from commands import digest, losses, report, train

from paceline.checkpoint import store

pytestmark = [pytest.mark.slow, pytest.mark.soak]

FLOAT8 = ("fp8=rowwise", "fp8_emulate=true")
SETTINGS = ("learning_rate=1e-3", "lr_scheduler_type=constant")


@pytest.mark.parametrize("mode", ["ddp", "zero2", "zero3"])
def test_losses_and_checkpoints(mode: str, tmp_path: Path) -> None:
    args = (*SETTINGS, f"parallel.mode={mode}", "parallel.num_gpus=2")
    train(tmp_path / "float32", *args, "max_steps=4")
    train(tmp_path / "whole", *args, *FLOAT8, "max_steps=4")
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "float32"), rel=5e-3)
    assert losses(tmp_path / "whole") != losses(tmp_path / "float32")
    assert report(tmp_path / "whole")["fp8"] == "rowwise"
    tensors = [
        store.inspect(store.find(tmp_path / name))["tensors"] for name in ("whole", "float32")
    ]
    shapes = [
        {name: (each["dtype"], each["shape"]) for name, each in part.items()} for part in tensors
    ]
    assert shapes[0] == shapes[1]
    for step in (2, 4):
        train(tmp_path / "resumed", *args, *FLOAT8, f"max_steps={step}", "--allow-config-change")
    assert report(tmp_path / "resumed")["resumed_from_step"] == 2
    assert digest(tmp_path / "resumed") == digest(tmp_path / "whole")


def test_compiled_blocks_have_the_same_losses(tmp_path: Path) -> None:
    args = (*SETTINGS, *FLOAT8, "parallel.mode=single", "max_steps=4")
    train(tmp_path / "eager", *args)
    train(tmp_path / "compiled", *args, "torch_compile=true", "torch_compile_backend=aot_eager")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-3)

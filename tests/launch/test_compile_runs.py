"""Runs with torch.compile: the losses of eager runs, on one rank and on two."""

from pathlib import Path

import pytest
from commands import losses, report, train

from paceline.checkpoint import store

pytestmark = [pytest.mark.slow, pytest.mark.soak]

SETTINGS = ("max_steps=4", "learning_rate=1e-3")


@pytest.mark.parametrize(
    "args",
    [
        ("parallel.mode=single", "parallel.num_gpus=1"),
        ("parallel.mode=ddp", "parallel.num_gpus=2"),
        ("parallel.mode=zero3", "parallel.num_gpus=2", "gradient_checkpointing=full"),
    ],
    ids=["single", "ddp", "zero3"],
)
def test_compiled_runs_have_the_losses_of_eager_runs(args: tuple[str, ...], tmp_path: Path) -> None:
    train(tmp_path / "eager", *SETTINGS, *args)
    done = train(tmp_path / "compiled", *SETTINGS, *args, "torch_compile=true", timeout_s=580.0)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-5)
    compiled = report(tmp_path / "compiled")["compile"]
    assert compiled["graphs"] > 0
    assert compiled["recompilations"] == 0, done.stderr[-2000:]  # rows of many lengths
    names = [
        store.inspect(store.find(tmp_path / folder))["tensors"].keys()
        for folder in ("compiled", "eager")
    ]
    assert names[0] == names[1]

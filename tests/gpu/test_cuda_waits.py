"""Test that the host waits for the CUDA device in no step, as torch itself reports."""

from pathlib import Path

import pytest
import wait_watcher
from test_cuda import cuda, train, visible

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
__all__ = ["cuda"]  # fixture


@pytest.mark.parametrize(
    "settings",
    [
        ("precision=bf16-mixed",),
        ("precision=fp16-mixed", "packing=false"),
        ("precision=bf16-mixed", "gradient_checkpointing=full", "gradient_accumulation_steps=2"),
        ("precision=bf16-mixed", "parallel.mode=ddp"),
        ("precision=bf16-mixed", "parallel.mode=zero2", "lora.enable=true"),
        ("precision=bf16-mixed", "torch_compile=true"),
    ],
    ids="-".join,
)
def test_host_does_not_wait_in_a_step(settings: tuple[str, ...], tmp_path: Path) -> None:
    """A wait raises an error, which fails the run."""
    train(
        tmp_path / "run", 1, *settings, "max_steps=10", "logging_steps=100",
        f"callbacks=[{wait_watcher.__file__}:WaitWatcher]", env=visible(0),
    )  # fmt: skip

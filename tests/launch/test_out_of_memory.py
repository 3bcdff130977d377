"""A rank that runs out of memory says what fills it, what was predicted, and what would fit."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import run

from paceline.config.schema import Config
from paceline.core.errors import OutOfMemory
from paceline.core.failures import requested_size
from paceline.launch.out_of_memory import explain
from paceline.observe.out_of_memory import out_of_memory
from paceline.parallel.registry import layout
from paceline.planner.machine.local import local_machine
from paceline.train.run_spec import RunSpec

TASK = Path(__file__).with_name("hungry_task.py")


def test_error_names_kinds_prediction_and_fix(tmp_path: Path) -> None:
    settings = ("max_steps=9", "parallel.num_gpus=1", "parallel.device=cpu", "model=x", "dataset=x")
    process = run(
        f"task={TASK}:HungryTask",
        *settings,
        "per_device_train_batch_size=4",  # nothing is open, so no smaller setting is tried
        f"output_dir={tmp_path / 'run'}",
        verb="train",
        expect=1,
    )
    error = process.stderr[process.stderr.index("Out of memory") :]
    assert re.search(r"on cpu: [\d.]+ MiB in use, 1024.0 TiB requested", error)
    # 64 × 512 + 512 + 512 + 1 numbers of 4 bytes, twice that for AdamW's moments
    assert "parameters 132.0 KiB, gradients 132.0 KiB, optimizer 264.0 KiB" in error
    assert "The largest parameters are 0.weight 128.0 KiB" in error
    assert re.search(r"The plan predicted [\d.]+ KiB: parameters 132.0 KiB", error)
    assert "To fix: lower `per_device_train_batch_size` (now 4)" in error


def test_error_that_cannot_be_described_is_reported() -> None:
    class Strategy:
        world = SimpleNamespace(device=torch.device("cpu"))

        def memory_tensors(self) -> None:
            raise RuntimeError("the device does not respond")

    first = MemoryError("Tried to allocate 2.00 GiB")
    error = out_of_memory(first, Strategy(), torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    assert error.what.startswith("Out of memory on cpu: Tried to allocate 2.00 GiB (what")
    assert error.needed_bytes == 2 * 2**30


def test_fix_is_smallest_change_that_fits() -> None:
    config = Config.model_validate(
        {
            "model": "builtin:qwen2-micro",
            "dataset": "builtin:python-docs#64",
            # Nothing is open, so that the change is only proposed.
            "train_args": {"per_device_train_batch_size": 8, "gradient_checkpointing": "none"},
        }
    )
    spec = RunSpec(config, None, None, layout(config.parallel, 1, "single"), "cpu", 0.0)  # type: ignore[arg-type]
    needed_bytes = round(1.1 * local_machine(1, True, None).memory_bytes)
    text = explain(OutOfMemory("Out of memory", needed_bytes), spec)
    assert re.search(r"The plan predicted [\d.]+ MiB", text)
    # the least change, which need not be the one that saves most
    assert re.search(r"To fix: set `[a-z_]+=\S+.*` \([\d.]+ MiB predicted", text)


@pytest.mark.parametrize(
    ("message", "size_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", round(2.5 * 2**30)),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("", 0),
    ],
)
def test_requested_size_is_read_from_message(message: str, size_bytes: int) -> None:
    assert requested_size(message) == size_bytes

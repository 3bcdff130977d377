"""Compare the memory that runs on simulated devices allocate, whose tensors have values, with the
plan and with the simulation without values.

Rows are short, because the devices with values compute attention with matrix products.
"""

from pathlib import Path
from typing import Any

import memory_callbacks
import pytest
from commands import events
from device_runs import equal_rows, run_on
from memory_callbacks import TRAINING, read_sizes
from simulated import DEVICE

from paceline.config.load import load_config
from paceline.parallel.cost import total_bytes
from paceline.parallel.registry import layout
from paceline.planner.devices import find_device
from paceline.planner.estimate import estimate
from paceline.planner.machine.hardware import named_machine
from paceline.planner.micro_batch import micro_batch
from paceline.planner.model_profile import describe
from paceline.simulation.run import simulate

pytestmark = pytest.mark.slow

#: Mode → its ranks and settings.
MODES: dict[str, tuple[int, tuple[str, ...]]] = {
    **dict.fromkeys(("ddp", "zero1", "zero2", "zero3", "tensor"), (2, ())),
    "hybrid": (4, ("parallel.data=2", "parallel.tensor=2")),
    "pipeline": (2, ("gradient_accumulation_steps=4",)),
}
TRAININGS = {"full": (), "lora": ("lora.enable=true",)}
CHECKPOINTING = ("none", "full")
QUICK = [("zero3", "full", "none"), ("ddp", "lora", "full")]
STATE_TOLERANCE, PEAK_TOLERANCE = 0.02, 0.10


def train(folder: Path, model: str, mode: str, training: str, checkpointing: str) -> None:
    world_size, settings = MODES[mode]
    run_on(
        "cuda", f"model=builtin:{model}", *equal_rows(folder, 64),
        "per_device_train_batch_size=8", "precision=32", "max_steps=3",
        f"gradient_checkpointing={checkpointing}", f"parallel.mode={mode}",
        f"parallel.num_gpus={world_size}", *settings, *TRAININGS[training],
        f"callbacks=[{memory_callbacks.__file__}:MemoryProbe]", f"output_dir={folder}",
    )  # fmt: skip


def plan(folder: Path, mode: str) -> tuple[int, int]:
    """Return the bytes of the planned state and of the simulated peak, of the rank that uses
    most."""
    world_size, _ = MODES[mode]
    config: Any = load_config(folder / "config.yaml").config
    machine = named_machine(find_device(DEVICE)[0], None, world_size, None)
    planned, batch = layout(config.parallel, world_size), micro_batch(config)
    assert set(batch.lengths) == {64}
    profile = describe(config)
    cost = estimate(planned, config, profile, batch, machine).cost
    assert cost is not None
    # The plan counts the weights that zero2 gathers, and frees before the update.
    gathered = total_bytes(profile.shape.trained) if mode == "zero2" else 0
    return cost.state - gathered, simulate(config, planned, batch, machine)["peak_memory_bytes"]


def compare(folder: Path, model: str, mode: str, training: str, checkpointing: str) -> None:
    train(folder, model, mode, training, checkpointing)
    state, peak = plan(folder, mode)
    sizes = read_sizes(folder)
    assert max(each["state"] for each in sizes) == pytest.approx(state, rel=STATE_TOLERANCE)
    assert max(each[TRAINING] for each in sizes) == pytest.approx(peak, rel=PEAK_TOLERANCE)
    [memory] = events(folder, "memory")
    assert all(rank["activations"] > 0 for rank in memory["ranks"])


@pytest.mark.parametrize(("mode", "training", "checkpointing"), QUICK)
def test_allocated_memory_agrees_with_the_plan(
    mode: str, training: str, checkpointing: str, tmp_path: Path
) -> None:
    compare(tmp_path / "run", "qwen2-micro", mode, training, checkpointing)


@pytest.mark.soak
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("mode", MODES)
def test_every_strategy_agrees_with_the_plan(
    mode: str, training: str, checkpointing: str, tmp_path: Path
) -> None:
    compare(tmp_path / "run", "qwen2-tiny", mode, training, checkpointing)

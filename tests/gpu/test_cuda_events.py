"""Test the memory and device metrics of runs on CUDA devices. Deselected on machines without
one."""

from pathlib import Path

import pytest
from commands import events, report, run

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ARGS = (
    "model=builtin:qwen2-tiny",
    "dataset=builtin:python-docs#240",
    "max_length=128",
    "max_steps=4",
    "parallel.num_gpus=1",
)


def test_memory_event_of_a_step(tmp_path: Path) -> None:
    run(*ARGS, f"output_dir={tmp_path / 'run'}")
    (memory,) = events(tmp_path / "run", "memory")
    (rank,) = memory["ranks"]
    assert rank["activations"] > 0
    assert rank["total"] == sum(
        rank[kind] for kind in ("parameters", "gradients", "optimizer", "activations")
    )
    # The peak is reset for the measured step, but the peak of the whole run is not lost.
    assert rank["total"] <= report(tmp_path / "run")["peak_memory_bytes"][0]


def test_step_event_has_device_metrics(tmp_path: Path) -> None:
    run(*ARGS, f"output_dir={tmp_path / 'run'}")
    devices = events(tmp_path / "run", "step")[-1]["devices"]
    assert [device["rank"] for device in devices] == [0]
    assert 0 <= devices[0]["utilisation"] <= 1
    assert 0 < devices[0]["temperature_c"] < 120
    assert devices[0]["power_w"] > 0

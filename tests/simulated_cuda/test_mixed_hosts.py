"""Test runs over a host without an accelerator and a host with simulated CUDA devices."""

import os
from pathlib import Path

import pytest
from commands import MICRO, events, start
from device_runs import VARIABLES
from ranks import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_strategy.py"


def make_strategy_file(folder: Path, *, mixed_devices: bool) -> Path:
    """Write the example's strategy with or without support for devices of different types."""
    text = EXAMPLE.read_text()
    declared = text.replace(
        "        unequal_shares=True,",
        f"        unequal_shares=True,\n        mixed_devices={mixed_devices},",
    )
    assert declared != text
    file = folder / EXAMPLE.name
    file.write_text(declared)
    return file


def train_on_two_hosts(folder: Path, strategy: Path, expect: int) -> list[str]:
    """Train on the ranks of both hosts; return standard error of each."""
    model = [arg for arg in MICRO if arg != "parallel.device=cpu"]
    args = (
        *model,
        f"parallel.mode={strategy}:SPEC",
        "parallel.nnodes=2",
        f"parallel.rdzv_endpoint=127.0.0.1:{free_port()}",
        f"output_dir={folder / 'run'}",
        "max_steps=3",
        "precision=32",
    )
    threads = {"OMP_NUM_THREADS": "1"}
    hosts = [
        start(
            *args,
            f"parallel.node_rank={number}",
            env={**os.environ, **threads, "PACELINE_HOST": "ab"[number], **variables},
        )
        for number, variables in enumerate(({}, VARIABLES))
    ]
    outputs = []
    for host in hosts:
        _, err = host.communicate(timeout=280)
        assert host.returncode == expect, err[-3000:]
        outputs.append(err)
    return outputs


@pytest.mark.soak
def test_users_strategy_trains_on_devices_of_different_types(tmp_path: Path) -> None:
    outputs = train_on_two_hosts(tmp_path, make_strategy_file(tmp_path, mixed_devices=True), 0)
    assert "devices: cpu and cuda ranks in one run, over Gloo" in outputs[0]
    steps = events(tmp_path / "run", "step")
    assert [event["step"] for event in steps] == [1, 2, 3]
    assert steps[0]["loss"] > steps[2]["loss"]


@pytest.mark.soak
def test_strategy_that_does_not_declare_mixed_devices_is_refused(tmp_path: Path) -> None:
    outputs = train_on_two_hosts(tmp_path, make_strategy_file(tmp_path, mixed_devices=False), 2)
    assert all("device" in err and "'cuda' on b" in err for err in outputs), outputs
    assert not (tmp_path / "run" / "events.jsonl").exists()

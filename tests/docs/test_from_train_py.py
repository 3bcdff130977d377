"""The scripts of the guide "From my train.py" log the same losses as their Paceline configs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port

from paceline.models.builtin import resolve_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "from_train_py"
#: Largest relative difference of a loss.
BOUNDS = {
    "single_gpu": 1e-6,
    "data_parallel": 1e-6,
    "ddp_spawn": 1e-6,
    "torchrun_amp": 1e-3,
    "hf_trainer": 1e-6,
    "rpc_recommender": 1e-6,
}


def test_every_pair_is_compared() -> None:
    scripts = {file.stem for file in FOLDER.glob("*.py")}
    assert scripts - {"task", "rpc_recommender_task"} == set(BOUNDS)
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(BOUNDS)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_losses_are_equal(name: str, tmp_path: Path) -> None:
    script = [str(FOLDER / f"{name}.py")]
    if name == "torchrun_amp":
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = [*torchrun, *script]
    elif name == "hf_trainer":
        script += [str(resolve_model("builtin:qwen2-micro")), str(FOLDER / "chats.jsonl")]
    output = _run(script, tmp_path)
    expected = [float(line.split()[1]) for line in output.splitlines() if line.startswith("loss ")]
    run_dir = tmp_path / "run"
    config = FOLDER / f"{name}.yaml"
    _run(["-m", "paceline", "sft", str(config), f"output_dir={run_dir}"], ROOT)
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    losses = [event["loss"] for event in events if event["type"] == "step"]
    assert len(expected) >= 4
    assert losses == pytest.approx(expected, rel=BOUNDS[name], abs=0)


def _run(arguments: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    completed = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    return completed.stdout

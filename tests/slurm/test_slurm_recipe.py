"""Test the recipe of a job array on a real Slurm cluster, with a tiny model on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import MICRO, report, run
from slurm_cluster import start_slurm_cluster

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.slurm, pytest.mark.soak]

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "slurm-lora-ranks" / "job.sh"
ARGS = (
    *MICRO,
    "parallel.num_gpus=1",
    "max_steps=3",
    "split_dataset_ratio=0.1",
    "evaluation.num_samples=0",
)


def test_array_trains_every_rank_and_a_sweep_compares_them(tmp_path: Path) -> None:
    programs = tmp_path / "bin"  # `paceline` of this environment
    programs.mkdir()
    (programs / "paceline").write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    (programs / "paceline").chmod(0o755)
    with start_slurm_cluster() as cluster:
        environment = cluster.environment | {
            "PATH": f"{programs}{os.pathsep}{cluster.environment['PATH']}"
        }
        # The nodes of the test cluster have no GPUs and few cores.
        script = RECIPE.read_text().replace("#SBATCH --gpus-per-node=1\n", "")
        (tmp_path / "job.sh").write_text(script.replace("cpus-per-task=8", "cpus-per-task=1"))
        number = subprocess.check_output(
            ["sbatch", "--parsable", "job.sh", *ARGS], env=environment, cwd=tmp_path, text=True
        ).strip()
        for task in range(3):
            cluster.wait_for(f"{number}_{task}", "COMPLETED", timeout_s=300.0)
    folder = tmp_path / "output" / "lora-ranks"
    logs = {rank: (folder / f"rank-{rank}" / "events.jsonl").read_bytes() for rank in (8, 16, 64)}
    done = run(
        *ARGS,
        "lora.enable=true",
        "lora.rank=8,16,64",
        "--folder",
        "output/lora-ranks",
        "--json",
        verb="sweep",
        cwd=tmp_path,
    )
    results = json.loads(done.stdout)
    assert [result["status"] for result in results] == ["done"] * 3
    for rank, result in zip((8, 16, 64), results, strict=True):
        run_report = report(folder / f"rank-{rank}")
        assert result["metric"] == run_report["final_eval_loss"]
        assert result["wall_s"] == run_report["wall_s"]
        assert (folder / f"rank-{rank}" / "events.jsonl").read_bytes() == logs[rank]
    assert (folder / "sweep.html").is_file()

"""A run ends well if work that rank 0 does alone takes longer than a collective may take."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from commands import events, report, start

TASK = Path(__file__).parents[1] / "rank_zero_task.py"
#: Settings with which a kind of work is done by rank 0 alone, or with which rank 0 waits for the
#: shards of the other rank.
SETTINGS = {
    "save_model": [],
    "stand_still": [],
    "shards": ["parallel.mode=zero1"],
    "upload": [],
    "evaluate": ["evaluation.mode=rank0", "per_device_eval_batch_size=1"],
}


def start_run(folder: Path, slow: str, seconds: float, *args: str) -> Any:
    settings = [*SETTINGS[slow]]
    if slow == "upload":
        settings.append(f"checkpoint_dir={folder}/store")
    return start(
        "model=linear", "dataset=made-by-the-task", f"task={TASK}:SlowRankZero",
        f"output_dir={folder}/run", "parallel.device=cpu", "parallel.num_gpus=2",
        "parallel.collective_timeout_s=10", "per_device_train_batch_size=2", "max_steps=3",
        "save_steps=0", *settings, f"task_args.slow={slow}", f"task_args.seconds={seconds}", *args,
    )  # fmt: skip


def check_run(folder: Path, slow: str, seconds: float) -> None:
    start_s = time.monotonic()
    process = start_run(folder, slow, seconds)
    _, stderr = process.communicate(timeout=seconds + 120)
    assert process.returncode == 0, stderr
    assert time.monotonic() - start_s > seconds, "the work was slow"
    run = folder / "run"
    for kind in ("hang", "straggler", "fault"):
        assert events(run, kind) == []
    assert report(run)["restarts"] == 0
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_model_that_takes_longer_to_write_than_a_collective_may_take(tmp_path: Path) -> None:
    check_run(tmp_path, "save_model", 13.0)


@pytest.mark.soak
@pytest.mark.parametrize("slow", SETTINGS)
def test_slow_work_of_rank_zero(slow: str, tmp_path: Path) -> None:
    check_run(tmp_path, slow, 25.0)


@pytest.mark.soak
@pytest.mark.parametrize("slow", ["save_model", "stand_still", "evaluate"])
def test_very_slow_work_of_rank_zero(slow: str, tmp_path: Path) -> None:
    check_run(tmp_path, slow, 90.0)


@pytest.mark.soak
def test_error_names_key_if_rank_zero_stands_still_for_too_long(tmp_path: Path) -> None:
    process = start_run(tmp_path, "stand_still", 60.0, "recovery.rank0_timeout_s=3")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "rank 0 has made no progress for 3 s while it was writing the trained model" in stderr
    assert "`recovery.rank0_timeout_s`" in stderr
    assert events(tmp_path / "run", "fault") == []


@pytest.mark.soak
def test_rank_zero_that_is_stopped_is_reported_by_the_other(tmp_path: Path) -> None:
    process = start_run(tmp_path, "save_model", 25.0)
    while not list((tmp_path / "run").glob(".model.*.tmp/piece-1")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    pid = events(tmp_path / "run", "run_start")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(9.0)
    os.kill(pid, signal.SIGCONT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "[rank 1] rank 0 on" in stderr
    assert "its process is stopped (SIGSTOP)" in stderr

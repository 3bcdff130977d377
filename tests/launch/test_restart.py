"""Test that a run that was killed or stopped resumes with the same command, ends with bitwise the
same weights, and leaves no process behind."""

import json
import os
import random
import signal
import time

import psutil
import pytest
from commands import MICRO, digest, events, find_fork_server, report, start, train, wait_for_step

pytestmark = pytest.mark.slow

# LoRA adapters with dropout, gradient accumulation, loader workers, and saves within an epoch.
ARGS = (
    "lora.enable=true", "lora.dropout=0.1", "gradient_accumulation_steps=2",
    "max_steps=24", "save_steps=4", "dataloader_num_workers=1", "warmup_steps=3",
    "parallel.num_gpus=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def reference_digest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "run"
    train(folder, *ARGS)
    return digest(folder)


def start_run(folder):
    return start(*MICRO, f"output_dir={folder}", *ARGS)


def find_ranks(process):
    return find_fork_server(process).children(recursive=False)


def still_alive(processes, within_s=6.0):
    """Return the processes that have not exited within this time."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [
        process
        for process in alive
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def kill_rank(process, folder, rank_zero):
    """Kill rank 0, or any other rank."""
    pid = events(folder, "run_start")[-1]["pid"]
    next(rank for rank in find_ranks(process) if (rank.pid == pid) == rank_zero).kill()


def wait_for_attempt(folder, number, process, step, timeout_s=60.0):
    """Wait until attempt ``number`` (from 1) has logged ``step``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        steps = [
            (event["type"], event.get("step") or 0)
            for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        ]
        starts = [index for index, (kind, _) in enumerate(steps) if kind == "run_start"]
        if len(starts) >= number and any(
            kind == "step" and logged >= step for kind, logged in steps[starts[number - 1] :]
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"attempt {number} did not reach step {step}")


def test_killed_ranks_are_restarted_with_bitwise_equal_result(reference_digest, tmp_path):
    folder = tmp_path / "run"
    process = start_run(folder)
    # At step 9, the save of step 8 has begun. Only one save runs at a time, so step 4 is on disk.
    wait_for_step(folder, random.Random(1).randint(9, 14), process)
    descendants = psutil.Process(process.pid).children(recursive=True)
    kill_rank(process, folder, rank_zero=False)
    wait_for_attempt(folder, 2, process, step=16)
    descendants += psutil.Process(process.pid).children(recursive=True)
    kill_rank(process, folder, rank_zero=True)
    _, output = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert digest(folder) == reference_digest
    assert still_alive(descendants) == []
    assert report(folder)["restarts"] == 2
    assert report(folder)["resumed_from_step"] % 4 == 0
    faults = events(folder, "fault")
    assert [fault["ranks"] for fault in faults] == [[1], [0]]
    for fault in faults:
        assert f"rank {fault['ranks'][0]} (process" in output
        assert "was killed by SIGKILL" in fault["reason"]
    assert output.count("Restarting all ranks from the checkpoint of step") == 2


@pytest.mark.soak
def test_max_restarts_0_reports_rank_and_same_command_resumes(reference_digest, tmp_path):
    folder = tmp_path / "run"
    process = start(*MICRO, f"output_dir={folder}", *ARGS, "recovery.max_restarts=0")
    wait_for_step(folder, 9, process)
    kill_rank(process, folder, rank_zero=True)
    _, output = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "rank 0 (process" in output
    assert "was killed by SIGKILL" in output
    assert "run the same command again" in output
    assert events(folder, "run_end")[-1]["status"] == "failed"
    train(folder, *ARGS)
    assert digest(folder) == reference_digest
    assert report(folder)["restarts"] == 1


@pytest.mark.soak
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_resume_after_signal_loses_no_step(reference_digest, tmp_path, number, code):
    folder = tmp_path / "run"
    process = start_run(folder)
    wait_for_step(folder, 6, process)
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == code
    assert still_alive(descendants) == []
    stopped_at = report(folder)["steps"]
    assert report(folder)["status"] == "stopped"
    assert 6 <= stopped_at < 24
    train(folder, *ARGS)
    assert report(folder)["resumed_from_step"] == stopped_at
    assert digest(folder) == reference_digest


@pytest.mark.soak
def test_second_signal_kills_ranks_immediately(tmp_path):
    folder = tmp_path / "run"
    process = start_run(folder)
    wait_for_step(folder, 5, process)
    descendants = psutil.Process(process.pid).children(recursive=True)
    for rank in find_ranks(process):
        os.kill(rank.pid, signal.SIGSTOP)  # the ranks cannot finish their step
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert still_alive(descendants) == []
    assert events(folder, "run_end")[-1]["status"] == "stopped"
    assert "a second SIGINT killed the ranks" in events(folder, "run_end")[-1]["reason"]
    assert not (folder / "heartbeats.json").exists()


@pytest.mark.soak
def test_killed_launcher_leaves_no_process_and_resume_skips_corrupt_checkpoint(
    reference_digest, tmp_path
):
    folder = tmp_path / "run"
    process = start_run(folder)
    wait_for_step(folder, 13, process)
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert still_alive(descendants) == []
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    with open(next(newest.glob("state-*.safetensors")), "r+b") as handle:
        handle.seek(-5, os.SEEK_END)
        handle.write(b"\xff\xff")
    resumed = train(folder, *ARGS)
    assert "skipping a checkpoint" in resumed.stderr
    assert str(newest) in resumed.stderr
    assert digest(folder) == reference_digest


@pytest.mark.soak
def test_rejects_output_dir_in_use(tmp_path):
    folder = tmp_path / "run"
    process = start_run(folder)
    wait_for_step(folder, 1, process)
    os.kill(process.pid, signal.SIGSTOP)
    ranks = find_ranks(process)
    for rank in ranks:
        rank.suspend()
    try:
        rejected = train(folder, *ARGS, expect=2)
        assert f"in use by another run: process {process.pid} on " in rejected.stderr
    finally:
        for rank in ranks:
            rank.resume()
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        process.communicate(timeout=120)


@pytest.mark.soak
def test_one_of_two_simultaneous_runs_is_rejected(tmp_path):
    args = (
        *MICRO,
        f"output_dir={tmp_path / 'run'}",
        "max_steps=4",
        "save_steps=1",
        "save_total_limit=1",
    )
    processes = [start(*args), start(*args)]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 2], errors
    winner, error = processes[codes.index(0)], errors[codes.index(2)]
    assert f"in use by another run: process {winner.pid} on " in error
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]

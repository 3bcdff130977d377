"""Whatever ends a run, the same command goes on and ends with the same bits; nothing is left
behind."""

import json
import os
import random
import signal
import time

import psutil
import pytest
from commands import MICRO, digest, events, find_fork_server, report, start, train, wait_for_step

pytestmark = pytest.mark.slow

# Adapters with dropout, accumulation, loader processes, saves in the middle of an epoch.
ARGS = (
    "lora.enable=true", "lora.dropout=0.1", "gradient_accumulation_steps=2",
    "max_steps=24", "save_steps=4", "dataloader_num_workers=1", "warmup_steps=3",
    "parallel.num_gpus=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, *ARGS)
    return digest(folder)


def begin(folder):
    return start(*MICRO, f"output_dir={folder}", *ARGS)


def ranks_of(process):
    return find_fork_server(process).children(recursive=False)


def still_alive(processes, within_s=6.0):
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [
        process
        for process in alive
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def kill_a_rank(process, folder, first):
    """Rank 0 where ``first``, else another one."""
    pid = events(folder, "run_start")[-1]["pid"]
    next(rank for rank in ranks_of(process) if (rank.pid == pid) == first).kill()


def wait_for_attempt(folder, number, process, step, timeout_s=60.0):
    """Until the run is in its ``number``-th attempt, and has made ``step`` there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        kinds = [
            (event["type"], event.get("step") or 0)
            for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        ]
        starts = [place for place, (kind, _) in enumerate(kinds) if kind == "run_start"]
        if len(starts) >= number and any(
            kind == "step" and at >= step for kind, at in kinds[starts[number - 1] :]
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"attempt {number} did not come to step {step}")


def test_killed_ranks_are_replaced_and_the_run_ends_with_the_same_bits(undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = begin(folder)
    # From step 9 on the save of step 8 has begun, so that of step 4 is on disk: one save is in
    # flight at most.
    wait_for_step(folder, random.Random(1).randint(9, 14), process)
    everyone = psutil.Process(process.pid).children(recursive=True)
    kill_a_rank(process, folder, first=False)
    wait_for_attempt(folder, 2, process, step=16)
    everyone += psutil.Process(process.pid).children(recursive=True)
    kill_a_rank(process, folder, first=True)
    _, output = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert digest(folder) == undisturbed
    assert still_alive(everyone) == []
    assert report(folder)["restarts"] == 2
    assert report(folder)["resumed_from_step"] % 4 == 0
    faults = events(folder, "fault")
    assert len(faults) == 2
    assert faults[0]["ranks"] in ([1], [2])
    assert faults[1]["ranks"] == [0]
    for fault in faults:
        assert f"rank {fault['ranks'][0]} (process" in output
        assert "was killed by SIGKILL" in fault["reason"]
    assert output.count("Restarting all ranks from the checkpoint of step") == 2


@pytest.mark.soak
def test_without_restarts_the_rank_is_named_and_the_same_command_goes_on(undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = start(*MICRO, f"output_dir={folder}", *ARGS, "recovery.max_restarts=0")
    wait_for_step(folder, 9, process)
    kill_a_rank(process, folder, first=True)
    _, output = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "rank 0 (process" in output
    assert "was killed by SIGKILL" in output
    assert "give the same command again" in output
    assert events(folder, "run_end")[-1]["status"] == "failed"
    train(folder, *ARGS)
    assert digest(folder) == undisturbed
    assert report(folder)["restarts"] == 1


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGTERM, 143)],
)
def test_stopped_by_a_signal_commits_and_goes_on(undisturbed, tmp_path, number, code):
    folder = tmp_path / "run"
    process = begin(folder)
    wait_for_step(folder, 6, process)
    everyone = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == code
    assert still_alive(everyone) == []
    stopped_at = report(folder)["steps"]
    assert report(folder)["status"] == "stopped"
    assert 6 <= stopped_at < 24
    train(folder, *ARGS)
    assert report(folder)["resumed_from_step"] == stopped_at
    assert digest(folder) == undisturbed


@pytest.mark.soak
def test_a_second_signal_ends_at_once(tmp_path):
    folder = tmp_path / "run"
    process = begin(folder)
    wait_for_step(folder, 5, process)
    everyone = psutil.Process(process.pid).children(recursive=True)
    for rank in ranks_of(process):
        os.kill(rank.pid, signal.SIGSTOP)  # they cannot finish their step
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert still_alive(everyone) == []
    assert events(folder, "run_end")[-1]["status"] == "stopped"
    assert "a second SIGINT killed the ranks" in events(folder, "run_end")[-1]["reason"]
    assert not (folder / "heartbeats.json").exists()


@pytest.mark.soak
def test_a_killed_launcher_leaves_nothing_and_a_broken_checkpoint_is_passed_over(
    undisturbed, tmp_path
):
    folder = tmp_path / "run"
    process = begin(folder)
    wait_for_step(folder, 13, process)
    everyone = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert still_alive(everyone) == []
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    with open(next(newest.glob("state-*.safetensors")), "r+b") as handle:
        handle.seek(-5, os.SEEK_END)
        handle.write(b"\xff\xff")
    again = train(folder, *ARGS)
    assert "skipping a checkpoint" in again.stderr
    assert str(newest) in again.stderr
    assert digest(folder) == undisturbed


@pytest.mark.soak
def test_two_runs_in_one_folder(tmp_path):
    folder = tmp_path / "run"
    process = begin(folder)
    wait_for_step(folder, 1, process)
    os.kill(process.pid, signal.SIGSTOP)
    ranks = ranks_of(process)
    for rank in ranks:
        rank.suspend()
    try:
        refused = train(folder, *ARGS, expect=2)
        assert f"in use by another run: process {process.pid} on " in refused.stderr
    finally:
        for rank in ranks:
            rank.resume()
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        process.communicate(timeout=120)


@pytest.mark.soak
def test_of_two_runs_started_at_once_one_is_refused(tmp_path):
    args = (
        *MICRO,
        f"output_dir={tmp_path / 'run'}",
        "max_steps=4",
        "save_steps=1",
        "save_total_limit=1",
    )
    both = [start(*args), start(*args)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], errors
    winner, loser = both[codes.index(0)], errors[codes.index(2)]
    assert f"in use by another run: process {winner.pid} on " in loser
    assert [event["step"] for event in events(tmp_path / "run", "step")] == [1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]

"""The watchdog on real ranks reports hangs, mismatched collectives and stragglers, and nothing if
all ranks are equally fast."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import events, find_forked_ranks, start, wait_for_step
from ranks import run_ranks

from paceline.config.schema.recovery import RecoveryConfig
from paceline.core.errors import FaultError, RunError
from paceline.core.event_log import EventLog, read_events
from paceline.core.stop import StopFlag
from paceline.distributed.communicator import Communicator
from paceline.distributed.timing.progress import PROGRESS
from paceline.health.watchdog import Watchdog

# -- a minimal training loop on real ranks

#: Fault → the step in which it happens, if that is not step 10.
_FAULT_STEP = {"stop": 1}


class Reports:
    """The reports of a rank's watchdog, in the event log on rank 0 and on standard error on other
    ranks, and the calls by which it ended its rank."""

    def __init__(self) -> None:
        self.error = ""
        self.events: list[dict[str, Any]] = []
        self.failed: list[tuple[str, list[int]]] = []

    def get_events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


def _train(
    world: Communicator, folder: str, fault: str, recovery: dict[str, Any], steps: int = 30
) -> Reports:
    PROGRESS.start()
    reports, stop = Reports(), StopFlag()
    log = EventLog(Path(folder) / "events.jsonl" if world.rank == 0 else None)

    def fail(error: RunError) -> None:
        assert isinstance(error, FaultError)
        reports.failed.append((str(error), error.ranks))
        dist.distributed_c10d._get_default_store().set("failed", "yes")

    stop.fail = fail
    watchdog = Watchdog(
        RecoveryConfig(hang_warning_s=2.0, **recovery), 60.0, world, stop, Path(folder)
    )
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        watchdog.start()
        watchdog.watch(SimpleNamespace(world=world, has_data=True), log)  # type: ignore[arg-type]
        try:
            for step in range(1, steps + 1):
                _train_step(world, step, fault if step == _FAULT_STEP.get(fault, 10) else "")
            if fault == "skip" and world.rank == 1:
                watchdog.close()  # this rank has finished, with one collective too few
                dist.distributed_c10d._get_default_store().wait(["failed"])
                world.barrier()
        finally:
            watchdog.close()
    reports.error = stderr.getvalue()
    log.close()
    reports.events = read_events(log.path) if log.path is not None else []
    return reports


def _train_step(world: Communicator, step: int, fault: str) -> None:
    PROGRESS.begin_step(step)
    if fault == "sleep" and world.rank == 1:
        _load_data_slowly()
    if fault == "stop" and world.rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    PROGRESS.enter("forward")
    time.sleep(0.02)
    if not (fault == "skip" and world.rank == 1):
        world.barrier()
    PROGRESS.end_step()


def _load_data_slowly() -> None:
    time.sleep(6.0)


@pytest.mark.alone
@pytest.mark.soak
def test_rank_blocked_in_data_loading_is_reported_by_all_others(tmp_path: Path) -> None:
    first, slow, third = run_ranks(_train, 3, str(tmp_path), "sleep", {})
    (hang,) = first.get_events("hang")
    assert (hang["rank"], hang["phase"], hang["step"]) == (1, "data", 10)
    assert any("_load_data_slowly" in line for line in hang["stack"])
    assert "its last known stack" in hang["text"]
    assert [event["rank"] for event in first.get_events("hang_end")] == [1]
    assert "[rank 2] rank 1 on" in third.error
    assert "stack" not in third.error  # only one rank reports the stack
    assert slow.error == ""
    assert first.failed == slow.failed == third.failed == []


@pytest.mark.slow
def test_rank_that_is_stopped_before_its_thread_runs_is_reported(tmp_path: Path) -> None:
    first, _ = run_ranks(_train, 2, str(tmp_path), "stop", {})
    hang = first.get_events("hang")[0]
    assert (hang["rank"], hang["why"]) == (1, "its process is stopped (SIGSTOP)")


@pytest.mark.alone
@pytest.mark.soak
def test_other_ranks_end_after_the_hang_timeout(tmp_path: Path) -> None:
    first, slow, third = run_ranks(_train, 3, str(tmp_path), "sleep", {"hang_timeout_s": 3.0})
    assert slow.failed == []
    for reports in (first, third):
        text, blamed = reports.failed[0]
        assert blamed == [1]
        assert "rank 1 on" in text
        assert "the hang lasted longer than 3 s" in text


@pytest.mark.alone
@pytest.mark.soak
def test_rank_that_omitted_a_collective_is_reported(tmp_path: Path) -> None:
    first, *_ = run_ranks(_train, 3, str(tmp_path), "skip", {"hang_timeout_s": 2.0})
    hang = first.get_events("hang")[0]
    assert hang["rank"] == 1
    assert "it is 1 collective behind; it has ended" in hang["text"]
    assert first.failed[0][1] == [1]


@pytest.mark.alone
@pytest.mark.soak
def test_disabled_watchdog_reports_nothing(tmp_path: Path) -> None:
    by_rank = run_ranks(_train, 2, str(tmp_path), "sleep", {"watchdog": False})
    assert [(reports.error, reports.events, reports.failed) for reports in by_rank] == [
        ("", [], [])
    ] * 2


def _explain_mismatch(world: Communicator) -> tuple[str, str]:
    """Record different collectives without calling them, since gloo would end the process. Return
    the explanations of a collective's error and of another error."""
    PROGRESS.start()
    watchdog = Watchdog(RecoveryConfig(), 60.0, world, StopFlag())
    watchdog.start()
    PROGRESS.issue("all_reduce", torch.ones(10 if world.rank == 0 else 20), None)
    world.barrier()
    error = watchdog.explain(RuntimeError("op.preamble.length <= op.nbytes"))
    other = watchdog.explain(ValueError("something else"))
    watchdog.close()
    return str(error), str(other)


def test_failed_collective_is_explained_with_the_calls_of_all_ranks() -> None:
    for text, other in run_ranks(_explain_mismatch, 2):
        assert "rank 0: all_reduce of 10 float32 at" in text
        assert "rank 1: all_reduce of 20 float32 at" in text
        assert text.count("_explain_mismatch") == 2
        assert "op.preamble.length" in text
        assert other == "something else"


def _explain_other_error(world: Communicator) -> str:
    PROGRESS.start()
    watchdog = Watchdog(RecoveryConfig(), 60.0, world, StopFlag())
    watchdog.start()
    world.barrier()
    error = RuntimeError("connection closed")
    same = watchdog.explain(error) is error
    watchdog.close()
    return str(same)


def test_other_errors_are_unchanged() -> None:
    assert run_ranks(_explain_other_error, 2) == ["True", "True"]


@pytest.mark.alone
@pytest.mark.soak
def test_reads_the_flight_recorder_of_torch() -> None:
    """Each size needs a new process, since torch reads the variable only once."""
    code = (
        "import torch, torch.distributed as dist; from paceline.distributed import torch_compat;"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore());"
        "dist.all_reduce(torch.ones(3));"
        "print(b'\"profiling_name\"' in torch_compat.dump_flight_recorder())"
    )
    for size, expected in (("64", "True"), ("0", "False")):
        environment = {
            **os.environ,
            "TORCH_FR_BUFFER_SIZE": size,
            "TORCH_NCCL_TRACE_BUFFER_SIZE": size,
        }
        process = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout.strip() == expected, process.stderr


# -- whole runs

TASK = """\
import os, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
import paceline

class Faulty(paceline.Task):
    calls = 0
    def build_datasets(self):
        return TensorDataset(torch.linspace(0, 1, 64).unsqueeze(1)), None
    def build_model(self):
        return nn.Linear(1, 1)
    def loss(self, model, batch):
        self.calls += 1
        args = self.config.task_args
        time.sleep(args.get("base_s", 0.0))
        if int(os.environ["RANK"]) == args.get("rank"):
            self.fault(args["fault"], args["from_step"])
        elif (
            args.get("fault") in ("other_collective", "other_size")
            and self.calls == args["from_step"]
        ):
            dist.all_reduce(torch.ones(10))
        return (model(batch[0]) ** 2).sum()
    def fault(self, fault, from_step):
        if fault == "slow" and self.calls >= from_step:
            time.sleep(0.2)
        if fault == "other_collective" and self.calls == from_step:
            dist.broadcast(torch.ones(3), src=0)
        if fault == "other_size" and self.calls == from_step:
            dist.all_reduce(torch.ones(20))
"""


def start_run(tmp_path: Path, *args: str, num_ranks: int = 2) -> Any:
    (tmp_path / "faulty.py").write_text(TASK)
    return start(
        "model=faulty", "dataset=made-by-the-task", f"task={tmp_path}/faulty.py:Faulty",
        f"output_dir={tmp_path}/run", "parallel.device=cpu", f"parallel.num_gpus={num_ranks}",
        "per_device_train_batch_size=2", "logging_steps=1", *args,
    )  # fmt: skip


def wait_for_event(
    folder: Path, kind: str, process: Any, timeout_s: float = 60.0
) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        matching = events(folder, kind)
        if matching:
            return matching[0]
        time.sleep(0.05)
    raise AssertionError(f"no event {kind}")


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_stopped_process_is_reported_within_ten_seconds_and_continues(
    tmp_path: Path, mode: str
) -> None:
    process = start_run(
        tmp_path, "max_steps=60", f"parallel.mode={mode}", "task_args.base_s=0.02", num_ranks=3
    )
    run = tmp_path / "run"
    wait_for_step(run, 5, process)
    victim = next(
        child
        for child in find_forked_ranks(process)
        if child.pid != events(run, "run_start")[0]["pid"]
    )
    os.kill(victim.pid, signal.SIGSTOP)
    stopped_at = time.time()
    try:
        hang = wait_for_event(run, "hang", process)
        time.sleep(2.0)  # the other ranks detect the hang separately
        stopped_s = time.time() - stopped_at
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert hang["since_s"] < 10
    assert hang["rank"] in (1, 2)
    assert f"process {victim.pid}" in hang["text"]
    assert "its process is stopped" in hang["text"]
    assert hang["stack"]
    assert (
        f"rank {3 - hang['rank']}] rank {hang['rank']} on" in stderr
    )  # the other rank prints it too
    assert [event["rank"] for event in events(run, "hang_end")] == [hang["rank"]]
    (pause,) = events(run, "straggler")  # reported by the rank itself after SIGCONT
    assert pause["rank"] == hang["rank"]
    assert pause["steps"] == 1
    assert stopped_s - 1 < pause["slower_by_s"] < stopped_s + 5
    assert "was paused" in pause["text"]


@pytest.mark.alone
@pytest.mark.soak
def test_mismatched_collectives_end_the_run_with_both_call_sites(tmp_path: Path) -> None:
    process = start_run(
        tmp_path, "max_steps=30", "recovery.max_restarts=0", "recovery.hang_warning_s=2",
        "recovery.hang_timeout_s=6", "task_args.rank=1", "task_args.fault=other_collective",
        "task_args.from_step=12",
    )  # fmt: skip
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "all_reduce of 10 float32 at" in stderr
    assert "broadcast of 3 float32 at" in stderr
    line = TASK.splitlines().index("            dist.all_reduce(torch.ones(10))") + 1
    assert f"faulty.py:{line} in loss" in stderr
    assert "in fault" in stderr


@pytest.mark.alone
@pytest.mark.slow
def test_mismatched_sizes_are_reported_although_gloo_aborts(tmp_path: Path) -> None:
    process = start_run(
        tmp_path, "max_steps=30", "task_args.rank=1", "task_args.fault=other_size",
        "task_args.from_step=12", "task_args.base_s=0.1",  # time for the rendezvous of the ranks
    )  # fmt: skip
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "error: the ranks have issued different collectives" in stderr
    assert "rank 0: all_reduce of 10 float32 at" in stderr
    assert "rank 1: all_reduce of 20 float32 at" in stderr
    assert events(tmp_path / "run", "fault") == []  # no restart, since the fault would recur


@pytest.mark.alone
@pytest.mark.soak
def test_rank_slower_by_200_ms_is_reported_within_ten_steps(
    tmp_path: Path,
) -> None:
    process = start_run(
        tmp_path, "max_steps=45", "task_args.base_s=0.05", "task_args.rank=2",
        "task_args.fault=slow", "task_args.from_step=20", num_ranks=4,
    )  # fmt: skip
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    (straggler,) = events(tmp_path / "run", "straggler")
    assert straggler["rank"] == 2
    steps_before_report = [
        event["step"]
        for event in events(tmp_path / "run", "step")
        if event["time"] <= straggler["time"]
    ]
    assert steps_before_report[-1] - 20 < 10
    assert 0.15 < straggler["slower_by_s"] < 0.3
    assert max(straggler["share"], key=straggler["share"].get) == "compute_s"
    assert "rank 2 on" in stderr


def check_no_reports(tmp_path: Path, steps: int) -> None:
    process = start_run(
        tmp_path, f"max_steps={steps}", "task_args.base_s=0.005", "save_steps=50", num_ranks=4
    )
    _, stderr = process.communicate(timeout=590)
    assert process.returncode == 0, stderr
    assert [events(tmp_path / "run", kind) for kind in ("straggler", "hang")] == [[], []]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.soak
def test_no_reports_in_200_even_steps(tmp_path: Path) -> None:
    check_no_reports(tmp_path, 200)


@pytest.mark.alone
@pytest.mark.soak
def test_no_reports_in_1000_even_steps(tmp_path: Path) -> None:
    check_no_reports(tmp_path, 1000)

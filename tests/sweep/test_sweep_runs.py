"""Test sweeps with real runs on two CPU ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import MICRO, events, report

pytestmark = [pytest.mark.slow, pytest.mark.soak]

SHORT = (
    *MICRO,
    "evaluation.num_samples=0",
    "lora.enable=true",
)
DEFAULTS = ("parallel.num_gpus=2", "split_dataset_ratio=0.1")
CALLBACKS = '''
"""Callbacks of test runs: they fail, wait or are slow."""

import json
import os
import time
from pathlib import Path

import paceline


class Failing(paceline.Callback):
    def on_step_end(self, result, state):
        if self.config.task_args["fails"] and state.step == 2:
            raise ValueError("this run fails")


class Waiting(paceline.Callback):
    """Waits for another run of the sweep, and records the cores of this one."""

    def on_train_begin(self, info, state):
        folder = Path(info.output_dir)
        (folder / "cores.json").write_text(json.dumps(list(os.sched_getaffinity(0))))
        deadline = time.monotonic() + 150
        while len(list(folder.parent.glob("*/cores.json"))) < 2:
            if time.monotonic() > deadline:
                raise TimeoutError("no other run has started")
            time.sleep(0.1)


class Slow(paceline.Callback):
    def on_step_end(self, result, state):
        time.sleep(self.config.task_args["pause_s"])
'''


def start_sweep(folder: Path, *args: str) -> subprocess.Popen[str]:
    """Start `paceline sweep` as users do: its times include the start of Python and its imports."""
    command = [sys.executable, "-m", "paceline", "sweep", *SHORT, "--folder", str(folder), *args]
    keys = {arg.partition("=")[0] for arg in args}
    command += [text for text in DEFAULTS if text.partition("=")[0] not in keys]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder.parent,
    )


def sweep(folder: Path, *args: str, expect: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Run a sweep. Return the list that `--json` prints, and what it prints on standard error."""
    process = start_sweep(folder, "--json", *args)
    out, err = process.communicate(timeout=400)
    assert process.returncode == expect, err[-3000:]
    return json.loads(out) if out else [], err


def write_callbacks(folder: Path) -> None:
    (folder / "callbacks.py").write_text(CALLBACKS)


def wait_until(folder: Path, number: int, step: int, process: subprocess.Popen[str]) -> Path:
    """Wait until the run ``number`` (from 0) has made ``step`` steps. Return its folder."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        state = folder / "sweep.json"
        if state.is_file():
            run = json.loads(state.read_text())["runs"][number]
            run_folder = folder / run["name"]
            if run["status"] == "running" and (run_folder / "events.jsonl").is_file():
                steps = [event["step"] for event in events(run_folder, "step")]
                if steps and steps[-1] >= step:
                    return run_folder
        time.sleep(0.1)
    raise AssertionError(f"run {number} did not reach step {step}")


def test_grid_runs_every_combination_and_starts_faster_the_second_time(tmp_path: Path) -> None:
    folder = tmp_path / "grid"
    arguments = ("max_steps=3", "lora.rank=2,4", "learning_rate=1e-3,1e-2")
    results, err = sweep(folder, *arguments)
    assert [result["overrides"] for result in results] == [
        {"lora.rank": rank, "learning_rate": rate} for rank in (2, 4) for rate in (1e-3, 1e-2)
    ]
    assert {result["status"] for result in results} == {"done"}
    for result in results:
        run_report = report(Path(result["output_dir"]))
        assert run_report["world_size"] == 2
        assert run_report["final_eval_loss"] == result["metric"]
        assert run_report["time_to_first_step_s"] == result["time_to_first_step_s"]
    first, *others = [result["time_to_first_step_s"] for result in results]
    assert max(others) < first
    # The ranks of all runs were forked from one server.
    launchers = {
        events(Path(result["output_dir"]), "run_start")[0]["launcher"] for result in results
    }
    assert len(launchers) == 1
    assert "run 4 of 4: lora.rank=4, learning_rate=1e-2: done, eval_loss" in err
    assert "step 1" not in err  # one line per run

    logs = [Path(result["output_dir"], "events.jsonl").read_bytes() for result in results]
    again, err = sweep(folder, *arguments)
    assert again == results
    assert [Path(result["output_dir"], "events.jsonl").read_bytes() for result in again] == logs
    assert "run 1 of" not in err

    # A part of the grid can be asked for, and a changed config is refused.
    subset, _ = sweep(folder, *arguments[:-1], "learning_rate=1e-3")
    assert [result["metric"] for result in subset] == [results[0]["metric"], results[2]["metric"]]
    _, err = sweep(folder, *arguments, "seed=7", expect=2)
    assert "train_args.seed: 42 → 7" in err


def test_complete_runs_make_further_steps_and_deleted_ones_are_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "further"
    sweep(folder, "max_steps=3", "lora.rank=2,4")
    shutil.rmtree(folder / "rank-2")
    arguments = ("max_steps=5", "lora.rank=2,4", "--metric=train_loss")
    _, err = sweep(folder, *arguments, expect=2)
    assert "train_args.max_steps: 3 → 5" in err
    assert not (folder / "rank-2").exists()
    results, _ = sweep(folder, *arguments, "--allow-config-change")
    reports = [report(Path(result["output_dir"])) for result in results]
    assert [run_report["steps"] for run_report in reports] == [5, 5]
    assert [run_report["resumed_from_step"] for run_report in reports] == [None, 3]
    losses = [run_report["final_train_loss"] for run_report in reports]
    assert [result["metric"] for result in results] == losses


def test_interrupted_sweep_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "interrupted"
    write_callbacks(tmp_path)
    arguments = (
        "max_steps=6",
        "callbacks=[./callbacks.py:Slow]",
        "task_args.pause_s=0.5",
        "lora.rank=2,4,8",
    )
    process = start_sweep(folder, *arguments)
    wait_until(folder, 1, 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err[-3000:]
    assert "To continue, run the same command again" in err
    statuses = [run["status"] for run in json.loads((folder / "sweep.json").read_text())["runs"]]
    assert statuses == ["done", "stopped", "pending"]
    log = (folder / "rank-2" / "events.jsonl").read_bytes()

    results, err = sweep(folder, *arguments)
    assert [result["status"] for result in results] == ["done"] * 3
    assert (folder / "rank-2" / "events.jsonl").read_bytes() == log
    assert report(folder / "rank-4")["resumed_from_step"] >= 2
    assert report(folder / "rank-8")["resumed_from_step"] is None
    assert "run 2 of 3, resumed: lora.rank=4" in err


def test_killed_sweep_leaves_no_process_and_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    write_callbacks(tmp_path)
    arguments = (
        "max_steps=6",
        "save_steps=2",
        "callbacks=[./callbacks.py:Slow]",
        "task_args.pause_s=0.5",
        "lora.rank=2,4",
    )
    process = start_sweep(folder, *arguments)
    wait_until(folder, 0, 3, process)
    process.kill()  # the fixture `no_leaked_process` checks that its processes end too
    process.communicate(timeout=60)
    results, _ = sweep(folder, *arguments)
    assert [result["status"] for result in results] == ["done", "done"]
    assert report(folder / "rank-2")["resumed_from_step"] == 2


def test_failed_run_is_reported_and_the_others_are_made(tmp_path: Path) -> None:
    folder = tmp_path / "failing"
    write_callbacks(tmp_path)
    arguments = ("max_steps=3", "callbacks=[./callbacks.py:Failing]", "task_args.fails=true,false")
    results, err = sweep(folder, *arguments, expect=1)
    assert [result["status"] for result in results] == ["failed", "done"]
    assert "this run fails" in results[0]["error"]
    assert results[0]["metric"] is None
    assert "this run fails" in err
    page = (folder / "sweep.html").read_text()
    assert "this run fails" in page
    # The failed run is made again, and fails again.
    again, _ = sweep(folder, *arguments, expect=1)
    assert [result["status"] for result in again] == ["failed", "done"]
    assert again[1] == results[1]


def test_invalid_combination_is_refused_before_the_first_run(tmp_path: Path) -> None:
    folder = tmp_path / "invalid"
    _, err = sweep(folder, "max_steps=3", "lora.rank=2,-4", expect=2)
    assert "1 of 2 checked combinations cannot run" in err
    assert "lora.rank=-4" in err
    _, err = sweep(folder, "max_steps=3", "load_best_model_at_end=false,true",
                   "split_dataset_ratio=0", expect=2)  # fmt: skip
    assert "there is no validation data" in err
    _, err = sweep(folder, "lora.rank=2,4", "split_dataset_ratio=0", "--metric=eval_loss", expect=2)
    assert "`--metric eval_loss` is a metric of evaluations" in err
    _, err = sweep(folder, "lora.rank=2,4", "--metric=eval_los", expect=2)
    assert "`--metric eval_los`: evaluations have no such metric" in err
    assert "did you mean `eval_loss`?" in err
    assert not folder.exists()


def test_runs_at_the_same_time_use_separate_cores(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    folder = tmp_path / "parallel"
    write_callbacks(tmp_path)
    results, err = sweep(
        folder,
        "max_steps=3",
        "parallel.num_gpus=1",
        "callbacks=[./callbacks.py:Waiting]",
        "lora.rank=2,4",
        "--parallel",
        "2",
    )
    # Each run has waited for the other.
    assert [result["status"] for result in results] == ["done", "done"]
    cores = [
        set(json.loads(Path(result["output_dir"], "cores.json").read_text())) for result in results
    ]
    assert cores[0].isdisjoint(cores[1])
    lines = [line for line in err.splitlines() if line.startswith("run ")]
    assert sorted(line.partition(", eval_loss")[0] for line in lines) == [
        "run 1 of 2: lora.rank=2: done",
        "run 2 of 2: lora.rank=4: done",
    ]


def test_search_prunes_runs_that_are_worse(tmp_path: Path) -> None:
    folder = tmp_path / "search"
    write_callbacks(tmp_path)
    arguments = (
        "max_steps=8",
        "eval_steps=2",
        "callbacks=[./callbacks.py:Slow]",
        "task_args.pause_s=0.3",
        "learning_rate=1e-6..1e-1:log",
    )
    results, err = sweep(folder, *arguments, "--trials", "7")
    statuses = [result["status"] for result in results]
    assert set(statuses) == {"done", "pruned"}, statuses
    best = min(result["metric"] for result in results if result["status"] == "done")
    for result in results:
        assert 1e-6 <= result["overrides"]["learning_rate"] <= 1e-1
        if result["status"] == "pruned":
            steps = [event["step"] for event in events(Path(result["output_dir"]), "step")]
            assert steps[-1] < 8
            assert result["metric"] > best
    assert "pruned, worse than the median so far" in err
    again, _ = sweep(folder, *arguments, "--trials", "8")
    assert again[:7] == results
    assert len(again) == 8

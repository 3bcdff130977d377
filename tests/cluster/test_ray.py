"""Test runs on a real Ray cluster of two nodes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import MICRO, digest, events, losses, report, run, start, train
from ray_nodes import find_workers, start_ray_cluster

from paceline.cli import main
from paceline.cluster.failures import AgentFolder
from paceline.cluster.ray.worker import _memory_failure
from paceline.config.load import load_config
from paceline.core.files import cache_dir

SMALL_MEMORY_TASK = Path(__file__).parents[1] / "launch" / "small_memory_task.py"
STEPS = ("max_steps=60", "save_steps=10", "learning_rate=1e-3")


def wait_for_step(
    folder: Path, number: int, process: subprocess.Popen[str], timeout_s: float = 300.0
) -> None:
    deadline = time.monotonic() + timeout_s
    while not (folder / "events.jsonl").exists() or not any(
        event["step"] >= number for event in events(folder, "step")
    ):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, f"step {number} was not reached"
        time.sleep(0.02)


@pytest.mark.soak
@pytest.mark.alone
def test_killed_worker_does_not_change_result(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    reference, folder = tmp_path / "reference", tmp_path / "run"
    train(reference, *STEPS, "parallel.num_gpus=2")
    with start_ray_cluster() as environment:
        process = start(
            *MICRO,
            *STEPS,
            f"output_dir={folder}",
            "--num-workers",
            "2",
            "--json",
            verb="ray",
            env=environment,
        )
        wait_for_step(folder, 12, process)
        first_pid = events(folder, "run_start")[0]["pid"]
        (other,) = [process for process in find_workers(environment) if process.pid != first_pid]
        other.kill()
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
    assert "with rank 0; " in err  # two nodes with one rank each
    (fault,) = events(folder, "fault")
    assert fault["ranks"] == [1]
    assert f"process {other.pid}" in fault["reason"]
    assert fault["step"] >= 12
    assert len(events(folder, "resume")) == 1
    assert json.loads(out) == report(folder)
    assert json.loads(out)["restarts"] == 1
    assert digest(folder) == digest(reference)


@pytest.mark.soak
@pytest.mark.alone
def test_out_of_memory_continues_with_smaller_settings(tmp_path):
    folder, fixed = tmp_path / "run", tmp_path / "fixed"
    settings = (
        f"task={SMALL_MEMORY_TASK}:SmallMemoryTask", "model=x", "dataset=x", "max_steps=4",
        "lr_scheduler_type=constant", "parallel.device=cpu",
        f"task_args.notes={tmp_path / 'notes'}",
    )  # fmt: skip
    sizes = ("per_device_train_batch_size=2", "gradient_accumulation_steps=2")
    run(*settings, *sizes, "parallel.num_gpus=2", f"output_dir={fixed}", verb="train")
    # An earlier run may have stored the settings that worked.
    (cache_dir() / "memory-settings.json").unlink(missing_ok=True)
    with start_ray_cluster() as environment:
        args = (*settings, "--num-workers", "2")
        failed = run(
            *args, f"output_dir={tmp_path / 'failed'}", "--max-failures", "0",
            verb="ray", env=environment, expect=1,
        )  # fmt: skip
        run(*args, f"output_dir={folder}", "--max-failures", "1", verb="ray", env=environment)
    [event] = events(folder, "memory_fallback")
    assert event["settings"] == {
        "train_args.per_device_train_batch_size": 2,
        "train_args.gradient_accumulation_steps": 2,
    }
    assert [each["settings"] for each in report(folder)["memory_fallbacks"]] == [event["settings"]]
    assert losses(folder) == pytest.approx(losses(fixed), rel=1e-5)
    assert "set `per_device_train_batch_size=2 gradient_accumulation_steps=2`" in failed.stderr


def test_worker_that_fails_before_it_joins_the_others_is_not_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert (
        _memory_failure(AgentFolder(tmp_path), load_config(None, ["model=x", "dataset=x"])) is None
    )


@pytest.mark.soak
@pytest.mark.alone
def test_config_error_is_not_retried(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    with start_ray_cluster() as environment:
        for args in (["dataset=nothing.jsonl"], ["dataset=rows.jsonl"]):
            done = run(
                *MICRO, *args, "output_dir=run", "--num-workers", "2", "--max-failures", "5",
                verb="ray", env=environment, cwd=tmp_path, expect=2,
            )  # fmt: skip
            assert done.stderr.count("error: ") == 1
            assert done.stderr.count("Ray nodes:") <= 1
            assert "restarted the workers" not in done.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.soak
@pytest.mark.alone
def test_ctrl_c_saves_checkpoint_and_same_command_resumes(tmp_path):
    args = [*MICRO, "max_steps=400", "save_steps=1000", "output_dir=run", "--num-workers", "2"]
    with start_ray_cluster() as environment:
        process = start(*args, verb="ray", env=environment, cwd=tmp_path)
        wait_for_step(tmp_path / "run", 5, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130, err[-3000:]
        stopped_at = report(tmp_path / "run")["steps"]
        assert stopped_at < 400
        assert f"step-{stopped_at:08d}" in {
            path.name for path in (tmp_path / "run" / "checkpoints").iterdir()
        }
        run(*args, verb="ray", env=environment, cwd=tmp_path)
    assert report(tmp_path / "run")["resumed_from_step"] == stopped_at
    assert report(tmp_path / "run")["steps"] == 400


SCRIPT = """
import json, sys
from ray.train import FailureConfig, RunConfig, ScalingConfig
from paceline.core.errors import ConfigError
from paceline.ray import TorchTrainer

config = {"model": "builtin:qwen2-micro", "dataset": "builtin:python-docs#64", "max_length": 64,
          "output_dir": "run", "train_args": {"max_steps": 3}, "parallel": {"device": "cpu"}}
scaling = ScalingConfig(num_workers=2)
run_config = RunConfig(storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=2))
trainer = TorchTrainer(config, scaling_config=scaling, run_config=run_config)
results = trainer.results()
print(json.dumps([
    [rank["status"], rank["report"]["steps"], rank["report"]["final_train_loss"]]
    for rank in results
]))
print(json.dumps(TorchTrainer(config, scaling_config=scaling).fit()["steps"]))  # already finished
try:
    TorchTrainer(config, overrides={"dataset": "nothing.jsonl"}, scaling_config=scaling).fit()
except ConfigError as error:
    print("refused", "nothing.jsonl" in str(error))
"""


@pytest.mark.soak
@pytest.mark.alone
def test_trainer_returns_result_of_each_rank(tmp_path):
    with start_ray_cluster() as environment:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "ray")],
            env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("[", "3", "refused")) or line == "3"
    ]
    first, second = json.loads(lines[0])
    assert first == second
    assert first[:2] == ["done", 3]
    assert lines[1:] == ["3", "refused True"]


RAY_TRAINING_FUNCTION = """
import json, sys
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
import paceline

def loop():
    report = paceline.train({
        "model": "builtin:qwen2-micro", "dataset": "builtin:python-docs#64", "max_length": 64,
        "output_dir": sys_argv[2], "train_args": {"max_steps": 3}, "parallel": {"device": "cpu"},
    })
    assert report["steps"] == 3 and report["world_size"] == 2, report

sys_argv = sys.argv
run_config = RunConfig(storage_path=sys.argv[1])
TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=run_config).fit()
"""


@pytest.mark.soak
@pytest.mark.alone
def test_train_in_ray_training_function_uses_its_process_group(tmp_path):
    with start_ray_cluster() as environment:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                RAY_TRAINING_FUNCTION,
                str(tmp_path / "ray"),
                str(tmp_path / "run"),
            ],
            env=environment, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    assert report(tmp_path / "run")["steps"] == 3


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "add `--num-workers N`"),
        (["--num-workers", "0"], "1 or more"),
        (["--num-workers", "2", "--num-worker", "3"], "did you mean `--num-workers`?"),
        (["--num-workers", "2", "--address", "ray://head:10001"], "ray job submit"),
        (["--num-workers", "2", "--working-dir", "missing"], "is not a folder"),
        (["--num-workers", "2", "max_stepz=3"], "max_steps"),
    ],
)
def test_invalid_options_start_nothing(args, text, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["ray", *MICRO, *args, f"output_dir={tmp_path / 'run'}"]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert not [
        process
        for process in psutil.Process().children(recursive=True)
        if "raylet" in process.name()
    ]


@pytest.mark.slow
def test_unreachable_cluster_starts_nothing(tmp_path):
    args = [f"output_dir={tmp_path / 'run'}", "--num-workers", "2", "--address", "127.0.0.1:1"]
    done = run(*MICRO, *args, verb="ray", expect=2)
    assert "no Ray cluster answers at 127.0.0.1:1" in done.stderr
    assert not (tmp_path / "run").exists()

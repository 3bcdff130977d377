"""`parameter_server` when a rank's process dies: the run reports it and ends or continues, as
configured."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from commands import start

from paceline.core.event_log import read_events
from paceline.strategies.parameter_server.collectives import CollectiveServer, WorkerExit

TASK = """
import os, signal
from pathlib import Path
from paceline.tasks.recommend import RecommendTask

class Killer(RecommendTask):
    '''Kills ranks: `kills` lists "RANK at LOSS", "RANK at eval", "RANK at save" (of the model) or
    "VICTIM by RANK at LOSS".'''
    losses = evaluations = 0

    def build_datasets(self):
        (Path(self.config.task_args["pids"]) / os.environ["RANK"]).write_text(str(os.getpid()))
        return super().build_datasets()

    def kill_if_due(self, moment):
        for kill in self.config.task_args["kills"]:
            parts = kill.split()
            killer = parts[2] if "by" in parts else parts[0]
            if killer == os.environ["RANK"] and parts[-1] == str(moment):
                pid = (Path(self.config.task_args["pids"]) / parts[0]).read_text()
                os.kill(int(pid), signal.SIGKILL)

    def loss(self, model, batch):
        self.losses += 1
        self.kill_if_due(self.losses)
        return super().loss(model, batch)

    def evaluate(self, model, batch):
        self.evaluations += 1
        self.kill_if_due("eval" if self.evaluations == 2 else None)
        return super().evaluate(model, batch)

    def save_from(self, source, folder):
        self.kill_if_due("save")
        return super().save_from(source, folder)

class SkipsSamples(RecommendTask):
    '''Rank 0 trains on no samples in step `task_args.step`.'''
    losses = 0

    def count(self, batch):
        is_step = self.losses + 1 == self.config.task_args["step"]
        skipped = self.model_is_training and os.environ["RANK"] == "0" and is_step
        return 0 if skipped else super().count(batch)

    def build_model(self):
        self.model = super().build_model()
        return self.model

    @property
    def model_is_training(self):
        return self.model.training

    def loss(self, model, batch):
        self.losses += 1
        skipped = os.environ["RANK"] == "0" and self.losses == self.config.task_args["step"]
        return super().loss(model, batch) * (0.0 if skipped else 1.0)
"""
STEPS = 16


def make_args(
    tmp_path: Path, name: str, task: str, *args: str, steps: int = STEPS, logging: int = 1
) -> list[str]:
    (tmp_path / "tasks.py").write_text(TASK)
    (tmp_path / "pids").mkdir(exist_ok=True)
    return [
        "model=builtin:dlrm",
        f"task={tmp_path}/tasks.py:{task}", "dataset=builtin:clicks#3000",
        "split_dataset_ratio=0.2", f"output_dir={tmp_path}/{name}", "parallel.device=cpu",
        "parallel.num_gpus=3", "train_args.per_device_train_batch_size=16",
        f"train_args.max_steps={steps}", f"train_args.logging_steps={logging}",
        "train_args.optim=adagrad", "train_args.learning_rate=0.05", "recovery.max_restarts=0",
        *args,
    ]  # fmt: skip


def run(tmp_path: Path, name: str, task: str, *args: str) -> subprocess.CompletedProcess[str]:
    process = start(*make_args(tmp_path, name, task, *args))
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def server_args(tmp_path: Path, *kills: str) -> list[str]:
    return [
        "parallel.mode=parameter_server", "parameter_server.num_servers=2",
        "parameter_server.on_worker_failure=continue", f"task_args.pids={tmp_path}/pids",
        f"task_args.kills={json.dumps(kills)}",
    ]  # fmt: skip


def losses_by_step(run_dir: Path) -> dict[int, float]:
    return {
        event["step"]: event["loss"]
        for event in read_events(run_dir / "events.jsonl")
        if event["type"] == "step"
    }


@pytest.mark.slow
@pytest.mark.soak
def test_model_is_written_by_another_rank_if_rank_zero_dies_meanwhile(tmp_path: Path) -> None:
    process = run(tmp_path, "served", "Killer", *server_args(tmp_path, "0 at save"))
    assert process.returncode == 0, process.stderr
    assert "was killed by SIGKILL" in process.stderr
    report = json.loads((tmp_path / "served" / "report.json").read_text())
    assert [loss["rank"] for loss in report["workers_lost"]] == [0]
    assert list((tmp_path / "served" / "model").glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.soak
def test_run_that_loses_two_workers_matches_ddp(tmp_path: Path) -> None:
    """Rank 0, which writes the log and coordinates the checkpoints, dies in step 6, and rank 2
    during the last evaluation. Without their samples the run matches ddp."""
    process = run(
        tmp_path,
        "served",
        "Killer",
        *server_args(tmp_path, "0 at 6", "2 at eval"),
        "train_args.save_steps=5",
        "train_args.save_total_limit=9",
    )
    output = process.stderr.replace("\n", " ")
    assert process.returncode == 0, process.stderr
    pids = {rank: int((tmp_path / "pids" / str(rank)).read_text()) for rank in range(5)}
    for rank in (0, 2):
        assert (
            output.count(f"rank {rank}, a worker (process {pids[rank]}), was killed by SIGKILL")
            == 1
        )
    assert (
        "from step 7 each global batch is shared among 2 workers; 16 samples of step 6 were not"
        " trained on" in output
    )
    assert "tensorpipe" not in output
    report = json.loads((tmp_path / "served" / "report.json").read_text())
    lost = [(loss["rank"], loss["step"], loss["samples_unseen"]) for loss in report["workers_lost"]]
    assert (report["status"], lost) == ("done", [(0, 6, 16), (2, STEPS, 0)])
    assert report["samples_seen"] == STEPS * 48 - 16
    peaks = report["peak_memory_bytes"]
    assert [rank for rank in range(5) if peaks[rank] is None] == [0, 2]
    saved = {path.name for path in (tmp_path / "served" / "checkpoints").iterdir()}
    assert saved - {"step-00000005"} == {"step-00000010", "step-00000015", "step-00000016"}
    if "step-00000005" not in saved:  # rank 0 died while the checkpoint was written
        assert "no checkpoint at step 5" in output
    # The same training with ddp, in which rank 0 leaves out its samples of step 6.
    process = run(tmp_path, "ddp", "SkipsSamples", "parallel.mode=ddp", "task_args.step=6")
    assert process.returncode == 0, process.stderr
    ours, theirs = losses_by_step(tmp_path / "served"), losses_by_step(tmp_path / "ddp")
    assert set(ours) == set(theirs) == set(range(1, STEPS + 1))
    assert all(abs(loss - theirs[step]) <= 1e-5 * theirs[step] for step, loss in ours.items())
    other = json.loads((tmp_path / "ddp" / "report.json").read_text())
    assert report["final_eval_loss"] == pytest.approx(other["final_eval_loss"], rel=1e-5)
    # evaluated on all rows
    assert report["final_eval_metrics"]["best_auc"] == other["final_eval_metrics"]["best_auc"]


@pytest.mark.slow
@pytest.mark.soak
def test_bounded_run_continues_after_worker_is_killed(tmp_path: Path) -> None:
    """No rank waits for the clock of the dead worker, and the run exports the full model."""
    bounded = ["parameter_server.consistency=bounded", "parameter_server.max_staleness=1"]
    args = make_args(
        tmp_path, "run", "Killer", *server_args(tmp_path), *bounded, steps=400, logging=10
    )
    process = start(*args)
    output: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: output.extend(process.stderr or []))
    reader.start()
    events = tmp_path / "run" / "events.jsonl"
    deadline = time.monotonic() + 120
    while not events.exists() or not any(
        event["type"] == "step" and event["step"] >= 10 for event in read_events(events)
    ):
        assert process.poll() is None, output
        assert time.monotonic() < deadline, output
        time.sleep(0.05)
    pid = int((tmp_path / "pids" / "1").read_text())
    os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=200) == 0, output
    reader.join()
    assert f"rank 1, a worker (process {pid}), was killed by SIGKILL" in " ".join(output)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    (lost,) = report["workers_lost"]
    assert (report["steps"], lost["rank"], lost["pid"]) == (400, 1, pid)
    assert lost["samples_unseen"] % 16 == 0
    assert report["samples_seen"] == 400 * 48 - lost["samples_unseen"]
    assert report["staleness"] == {"bound": 1, "seen": 1}
    assert (tmp_path / "run" / "model" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "blamed"),
    [
        pytest.param(("4 by 1 at 5",), "rank 4, a server of the tables", marks=pytest.mark.soak),
        (("0 at 3", "1 at 5", "2 at 7"), "rank 2, a worker"),
    ],
)
@pytest.mark.soak
def test_losing_a_server_or_all_workers_ends_the_run(
    tmp_path: Path, kills: tuple[str, ...], blamed: str
) -> None:
    process = run(tmp_path, "run", "Killer", *server_args(tmp_path, *kills))
    output = process.stderr.replace("\n", " ")
    assert process.returncode == 1, process.stderr
    pid = (tmp_path / "pids" / blamed.split()[1].rstrip(",")).read_text()
    assert f"{blamed} (process {pid}) was killed" in output
    assert "To resume: run the same command again" in output
    for rank in ("0", "1") if len(kills) > 1 else ():
        assert (
            f"rank {rank}, a worker (process {(tmp_path / 'pids' / rank).read_text()}), was killed"
            " by SIGKILL" in output
        )


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(("victim", "role"), [(1, "a worker"), (3, "a server of the tables")])
def test_killed_rank_ends_the_run_by_default(tmp_path: Path, victim: int, role: str) -> None:
    args = ["parallel.mode=parameter_server", f"task_args.pids={tmp_path}/pids"]
    kills = f'task_args.kills=["{victim} by 1 at 3"]'
    process = run(tmp_path, "run", "Killer", *args, kills)
    assert process.returncode == 1, process.stderr
    pid = (tmp_path / "pids" / str(victim)).read_text()
    output = process.stderr.replace("\n", " ")
    assert f"rank {victim}, {role} (process {pid}) was killed" in output
    assert "To resume: run the same command again" in output
    # the event of step 2 may not have been written when the rank dies
    assert max(losses_by_step(tmp_path / "run"), default=0) in (1, 2)


def test_collective_completes_without_lost_ranks() -> None:
    server = CollectiveServer(3)
    first = [server.join(rank, 1, rank * 10) for rank in (0, 2)]
    assert not any(future.done() for future in first)
    second = server.join(0, 2, "early")
    server.lose(WorkerExit(1, 7, "ended"))
    assert [future.value() for future in first] == [
        ({0: 0, 2: 20}, {1: WorkerExit(1, 7, "ended")})
    ] * 2
    assert not second.done()
    # The values of a lost rank in incomplete collectives are discarded.
    server.lose(WorkerExit(2, 8, "ended"))
    assert second.value()[0] == {0: "early"}
    assert server.join(0, 3, None).value()[0] == {0: None}

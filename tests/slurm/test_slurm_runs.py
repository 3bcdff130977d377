"""`paceline slurm` on a real Slurm: two nodes train one job, Slurm stops it in its several ways; it
ends with the same bits."""

import contextlib
import os
import shutil
import time

import psutil
import pytest
from commands import MICRO, digest, events, report, run
from slow_task import SLOW
from slurm_cluster import slurm_cluster

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.slurm]

# Loader processes, adapters with dropout, saves in the middle of an epoch.
ARGS = (
    *MICRO, "lora.enable=true", "lora.dropout=0.1", "dataloader_num_workers=1", "warmup_steps=3",
    "parallel.collective_timeout_s=60", "max_steps=24", "save_steps=4",
)  # fmt: skip
# Steps of 0.1 s at least.
_SLOW = (
    *SLOW, "parallel.mode=ddp", "dataloader_num_workers=1", "warmup_steps=3",
    "parallel.collective_timeout_s=60", "save_steps=0",
    "task_args.step_s=0.1",
)  # fmt: skip
BRIEF = (*_SLOW, "max_steps=120")
SAVING = (*(arg for arg in BRIEF if not arg.startswith("save_steps")), "save_steps=10")
LONG = (*_SLOW, "max_steps=400")  # Slurm looks at time limits every 30 s
# Sums come out the same to the last bit where as many threads make them: a rank alone on its node
# would take two.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs of two ranks on this machine without Slurm, by their words."""
    made = {}

    def make(args):
        if args not in made:
            folder = tmp_path_factory.mktemp("undisturbed") / "run"
            quick = [arg for arg in args if not arg.startswith("task_args.step_s")]
            run(
                *quick,
                f"output_dir={folder}",
                "parallel.num_gpus=2",
                env={**os.environ, **ONE_THREAD},
            )
            made[args] = digest(folder)
            shutil.rmtree(folder)
        return made[args]

    return make


def submit(cluster, folder, args, *options):
    """Write the script and hand it to Slurm; the job's number."""
    run_args = (*args, f"output_dir={folder / 'run'}", "parallel.num_gpus=1")
    options = options or ("--time", "30")
    workdir = folder / "a folder"
    workdir.mkdir()
    done = run(
        *run_args, "--nodes", "2", "--gpus-per-node", "0", "--job-name", "two", *options,
        "--submit",
        verb="slurm", env={**cluster.environment, **ONE_THREAD}, cwd=workdir,
    )  # fmt: skip
    return int(done.stdout.split("job ")[1].partition(";")[0])


def log_of(folder, number):
    path = folder / "a folder" / f"two-{number}.log"
    return path.read_text() if path.exists() else ""


def wait_for_step(cluster, folder, number, step, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        cluster.wait_for(number, "RUNNING", "PENDING", "COMPLETING")
        if (folder / "run" / "events.jsonl").exists() and any(
            event["step"] >= step for event in events(folder / "run", "step")
        ):
            return
        time.sleep(0.05)
    raise AssertionError(
        f"step {step} was not reached: {log_of(folder, number)[-3000:]}{cluster.logs()}"
    )


def wait_for_end(cluster, folder, number, timeout_s=240.0):
    try:
        return cluster.wait_for(number, "COMPLETED", timeout_s=timeout_s)
    except AssertionError as error:
        raise AssertionError(
            f"{error}\n--- the job's log\n{log_of(folder, number)[-6000:]}"
        ) from None


def attempts(folder):
    """(step gone on from, steps made) of each start."""
    result = []
    for event in map(dict, all_events(folder)):
        if event["type"] == "run_start":
            result.append([event["resumed_from_step"] or 0, event["resumed_from_step"] or 0])
        elif event["type"] == "step":
            result[-1][1] = event["step"]
    return result


def all_events(folder):
    return sorted(
        events(folder / "run", "run_start") + events(folder / "run", "step"),
        key=lambda event: event["time"],
    )


@pytest.mark.soak
def test_two_nodes_train_one_job(cluster, undisturbed, tmp_path):
    number = submit(cluster, tmp_path, ARGS)
    wait_for_end(cluster, tmp_path, number)
    assert report(tmp_path / "run")["world_size"] == 2  # one rank a node
    assert digest(tmp_path / "run") == undisturbed(ARGS)


@pytest.mark.soak
def test_put_back_into_the_queue_by_hand(cluster, undisturbed, tmp_path):
    number = submit(cluster, tmp_path, BRIEF)
    wait_for_step(cluster, tmp_path, number, 20)
    cluster("scontrol", "requeue", str(number))
    result = wait_for_end(cluster, tmp_path, number)
    assert result["Restarts"] == "1"
    assert digest(tmp_path / "run") == undisturbed(BRIEF)
    first, second = attempts(tmp_path)
    assert second[0] == first[1], "a step was lost"


@pytest.mark.soak
def test_a_job_of_higher_priority_takes_the_nodes(cluster, undisturbed, tmp_path):
    """Slurm's pre-emption: SIGTERM, then some seconds of grace in which the step is finished and a
    checkpoint written."""
    number = submit(cluster, tmp_path, BRIEF)
    wait_for_step(cluster, tmp_path, number, 20)
    other = cluster(
        "sbatch",
        "--parsable",
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 1",
    )
    cluster.wait_for(int(other), "COMPLETED")
    wait_for_end(cluster, tmp_path, number)
    assert digest(tmp_path / "run") == undisturbed(BRIEF)
    first, second = attempts(tmp_path)
    assert second[0] == first[1], "a step was lost"
    assert "goes back into the queue" in log_of(tmp_path, number)


@pytest.mark.soak
def test_the_time_limit_comes(cluster, undisturbed, tmp_path):
    number = submit(cluster, tmp_path, LONG)
    wait_for_step(cluster, tmp_path, number, 20)
    hours, minutes, _ = cluster.job(number)["RunTime"].split(":")
    # minutes after the start: within the 120 s of the signal's lead
    soon = int(hours) * 60 + int(minutes) + 2
    cluster("scontrol", "update", f"JobId={number}", f"TimeLimit={soon}")
    cluster.wait_for(number, "PENDING")
    cluster("scontrol", "update", f"JobId={number}", "TimeLimit=30")
    wait_for_end(cluster, tmp_path, number)
    assert digest(tmp_path / "run") == undisturbed(LONG)
    first, second = attempts(tmp_path)
    assert second[0] == first[1], "a step was lost"
    assert "goes back into the queue" in log_of(tmp_path, number)


def commands_of(number, node):
    """The command that srun started on a node, and the processes of its ranks."""
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if (
                environment.get("SLURM_JOB_ID") == str(number)
                and environment.get("SLURM_NODEID") == str(node)
                and "SLURM_STEP_NODELIST" in environment
            ):
                result.append(process)
    return result


@pytest.mark.soak
@pytest.mark.parametrize("node", [0, 1], ids=["first", "second"])
def test_the_command_of_a_node_is_killed(cluster, undisturbed, tmp_path, node):
    """The node is not lost: the batch script puts the job back into the queue. The first node is
    the rendezvous endpoint."""
    number = submit(cluster, tmp_path, SAVING)
    wait_for_step(cluster, tmp_path, number, 25)
    killed = commands_of(number, node)
    assert killed
    for process in killed:
        with contextlib.suppress(psutil.Error):
            process.kill()
    cluster.wait_for(number, "PENDING", timeout_s=180)
    log = log_of(tmp_path, number)
    assert "killed on a node by signal 9 (time 1 of 3 without a new checkpoint)" in log
    result = wait_for_end(cluster, tmp_path, number)
    assert result["Restarts"] == "1"
    assert digest(tmp_path / "run") == undisturbed(SAVING)
    *_, last = attempts(tmp_path)
    assert last[0] >= 20, "it resumed from a checkpoint"


@pytest.fixture
def own_cluster():
    """For a test that ends daemons and starts others."""
    with slurm_cluster() as running:
        yield running


@pytest.mark.soak
def test_the_first_node_is_lost(own_cluster, undisturbed, tmp_path):
    """With the node its batch script and the rendezvous endpoint are gone: Slurm puts the job back
    into the queue."""
    cluster = own_cluster
    number = submit(cluster, tmp_path, SAVING)
    wait_for_step(cluster, tmp_path, number, 25)
    cluster.lose_node("n1")
    cluster.wait_for(number, "PENDING", timeout_s=180)
    cluster.boot_node("n1")
    result = wait_for_end(cluster, tmp_path, number)
    assert result["Restarts"] == "1"
    assert digest(tmp_path / "run") == undisturbed(SAVING)
    *_, last = attempts(tmp_path)
    assert last[0] >= 20, "it resumed from a checkpoint"


@pytest.mark.soak
def test_a_config_error_is_not_tried_again(cluster, tmp_path):
    args = (
        "model=builtin:qwen2-micro",
        "dataset=missing.jsonl",
        "parallel.device=cpu",
        "parallel.collective_timeout_s=60",
    )
    number = submit(cluster, tmp_path, args)
    with pytest.raises(AssertionError):
        cluster.wait_for(number, "COMPLETED")
    result = cluster.job(number)
    assert (result["JobState"], result["ExitCode"], result["Restarts"]) == ("FAILED", "2:0", "0")
    assert "missing.jsonl" in log_of(tmp_path, number)


def test_a_job_that_slurm_refuses(cluster, tmp_path):
    args = (
        "--nodes",
        "2",
        "--gpus-per-node",
        "0",
        "--time",
        "30",
        "--partition",
        "nowhere",
        "--submit",
    )
    done = run(*MICRO, *args, verb="slurm", env=cluster.environment, cwd=tmp_path, expect=1)
    assert "Slurm rejected the job" in done.stderr
    assert "partition" in done.stderr
    assert "sinfo" in done.stderr
    assert list(tmp_path.iterdir()) == []

"""Test `paceline slurm` on a real Slurm cluster of two nodes.

Slurm stops the job in several ways; the run must end with bitwise the same weights as without.
"""

import contextlib
import os
import shutil
import time

import psutil
import pytest
from commands import MICRO, digest, events, report, run
from slow_task import SLOW
from slurm_cluster import start_slurm_cluster

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.slurm]

# Loader workers, LoRA adapters with dropout, and saves within an epoch.
ARGS = (
    *MICRO, "lora.enable=true", "lora.dropout=0.1", "dataloader_num_workers=1", "warmup_steps=3",
    "parallel.collective_timeout_s=60", "max_steps=24", "save_steps=4",
)  # fmt: skip
# Each step takes at least 0.1 s.
_SLOW = (
    *SLOW, "parallel.mode=ddp", "dataloader_num_workers=1", "warmup_steps=3",
    "parallel.collective_timeout_s=60", "save_steps=0",
    "task_args.step_s=0.1",
)  # fmt: skip
BRIEF = (*_SLOW, "max_steps=120")
SAVING = (*(arg for arg in BRIEF if not arg.startswith("save_steps")), "save_steps=10")
LONG = (*_SLOW, "max_steps=400")  # Slurm checks time limits every 30 s
# Floating-point sums are only reproducible with the same number of threads. By default, a single
# rank on a node would use two.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cluster():
    with start_slurm_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def reference_digest(tmp_path_factory):
    """Return a function that maps settings to the digest of a cached run of two ranks without
    Slurm."""
    digests = {}

    def make(args):
        if args not in digests:
            folder = tmp_path_factory.mktemp("reference") / "run"
            fast_args = [arg for arg in args if not arg.startswith("task_args.step_s")]
            run(
                *fast_args,
                f"output_dir={folder}",
                "parallel.num_gpus=2",
                env={**os.environ, **ONE_THREAD},
            )
            digests[args] = digest(folder)
            shutil.rmtree(folder)
        return digests[args]

    return make


def submit(cluster, folder, args, *options):
    """Submit the job with `paceline slurm --submit`; return its ID."""
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


def read_log(folder, number):
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
        f"step {step} was not reached: {read_log(folder, number)[-3000:]}{cluster.logs()}"
    )


def wait_for_end(cluster, folder, number, timeout_s=240.0):
    try:
        return cluster.wait_for(number, "COMPLETED", timeout_s=timeout_s)
    except AssertionError as error:
        raise AssertionError(
            f"{error}\n--- the job's log\n{read_log(folder, number)[-6000:]}"
        ) from None


def attempts(folder):
    """Return (step resumed from, last step) of each attempt."""
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
def test_job_on_two_nodes(cluster, reference_digest, tmp_path):
    number = submit(cluster, tmp_path, ARGS)
    wait_for_end(cluster, tmp_path, number)
    assert report(tmp_path / "run")["world_size"] == 2  # one rank a node
    assert digest(tmp_path / "run") == reference_digest(ARGS)


@pytest.mark.soak
def test_requeue_loses_no_step(cluster, reference_digest, tmp_path):
    number = submit(cluster, tmp_path, BRIEF)
    wait_for_step(cluster, tmp_path, number, 20)
    cluster("scontrol", "requeue", str(number))
    result = wait_for_end(cluster, tmp_path, number)
    assert result["Restarts"] == "1"
    assert digest(tmp_path / "run") == reference_digest(BRIEF)
    first, second = attempts(tmp_path)
    assert second[0] == first[1], "a step was lost"


@pytest.mark.soak
def test_preemption_loses_no_step(cluster, reference_digest, tmp_path):
    """Slurm preempts the job with SIGTERM and a grace period, in which the run finishes its step
    and writes a checkpoint."""
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
    assert digest(tmp_path / "run") == reference_digest(BRIEF)
    first, second = attempts(tmp_path)
    assert second[0] == first[1], "a step was lost"
    assert "goes back into the queue" in read_log(tmp_path, number)


@pytest.mark.soak
def test_time_limit_loses_no_step(cluster, reference_digest, tmp_path):
    number = submit(cluster, tmp_path, LONG)
    wait_for_step(cluster, tmp_path, number, 20)
    hours, minutes, _ = cluster.job(number)["RunTime"].split(":")
    # The new limit is less than 120 s away, the time before the limit at which Slurm sends SIGTERM.
    limit_min = int(hours) * 60 + int(minutes) + 2
    cluster("scontrol", "update", f"JobId={number}", f"TimeLimit={limit_min}")
    cluster.wait_for(number, "PENDING")
    cluster("scontrol", "update", f"JobId={number}", "TimeLimit=30")
    wait_for_end(cluster, tmp_path, number)
    assert digest(tmp_path / "run") == reference_digest(LONG)
    first, second = attempts(tmp_path)
    assert second[0] == first[1], "a step was lost"
    assert "goes back into the queue" in read_log(tmp_path, number)


def find_processes(number, node):
    """Return the command that srun has started on a node, and the processes of its ranks."""
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
def test_killed_command_requeues_job(cluster, reference_digest, tmp_path, node):
    """The node itself is not lost, so the batch script requeues the job. The first node is the
    rendezvous endpoint."""
    number = submit(cluster, tmp_path, SAVING)
    wait_for_step(cluster, tmp_path, number, 25)
    victims = find_processes(number, node)
    assert victims
    for process in victims:
        with contextlib.suppress(psutil.Error):
            process.kill()
    cluster.wait_for(number, "PENDING", timeout_s=180)
    log = read_log(tmp_path, number)
    assert "killed on a node by signal 9 (time 1 of 3 without a new checkpoint)" in log
    result = wait_for_end(cluster, tmp_path, number)
    assert result["Restarts"] == "1"
    assert digest(tmp_path / "run") == reference_digest(SAVING)
    *_, last = attempts(tmp_path)
    assert last[0] >= 20, "it resumed from a checkpoint"


@pytest.fixture
def separate_cluster():
    """Start a cluster for a test that stops and starts daemons."""
    with start_slurm_cluster() as running:
        yield running


@pytest.mark.soak
def test_lost_first_node_requeues_job(separate_cluster, reference_digest, tmp_path):
    """The batch script and the rendezvous endpoint are lost with the node, so Slurm requeues the
    job."""
    cluster = separate_cluster
    number = submit(cluster, tmp_path, SAVING)
    wait_for_step(cluster, tmp_path, number, 25)
    cluster.lose_node("n1")
    cluster.wait_for(number, "PENDING", timeout_s=180)
    cluster.boot_node("n1")
    result = wait_for_end(cluster, tmp_path, number)
    assert result["Restarts"] == "1"
    assert digest(tmp_path / "run") == reference_digest(SAVING)
    *_, last = attempts(tmp_path)
    assert last[0] >= 20, "it resumed from a checkpoint"


@pytest.mark.soak
def test_config_error_is_not_requeued(cluster, tmp_path):
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
    assert "missing.jsonl" in read_log(tmp_path, number)


def test_rejected_submission_is_an_error(cluster, tmp_path):
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

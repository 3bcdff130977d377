"""Test runs on several hosts, with one agent and one rank for each host on this machine.

tests/cluster/test_faults_hosts.py has the tests in network namespaces.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import (
    MICRO,
    digest,
    events,
    find_fork_server,
    losses,
    report,
    run,
    start,
    train,
    wait_for_step,
)
from ranks import free_port

from paceline.cluster.endpoint import is_listening
from paceline.core.files import cache_dir

pytestmark = pytest.mark.slow

# The order of floating-point sums depends on the number of threads, and the default number depends
# on the ranks of the host.
THREADS = {"OMP_NUM_THREADS": "1"}
SETTINGS = {
    "max_steps": 16,
    "save_steps": 4,
    "parallel.num_gpus": 1,
    "warmup_steps": 3,
    "parallel.collective_timeout_s": 60,
}


def make_args(**settings):
    """Return the settings of a run as arguments; two underscores stand for a dot."""
    settings = {**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}}
    return [f"{key}={value}" for key, value in settings.items()]


def start_host(folder, port, number, **settings):
    """Start the agent of one host."""
    environment = {**os.environ, **THREADS, "PACELINE_HOST": "abc"[number]}
    rendezvous = {
        "parallel__nnodes": 2,
        "parallel__rdzv_endpoint": f"127.0.0.1:{port}",
        "parallel__node_rank": number,
    }
    return start(
        *MICRO, f"output_dir={folder}", *make_args(**{**rendezvous, **settings}), env=environment
    )


def wait_for_exit(process, expect=0):
    _out, err = process.communicate(timeout=150)
    assert process.returncode == expect, (
        f"exit code {process.returncode}, expected {expect}\n{err[-3000:]}"
    )
    return err


def find_rank(process):
    """Return the process of the agent's only rank."""
    return find_fork_server(process).children()[0]


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference_run") / "run"
    train(folder, *make_args(parallel__num_gpus=2), env={**os.environ, **THREADS})
    return folder


@pytest.mark.soak
def test_two_hosts_match_one_host_despite_killed_rank_and_killed_agent(reference_run, tmp_path):
    """One run, since most of the time of this test is the start of the hosts."""
    folder, port = tmp_path / "run", free_port()
    hosts = [start_host(folder, port, number) for number in range(2)]
    wait_for_step(folder, 6, hosts[0])
    find_rank(hosts[1]).kill()
    wait_for(lambda: len(events(folder, "run_start")) == 2, hosts[0])
    wait_for_step(folder, 10, hosts[0])
    hosts[1].kill()
    output_of_killed_agent = hosts[1].communicate()[1]
    hosts[1] = start_host(folder, port, 1)
    outputs = [wait_for_exit(host) for host in hosts]
    assert digest(folder) == digest(reference_run)
    assert "rank 1 on host b (process" in outputs[0]
    assert "was killed by SIGKILL" in outputs[0]
    assert "host b with rank 1 was lost" in outputs[0]
    assert "host b: 127.0.0.1 on lo" in output_of_killed_agent
    assert report(folder)["restarts"] == 2
    faults = events(folder, "fault")
    assert [(fault["ranks"], fault["hosts"]) for fault in faults] == [([1], ["b"])] * 2


@pytest.mark.soak
def test_elastic_run_shrinks_and_grows(reference_run, tmp_path):
    folder, port = tmp_path / "run", free_port()
    settings = {"parallel__nnodes": "1:2", "max_steps": 400, "lr_scheduler_type": "constant"}
    hosts = [start_host(folder, port, number, **settings) for number in range(2)]
    wait_for_step(folder, 6, hosts[0])
    hosts[1].kill()
    hosts[1].communicate()
    wait_for(lambda: events(folder, "run_start")[-1]["world_size"] == 1, hosts[0])
    alone_from = events(folder, "run_start")[-1]["resumed_from_step"] or 0
    wait_for_step(folder, alone_from + 12, hosts[0])
    hosts[1] = start_host(folder, port, 1, **settings)
    wait_for(lambda: len(events(folder, "run_start")) == 3, hosts[0])
    again_from = events(folder, "run_start")[-1]["resumed_from_step"]
    wait_for_step(folder, again_from + 3, hosts[0])
    hosts[1].send_signal(signal.SIGTERM)  # a signal to one host stops all at the same step
    outputs = [wait_for_exit(hosts[0], expect=143), wait_for_exit(hosts[1], expect=143)]
    starts = events(folder, "run_start")
    assert [start["world_size"] for start in starts] == [2, 1, 2]
    assert {start["derived"]["global_batch_size"] for start in starts} == {8}
    assert "host b with rank 1 was lost" in outputs[0]
    reference = tmp_path / "reference"
    steps = report(folder)["steps"]
    train(
        reference,
        *make_args(parallel__num_gpus=2, max_steps=steps, lr_scheduler_type="constant"),
        env={**os.environ, **THREADS},
    )
    elastic = {event["step"]: event["loss"] for event in events(folder, "step")}
    assert [elastic[number + 1] for number in range(steps)] == pytest.approx(
        losses(reference), rel=1e-5
    )


def wait_for(condition, process, timeout_s=150.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"the condition did not hold within {timeout_s:.0f} s")


@pytest.mark.soak
def test_rejects_hosts_with_different_configs(tmp_path):
    folder, port = tmp_path / "run", free_port()
    hosts = [start_host(folder, port, 0), start_host(folder, port, 1, learning_rate=0.5)]
    for process in hosts:
        assert "train_args.learning_rate: 0.5 on b" in wait_for_exit(process, expect=2)
    assert not folder.exists()


@pytest.mark.soak
def test_port_in_use_and_signal_before_rendezvous(tmp_path):
    folder, port = tmp_path / "run", free_port()
    first = start_host(folder, port, 0)
    wait_for(lambda: is_listening("127.0.0.1", port, 1.0), first)
    message = wait_for_exit(start_host(folder, port, 0), expect=2)
    assert f"port {port}" in message
    assert "in use" in message
    first.send_signal(signal.SIGINT)
    wait_for_exit(first, expect=130)
    assert not folder.exists()


@pytest.mark.soak
def test_unreachable_endpoint_and_missing_host_time_out(tmp_path):
    settings = {"parallel__collective_timeout_s": 10}
    no_endpoint, no_peer = (
        start_host(tmp_path / name, free_port(), number, **settings)
        for name, number in (("a", 1), ("b", 0))
    )
    assert "does not answer" in wait_for_exit(no_endpoint, expect=2)
    error = wait_for_exit(no_peer, expect=2)
    assert "2 hosts did not join the rendezvous" in error
    assert "within 10 s" in error
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("parallel.nnodes=2",), "parallel.rdzv_endpoint"),
        (
            (
                "parallel.nnodes=1:2",
                f"parallel.rdzv_endpoint=127.0.0.1:{free_port()}",
                "parallel.mode=dp",
            ),
            "in one process",
        ),
        (
            ("parallel.nnodes=2", "parallel.rdzv_endpoint=192.0.2.1", "parallel.node_rank=0"),
            "the address of another host",
        ),
        (
            ("parallel.nnodes=2", "parallel.rdzv_endpoint=127.0.0.1", "parallel.node_rank=2"),
            "0 to 1",
        ),
        (("parallel.nnodes=2", "parallel.rdzv_endpoint=127.0.0.1:x"), "invalid port"),
        (
            (
                "parallel.nnodes=2",
                "parallel.rdzv_endpoint=no-such-host.invalid",
                "parallel.collective_timeout_s=10",
            ),
            "2 hosts did not join the rendezvous",
        ),
        (
            (
                "parallel.nnodes=2",
                "parallel.rdzv_endpoint=127.0.0.1",
                "parallel.network_interface=eth99",
            ),
            "eth99",
        ),
    ],
)
def test_rejects_conflicting_settings_before_start(tmp_path, args, message):
    done = run(*MICRO, f"output_dir={tmp_path / 'run'}", *args, expect=2)
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_out_of_memory_continues_with_smaller_settings_on_all_hosts(tmp_path):
    callback = Path(__file__).parents[1] / "launch" / "memory_limit.py"
    settings = {
        "callbacks": f"[{callback}:MemoryLimit]",
        "task_args.max_tokens": 256,
        "task_args.from_step": 6,
        "max_steps": 8,
        "save_steps": 2,
    }
    model = [arg for arg in MICRO if not arg.startswith("per_device_train_batch_size=")]
    (cache_dir() / "memory-settings.json").unlink(missing_ok=True)
    args = [f"{key}={value}" for key, value in {**SETTINGS, **settings}.items()]
    port = free_port()
    hosts = [
        start(
            *model,
            f"output_dir={tmp_path / 'run'}",
            *args,
            "parallel.nnodes=2",
            f"parallel.rdzv_endpoint=127.0.0.1:{port}",
            f"parallel.node_rank={number}",
            env={**os.environ, **THREADS, "PACELINE_HOST": "abc"[number]},
        )
        for number in range(2)
    ]
    for host in hosts:
        wait_for_exit(host)
    [event] = events(tmp_path / "run", "memory_fallback")
    assert event["settings"]["train_args.per_device_train_batch_size"] == 2
    assert event["step"] >= 6
    by_step = {each["step"]: each["loss"] for each in events(tmp_path / "run", "step")}
    assert sorted(by_step) == list(range(1, 9))
    without = [arg for arg in args if not arg.startswith(("callbacks", "task_args", "parallel."))]
    run(*model, f"output_dir={tmp_path / 'whole'}", *without, "parallel.num_gpus=2",
        "parallel.mode=ddp", env={**os.environ, **THREADS})  # fmt: skip
    assert [by_step[step] for step in sorted(by_step)] == pytest.approx(
        losses(tmp_path / "whole"), rel=1e-5
    )


@pytest.mark.soak
def test_error_names_the_settings_if_the_launcher_restarts_nothing(tmp_path):
    callback = Path(__file__).parents[1] / "launch" / "memory_limit.py"
    model = [arg for arg in MICRO if not arg.startswith("per_device_train_batch_size=")]
    (cache_dir() / "memory-settings.json").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "-m",
        "paceline",
    ]
    settings = [f"callbacks=[{callback}:MemoryLimit]", "task_args.max_tokens=256", "max_steps=2"]
    done = subprocess.run(
        [*command, "sft", *model, *settings, f"output_dir={tmp_path / 'run'}"],
        capture_output=True, text=True, timeout=150, env={**os.environ, **THREADS},
    )  # fmt: skip
    assert done.returncode != 0
    assert (
        "To fix: set `per_device_train_batch_size=2 gradient_accumulation_steps=2`" in done.stderr
    )

"""One run on several hosts: here two agents on one machine, each with one rank, as two machines
would start them. In network namespaces: tests/cluster/test_faults_hosts.py."""

import os
import signal
import time

import pytest
from commands import (
    MICRO,
    digest,
    events,
    losses,
    rank_server,
    report,
    run,
    start,
    train,
    wait_for_step,
)
from ranks import free_port

from paceline.cluster.endpoint import is_listening

pytestmark = pytest.mark.slow

# One rank a host has all cores to itself, two ranks share them; more threads add up in another
# order.
THREADS = {"OMP_NUM_THREADS": "1"}
SETTINGS = {
    "max_steps": 16,
    "save_steps": 4,
    "parallel.num_gpus": 1,
    "warmup_steps": 3,
    "parallel.collective_timeout_s": 60,
}


def make_args(**settings):
    """The settings of a run; dotted keys of ``parallel`` with two underscores."""
    settings = {**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}}
    return [f"{key}={value}" for key, value in settings.items()]


def host(folder, port, number, **settings):
    """The agent of one host."""
    environment = {**os.environ, **THREADS, "PACELINE_HOST": "abc"[number]}
    place = {
        "parallel__nnodes": 2,
        "parallel__rdzv_endpoint": f"127.0.0.1:{port}",
        "parallel__node_rank": number,
    }
    return start(
        *MICRO, f"output_dir={folder}", *make_args(**{**place, **settings}), env=environment
    )


def end(process, expect=0):
    _out, err = process.communicate(timeout=150)
    assert process.returncode == expect, (
        f"exit code {process.returncode}, expected {expect}\n{err[-3000:]}"
    )
    return err


def rank_of(process):
    """The one rank that this agent has started."""
    return rank_server(process).children()[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, *make_args(parallel__num_gpus=2), env={**os.environ, **THREADS})
    return folder


def test_two_hosts_train_what_two_ranks_of_one_host_train_and_outlive_a_killed_rank(
    undisturbed, tmp_path
):
    folder, port = tmp_path / "run", free_port()
    hosts = [host(folder, port, number) for number in range(2)]
    wait_for_step(folder, 9, hosts[0])
    rank_of(hosts[1]).kill()
    outputs = [end(host) for host in hosts]
    assert digest(folder) == digest(undisturbed)
    assert "rank 1 on host b (process" in outputs[0]
    assert "was killed by SIGKILL" in outputs[0]
    assert report(folder)["restarts"] == 1
    fault = events(folder, "fault")[0]
    assert fault["ranks"] == [1]
    assert fault["hosts"] == ["b"]
    assert "host b: 127.0.0.1 on lo" in outputs[1]


@pytest.mark.soak
def test_a_host_whose_agent_dies_is_named_and_may_come_back(undisturbed, tmp_path):
    folder, port = tmp_path / "run", free_port()
    hosts = [host(folder, port, number) for number in range(2)]
    wait_for_step(folder, 6, hosts[0])
    hosts[1].kill()
    hosts[1].communicate()
    hosts[1] = host(folder, port, 1)
    outputs = [end(host) for host in hosts]
    assert digest(folder) == digest(undisturbed)
    assert "host b with rank 1 was lost" in outputs[0]
    assert events(folder, "fault")[0]["hosts"] == ["b"]


@pytest.mark.soak
def test_the_hosts_that_are_left_go_on_and_take_in_who_comes(undisturbed, tmp_path):
    folder, port = tmp_path / "run", free_port()
    settings = {"parallel__nnodes": "1:2", "max_steps": 400, "lr_scheduler_type": "constant"}
    hosts = [host(folder, port, number, **settings) for number in range(2)]
    wait_for_step(folder, 6, hosts[0])
    hosts[1].kill()
    hosts[1].communicate()
    wait_for(lambda: events(folder, "run_start")[-1]["world_size"] == 1, hosts[0])
    alone_from = events(folder, "run_start")[-1]["resumed_from_step"] or 0
    wait_for_step(folder, alone_from + 12, hosts[0])
    hosts[1] = host(folder, port, 1, **settings)
    wait_for(lambda: len(events(folder, "run_start")) == 3, hosts[0])
    again_from = events(folder, "run_start")[-1]["resumed_from_step"]
    wait_for_step(folder, again_from + 3, hosts[0])
    hosts[1].send_signal(signal.SIGTERM)  # of one host, and all stop at the same step
    outputs = [end(hosts[0], expect=143), end(hosts[1], expect=143)]
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
    ours = {event["step"]: event["loss"] for event in events(folder, "step")}
    assert [ours[number + 1] for number in range(steps)] == pytest.approx(
        losses(reference), rel=1e-5
    )


def wait_for(condition, process, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come to that")


@pytest.mark.soak
def test_hosts_that_would_not_train_the_same_are_refused_with_the_difference(tmp_path):
    folder, port = tmp_path / "run", free_port()
    hosts = [host(folder, port, 0), host(folder, port, 1, learning_rate=0.5)]
    for process in hosts:
        assert "train_args.learning_rate: 0.5 on b" in end(process, expect=2)
    assert not folder.exists()


@pytest.mark.soak
def test_a_port_in_use_and_a_signal_before_the_rendezvous(tmp_path):
    folder, port = tmp_path / "run", free_port()
    first = host(folder, port, 0)
    wait_for(lambda: is_listening("127.0.0.1", port, 1.0), first)
    message = end(host(folder, port, 0), expect=2)
    assert f"port {port}" in message
    assert "in use" in message
    first.send_signal(signal.SIGINT)
    end(first, expect=130)
    assert not folder.exists()


@pytest.mark.soak
def test_an_endpoint_that_does_not_answer_and_a_host_that_does_not_come(tmp_path):
    settings = {"parallel__collective_timeout_s": 10}
    absent, alone = (
        host(tmp_path / name, free_port(), number, **settings)
        for name, number in (("a", 1), ("b", 0))
    )
    assert "does not answer" in end(absent, expect=2)
    error = end(alone, expect=2)
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
def test_what_does_not_go_together_is_said_before_anything_starts(tmp_path, args, message):
    done = run(*MICRO, f"output_dir={tmp_path / 'run'}", *args, expect=2)
    assert message in done.stderr
    assert not (tmp_path / "run").exists()

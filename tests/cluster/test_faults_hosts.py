"""Faults of hosts in network namespaces: each has its own disk, and the run lies on that of the
endpoint. After each fault the run ends with the bits of an undisturbed run, and a `fault` event
names the rank and the host that failed first."""

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import digest, losses, report, train
from hosts import THREADS, Cluster, cluster_of

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SETTINGS = (
    "max_steps=16",
    "save_steps=4",
    "warmup_steps=3",
    "logging_steps=1",
    "parallel.collective_timeout_s=60",
)
#: Of a run that is stopped when it has shown what it should: its schedule does not depend on its
#: length.
OPEN_END = (
    "max_steps=5000", "save_steps=4", "warmup_steps=3", "lr_scheduler_type=constant",
    "logging_steps=1", "parallel.collective_timeout_s=60",
)  # fmt: skip
PAUSE_S = 30.0

Undisturbed = Callable[..., Path]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """(words) → the folder of a run of two ranks on one host, made when it is first asked for."""

    @functools.cache
    def make(*args: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("undisturbed") / "run"
        train(folder, "parallel.num_gpus=2", *args, env={**os.environ, **THREADS})
        return folder

    return make


def faults_of(cluster: Cluster) -> list[tuple[list[int], list[str]]]:
    return [(event["ranks"], event["hosts"]) for event in cluster.events("fault")]


def world_sizes(cluster: Cluster) -> list[int]:
    return [event["world_size"] for event in cluster.events("run_start")]


def check_numbering(cluster: Cluster) -> None:
    """In each attempt the endpoint's rank is number 0."""
    for start in cluster.events("run_start"):
        by_rank = {rank["rank"]: rank["host"] for rank in start["mesh"]["ranks"]}
        assert by_rank[0] == cluster.hosts[cluster.endpoint].name


def check_result(cluster: Cluster, reference: Path) -> None:
    """All hosts end by themselves, with the bits of the undisturbed run; only the endpoint has its
    files."""
    for host in cluster.hosts:
        host.end()
    check_numbering(cluster)
    assert report(cluster.run)["status"] == "done"
    assert cluster.digest() == digest(reference)
    for host in cluster.hosts:
        if host.disk is not None:
            assert list(host.disk.rglob("*.safetensors")) == []


def check_undisturbed(cluster: Cluster, reference: Path) -> None:
    """Nothing was restarted and nothing is called a fault."""
    check_result(cluster, reference)
    assert faults_of(cluster) == []
    assert world_sizes(cluster) == [2]


def stop_and_compare(cluster: Cluster, tmp_path: Path) -> None:
    """Stop the run from one host: all hosts stop at the same step, with the bits of an undisturbed
    run of as many steps."""
    stopped = cluster.hosts[1].process
    assert stopped is not None
    stopped.send_signal(signal.SIGTERM)
    for host in cluster.hosts:
        host.end(expect=143)
    steps = report(cluster.run)["steps"]
    reference = tmp_path / "reference"
    args = [setting for setting in OPEN_END if not setting.startswith("max_steps")]
    train(
        reference,
        "parallel.num_gpus=2",
        *args,
        f"max_steps={steps}",
        env={**os.environ, **THREADS},
    )
    # what is logged is summed up in another order
    assert cluster.losses() == pytest.approx(losses(reference), abs=1e-6)
    assert cluster.digest() == digest(reference)


# -- ranks and hosts that are killed
@pytest.mark.soak
def test_a_killed_rank_is_named_and_the_run_ends_with_the_same_bits(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with cluster_of(request.config, tmp_path) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(5)
        (rank,) = cluster.hosts[1].ranks()
        rank.kill()
        check_result(cluster, undisturbed(*SETTINGS))
    assert faults_of(cluster) == [([1], ["b"])]
    assert "SIGKILL" in cluster.events("fault")[0]["reason"]
    assert world_sizes(cluster) == [2, 2]


def test_a_killed_host_is_named_and_takes_part_again_when_it_is_back(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with cluster_of(request.config, tmp_path) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(6)
        cluster.hosts[1].kill()
        cluster.start(1, *SETTINGS)
        check_result(cluster, undisturbed(*SETTINGS))
    assert faults_of(cluster) == [([1], ["b"])]
    assert "host b" in cluster.events("fault")[0]["reason"]
    assert world_sizes(cluster) == [2, 2]


@pytest.mark.soak
def test_the_endpoints_own_rank_is_killed(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with cluster_of(request.config, tmp_path) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(5)
        cluster.hosts[0].ranks()[0].kill()
        check_result(cluster, undisturbed(*SETTINGS))
    assert faults_of(cluster) == [([0], ["a"])]


@pytest.mark.soak
def test_a_killed_command_takes_its_ranks_with_it(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The agent alone is killed: its rank must not go on with the others, who would then wait for
    the agent at the end."""
    with cluster_of(request.config, tmp_path) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(5)
        host = cluster.hosts[1]
        assert host.process is not None
        host.process.kill()
        host.process.wait()
        cluster.wait(
            lambda: not host.processes(), "every process of the killed command ends", timeout_s=20.0
        )
        cluster.start(1, *SETTINGS)
        check_result(cluster, undisturbed(*SETTINGS))
    assert faults_of(cluster) == [([1], ["b"])]


@pytest.mark.soak
def test_the_host_that_is_left_goes_on_alone_and_takes_the_other_one_in_again(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with cluster_of(request.config, tmp_path) as cluster:
        for number in range(2):
            cluster.start(number, *OPEN_END, nnodes="1:2")
        cluster.wait_for_start(1, world_size=2)
        cluster.wait_for_step(6)
        cluster.hosts[1].kill()
        cluster.wait_for_start(2, world_size=1)
        cluster.wait_for_step(cluster.events("run_start")[-1]["resumed_from_step"] + 12, attempt=2)
        cluster.start(1, *OPEN_END, nnodes="1:2")
        cluster.wait_for_start(3, world_size=2)
        cluster.wait_for_step(cluster.events("run_start")[-1]["resumed_from_step"] + 6, attempt=3)
        stop_and_compare(cluster, tmp_path)
    assert world_sizes(cluster) == [2, 1, 2]
    assert faults_of(cluster) == [([1], ["b"])]
    assert {event["derived"]["global_batch_size"] for event in cluster.events("run_start")} == {8}


@pytest.mark.soak
def test_three_hosts_shrink_to_two(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Two ranks add up in another order than three, so the losses are close and not equal."""
    args = [
        *(setting for setting in SETTINGS if not setting.startswith("save_steps")),
        "save_steps=3",
    ]
    with cluster_of(request.config, tmp_path, num_hosts=3) as cluster:
        for number in range(3):
            cluster.start(number, *args, nnodes="2:3")
        cluster.wait_for_start(1, world_size=3)
        cluster.wait_for_step(5)
        cluster.hosts[2].kill()
        cluster.wait_for_start(2, world_size=2)
        for host in cluster.hosts[:2]:
            host.end()
    check_numbering(cluster)
    assert faults_of(cluster) == [([2], ["c"])]
    reference = tmp_path / "reference"
    train(reference, "parallel.num_gpus=3", *args, env={**os.environ, **THREADS})
    assert cluster.losses() == pytest.approx(losses(reference), abs=1e-6)


# -- the endpoint
@pytest.mark.soak
@pytest.mark.parametrize("endpoint", [0, 1])
def test_a_killed_endpoint_that_is_started_again_is_entered_again(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Undisturbed, endpoint: int
) -> None:
    """With ``endpoint`` 1 its address sorts last, and its new process has a higher number: elastic
    gives it the last rank."""
    with cluster_of(request.config, tmp_path, endpoint=endpoint) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(6)
        cluster.hosts[endpoint].kill()
        time.sleep(3.0)
        cluster.start(endpoint, *SETTINGS)
        check_result(cluster, undisturbed(*SETTINGS))
    assert faults_of(cluster) == [([0], ["ab"[endpoint]])]
    assert world_sizes(cluster) == [2, 2]


@pytest.mark.soak
@pytest.mark.parametrize("endpoint", [0, 1])
def test_a_killed_rank_where_the_endpoint_sorts_first_and_last(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Undisturbed, endpoint: int
) -> None:
    with cluster_of(request.config, tmp_path, endpoint=endpoint) as cluster:
        for number in (1 - endpoint, endpoint):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(5)
        cluster.hosts[1 - endpoint].ranks()[0].kill()
        check_result(cluster, undisturbed(*SETTINGS))
    assert faults_of(cluster) == [([1], ["ba"[endpoint]])]


@pytest.mark.soak
@pytest.mark.parametrize("is_sudden", [False, True], ids=["closed connections", "no word"])
def test_an_endpoint_that_comes_back_under_another_address(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Undisturbed, is_sudden: bool
) -> None:
    """``is_sudden``: as by a power cut. Nobody tells the other host that its connections are
    closed."""
    name = "endpoint.cluster.test"
    with cluster_of(request.config, tmp_path) as cluster:
        cluster.set_name(name, cluster.endpoint_address)
        for number in range(2):
            cluster.start(number, *SETTINGS, endpoint=name)
        cluster.wait_for_step(6)
        if is_sudden:
            cluster.set_link(0, up=False)
        cluster.hosts[0].kill()
        cluster.move(0, "192.0.2.77")
        cluster.set_link(0, up=True)
        time.sleep(5.0)
        cluster.set_name(name, "192.0.2.77")
        cluster.start(0, *SETTINGS, endpoint=name)
        check_result(cluster, undisturbed(*SETTINGS))
    assert faults_of(cluster) == [([0], ["a"])]


@pytest.mark.soak
def test_a_name_that_resolves_late(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    name = "endpoint.cluster.test"
    with cluster_of(request.config, tmp_path) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS, endpoint=name)
        time.sleep(15.0)
        assert cluster.events() == []
        cluster.set_name(name, cluster.endpoint_address)
        check_undisturbed(cluster, undisturbed(*SETTINGS))


# -- what ends no process
@pytest.mark.soak
def test_a_link_that_loses_packets_is_reported_and_nothing_is_restarted(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    args = (
        *(setting for setting in SETTINGS if not setting.startswith("max_steps")),
        "max_steps=150",
    )
    with cluster_of(request.config, tmp_path, loss=0.02) as cluster:
        for number in range(2):
            cluster.start(number, *args)
        check_undisturbed(cluster, undisturbed(*args))
    named = cluster.events("link")
    assert {event["host"] for event in named} <= {"a", "b"}
    assert named
    assert all(0.005 <= event["resent_share"] < 0.1 for event in named)


@pytest.mark.soak
@pytest.mark.parametrize("number", [0, 1], ids=["endpoint", "other host"])
@pytest.mark.parametrize("whole_host", [False, True], ids=["rank", "host"])
def test_a_pause_shorter_than_the_timeout_is_reported_and_nothing_is_restarted(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    undisturbed: Undisturbed,
    number: int,
    whole_host: bool,
) -> None:
    args = (
        *(
            setting
            for setting in SETTINGS
            if not setting.startswith("parallel.collective_timeout_s")
        ),
        "parallel.collective_timeout_s=120",
    )
    with cluster_of(request.config, tmp_path) as cluster:
        for each in range(2):
            cluster.start(each, *args)
        cluster.wait_for_step(5)
        host = cluster.hosts[number]
        paused: Any = host if whole_host else host.ranks()[0]
        send = host.signal if whole_host else paused.send_signal
        send(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        send(signal.SIGCONT)
        check_undisturbed(cluster, undisturbed(*args))
    (pause,) = [
        event for event in cluster.events("straggler") if event["slower_by_s"] > 0.9 * PAUSE_S
    ]
    assert (pause["rank"], pause["host"]) == (number, host.name)
    # Named after a while by the others too, unless it was paused in a phase that may take long,
    # such as a save.
    assert {(event["rank"], event["host"]) for event in cluster.events("hang")} <= {
        (number, host.name)
    }

"""Inject faults into runs on simulated hosts in network namespaces, each with a separate disk.

After each fault, the run must end with bitwise the same weights as a run without faults, and a
`fault` event must name the rank and the host that failed first.
"""

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import digest, losses, report, train
from hosts import THREADS, Cluster, start_cluster

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SETTINGS = (
    "max_steps=16",
    "save_steps=4",
    "warmup_steps=3",
    "logging_steps=1",
    "parallel.collective_timeout_s=60",
)
#: Settings of a run that the test stops: its learning rate does not depend on `max_steps`.
OPEN_END = (
    "max_steps=5000", "save_steps=4", "warmup_steps=3", "lr_scheduler_type=constant",
    "logging_steps=1", "parallel.collective_timeout_s=60",
)  # fmt: skip
PAUSE_S = 30.0

ReferenceRun = Callable[..., Path]


@pytest.fixture(scope="module")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> ReferenceRun:
    """Return a function that maps settings to the folder of a cached run without faults, with two
    ranks on one host."""

    @functools.cache
    def make(*args: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("reference_run") / "run"
        train(folder, "parallel.num_gpus=2", *args, env={**os.environ, **THREADS})
        return folder

    return make


def fault_locations(cluster: Cluster) -> list[tuple[list[int], list[str]]]:
    return [(event["ranks"], event["hosts"]) for event in cluster.events("fault")]


def world_sizes(cluster: Cluster) -> list[int]:
    return [event["world_size"] for event in cluster.events("run_start")]


def check_rank_zero(cluster: Cluster) -> None:
    """Check that rank 0 is on the endpoint host in each attempt."""
    for start in cluster.events("run_start"):
        by_rank = {rank["rank"]: rank["host"] for rank in start["mesh"]["ranks"]}
        assert by_rank[0] == cluster.hosts[cluster.endpoint].name


def check_result(cluster: Cluster, reference: Path) -> None:
    """Check that all hosts exit normally with the same weights as the reference, and that only the
    endpoint host has the run's files."""
    for host in cluster.hosts:
        host.wait_for_exit()
    check_rank_zero(cluster)
    assert report(cluster.run)["status"] == "done"
    assert cluster.digest() == digest(reference)
    for host in cluster.hosts:
        if host.disk is not None:
            assert list(host.disk.rglob("*.safetensors")) == []


def check_no_restart(cluster: Cluster, reference: Path) -> None:
    """Check the result, and that the run had no fault and no restart."""
    check_result(cluster, reference)
    assert fault_locations(cluster) == []
    assert world_sizes(cluster) == [2]


def stop_and_compare(cluster: Cluster, tmp_path: Path) -> None:
    """Send SIGTERM on one host; check that all hosts stop at the same step, with the same weights
    as a run without faults up to that step."""
    process = cluster.hosts[1].process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    for host in cluster.hosts:
        host.wait_for_exit(expect=143)
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
    # logged losses are summed in another order
    assert cluster.losses() == pytest.approx(losses(reference), abs=1e-6)
    assert cluster.digest() == digest(reference)


# -- killed ranks and hosts
@pytest.mark.soak
def test_run_recovers_from_killed_rank(
    request: pytest.FixtureRequest, tmp_path: Path, reference_run: ReferenceRun
) -> None:
    with start_cluster(request.config, tmp_path) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(5)
        (rank,) = cluster.hosts[1].ranks()
        rank.kill()
        check_result(cluster, reference_run(*SETTINGS))
    assert fault_locations(cluster) == [([1], ["b"])]
    assert "SIGKILL" in cluster.events("fault")[0]["reason"]
    assert world_sizes(cluster) == [2, 2]


@pytest.mark.soak
def test_killed_host_rejoins(
    request: pytest.FixtureRequest, tmp_path: Path, reference_run: ReferenceRun
) -> None:
    with start_cluster(request.config, tmp_path) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(6)
        cluster.hosts[1].kill()
        cluster.start(1, *SETTINGS)
        check_result(cluster, reference_run(*SETTINGS))
    assert fault_locations(cluster) == [([1], ["b"])]
    assert "host b" in cluster.events("fault")[0]["reason"]
    assert world_sizes(cluster) == [2, 2]


@pytest.mark.soak
def test_run_recovers_from_killed_rank_of_endpoint_host(
    request: pytest.FixtureRequest, tmp_path: Path, reference_run: ReferenceRun
) -> None:
    with start_cluster(request.config, tmp_path) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(5)
        cluster.hosts[0].ranks()[0].kill()
        check_result(cluster, reference_run(*SETTINGS))
    assert fault_locations(cluster) == [([0], ["a"])]


@pytest.mark.soak
def test_killed_agent_ends_its_ranks(
    request: pytest.FixtureRequest, tmp_path: Path, reference_run: ReferenceRun
) -> None:
    """Kill only the agent. Its rank must end too: the other hosts would wait for the agent at the
    end of the run."""
    with start_cluster(request.config, tmp_path) as cluster:
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
        check_result(cluster, reference_run(*SETTINGS))
    assert fault_locations(cluster) == [([1], ["b"])]


@pytest.mark.soak
def test_run_shrinks_to_one_host_and_grows_again(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with start_cluster(request.config, tmp_path) as cluster:
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
    assert fault_locations(cluster) == [([1], ["b"])]
    assert {event["derived"]["global_batch_size"] for event in cluster.events("run_start")} == {8}


@pytest.mark.soak
def test_run_shrinks_from_three_hosts_to_two(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Two ranks sum in another order than three, so the losses are close but not equal."""
    args = [
        *(setting for setting in SETTINGS if not setting.startswith("save_steps")),
        "save_steps=3",
    ]
    with start_cluster(request.config, tmp_path, num_hosts=3) as cluster:
        for number in range(3):
            cluster.start(number, *args, nnodes="2:3")
        cluster.wait_for_start(1, world_size=3)
        cluster.wait_for_step(5)
        cluster.hosts[2].kill()
        cluster.wait_for_start(2, world_size=2)
        for host in cluster.hosts[:2]:
            host.wait_for_exit()
    check_rank_zero(cluster)
    assert fault_locations(cluster) == [([2], ["c"])]
    reference = tmp_path / "reference"
    train(reference, "parallel.num_gpus=3", *args, env={**os.environ, **THREADS})
    assert cluster.losses() == pytest.approx(losses(reference), abs=1e-6)


# -- the endpoint
@pytest.mark.soak
@pytest.mark.parametrize("endpoint", [0, 1])
def test_restarted_endpoint_host_rejoins(
    request: pytest.FixtureRequest, tmp_path: Path, reference_run: ReferenceRun, endpoint: int
) -> None:
    """With ``endpoint`` 1, its address sorts last and its new process has a higher PID, so
    torchelastic assigns it the last rank."""
    with start_cluster(request.config, tmp_path, endpoint=endpoint) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(6)
        cluster.hosts[endpoint].kill()
        time.sleep(3.0)
        cluster.start(endpoint, *SETTINGS)
        check_result(cluster, reference_run(*SETTINGS))
    assert fault_locations(cluster) == [([0], ["ab"[endpoint]])]
    assert world_sizes(cluster) == [2, 2]


@pytest.mark.soak
@pytest.mark.parametrize("endpoint", [0, 1])
def test_killed_rank_with_endpoint_sorted_first_or_last(
    request: pytest.FixtureRequest, tmp_path: Path, reference_run: ReferenceRun, endpoint: int
) -> None:
    with start_cluster(request.config, tmp_path, endpoint=endpoint) as cluster:
        for number in (1 - endpoint, endpoint):
            cluster.start(number, *SETTINGS)
        cluster.wait_for_step(5)
        cluster.hosts[1 - endpoint].ranks()[0].kill()
        check_result(cluster, reference_run(*SETTINGS))
    assert fault_locations(cluster) == [([1], ["ba"[endpoint]])]


@pytest.mark.soak
@pytest.mark.parametrize("is_power_failure", [False, True], ids=["killed", "power failure"])
def test_endpoint_rejoins_under_new_address(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    reference_run: ReferenceRun,
    is_power_failure: bool,
) -> None:
    """After a power failure, the other host is not notified that its connections are closed."""
    name = "endpoint.cluster.test"
    with start_cluster(request.config, tmp_path) as cluster:
        cluster.set_name(name, cluster.endpoint_address)
        for number in range(2):
            cluster.start(number, *SETTINGS, endpoint=name)
        cluster.wait_for_step(6)
        if is_power_failure:
            cluster.set_link(0, up=False)
        cluster.hosts[0].kill()
        cluster.move(0, "192.0.2.77")
        cluster.set_link(0, up=True)
        time.sleep(5.0)
        cluster.set_name(name, "192.0.2.77")
        cluster.start(0, *SETTINGS, endpoint=name)
        check_result(cluster, reference_run(*SETTINGS))
    assert fault_locations(cluster) == [([0], ["a"])]


@pytest.mark.soak
def test_waits_for_endpoint_name_to_resolve(
    request: pytest.FixtureRequest, tmp_path: Path, reference_run: ReferenceRun
) -> None:
    name = "endpoint.cluster.test"
    with start_cluster(request.config, tmp_path) as cluster:
        for number in range(2):
            cluster.start(number, *SETTINGS, endpoint=name)
        time.sleep(15.0)
        assert cluster.events() == []
        cluster.set_name(name, cluster.endpoint_address)
        check_no_restart(cluster, reference_run(*SETTINGS))


@pytest.mark.soak
@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1"])
def test_endpoint_whose_own_name_is_a_loopback_address(
    request: pytest.FixtureRequest, tmp_path: Path, reference_run: ReferenceRun, address: str
) -> None:
    """As in the /etc/hosts of Debian."""
    name = "endpoint.cluster.test"
    with start_cluster(request.config, tmp_path) as cluster:
        cluster.set_name(name, cluster.endpoint_address)
        cluster.set_name(name, address, only_on=cluster.endpoint)
        for number in range(2):
            cluster.start(number, *SETTINGS, endpoint=name)
        check_no_restart(cluster, reference_run(*SETTINGS))


# -- faults that end no process
@pytest.mark.soak
def test_packet_loss_is_reported_without_restart(
    request: pytest.FixtureRequest, tmp_path: Path, reference_run: ReferenceRun
) -> None:
    args = (
        *(setting for setting in SETTINGS if not setting.startswith("max_steps")),
        "max_steps=150",
    )
    with start_cluster(request.config, tmp_path, loss=0.02) as cluster:
        for number in range(2):
            cluster.start(number, *args)
        check_no_restart(cluster, reference_run(*args))
    link_events = cluster.events("link")
    assert {event["host"] for event in link_events} <= {"a", "b"}
    assert link_events
    assert all(0.005 <= event["resent_share"] < 0.1 for event in link_events)


@pytest.mark.soak
@pytest.mark.parametrize("number", [0, 1], ids=["endpoint", "other host"])
@pytest.mark.parametrize("whole_host", [False, True], ids=["rank", "host"])
def test_pause_below_timeout_is_reported_without_restart(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    reference_run: ReferenceRun,
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
    with start_cluster(request.config, tmp_path) as cluster:
        for index in range(2):
            cluster.start(index, *args)
        cluster.wait_for_step(5)
        host = cluster.hosts[number]
        paused: Any = host if whole_host else host.ranks()[0]
        send = host.signal if whole_host else paused.send_signal
        send(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        send(signal.SIGCONT)
        check_no_restart(cluster, reference_run(*args))
    (pause,) = [
        event for event in cluster.events("straggler") if event["slower_by_s"] > 0.9 * PAUSE_S
    ]
    assert (pause["rank"], pause["host"]) == (number, host.name)
    # The other rank reports it as hung too, unless the pause was in a phase that may take long,
    # such as a save.
    assert {(event["rank"], event["host"]) for event in cluster.events("hang")} <= {
        (number, host.name)
    }

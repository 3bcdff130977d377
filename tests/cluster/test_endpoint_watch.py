"""Test that closing a connection from another thread ends a read that waits for a lost host, and
that a host does not join the run of another job."""

import contextlib
import os
import socket
import threading

import pytest
from raised import raises_error
from ranks import free_port

from paceline.cluster.endpoint import (
    Endpoint,
    EndpointStore,
    EndpointWatch,
    close_connections,
    resolve_endpoint,
)
from paceline.config.schema import Config
from paceline.core.errors import ConfigError


def test_close_connections_ends_blocked_read_of_that_peer_only() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as lost,
        socket.create_server(("127.0.0.1", 0)) as other_server,
    ):
        waiting, other = (
            socket.create_connection(server.getsockname()) for server in (lost, other_server)
        )
        with waiting, other:
            received: list[bytes] = []
            reader = threading.Thread(target=lambda: received.append(waiting.recv(1)))
            reader.start()
            close_connections(*lost.getsockname())
            reader.join(10.0)
            assert received == [b""]
            accepted, _ = other_server.accept()
            with accepted:
                other.sendall(b"x")
                assert accepted.recv(1) == b"x"


def test_close_connections_leaks_no_descriptor() -> None:
    before = sorted(os.listdir("/dev/fd"))
    close_connections("127.0.0.1", 1)
    assert sorted(os.listdir("/dev/fd")) == before


def test_endpoint_host_starts_no_watch() -> None:
    endpoint = Endpoint("localhost", 1, "127.0.0.1", "127.0.0.1", "lo", is_local=True)
    with EndpointWatch(endpoint):
        assert "endpoint-watch" not in {thread.name for thread in threading.enumerate()}


def test_rejects_the_rendezvous_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def store_of(job: int, host: int, port: int) -> EndpointStore:
        for name, value in {
            "JOB_ID": job, "STEP_ID": 0, "STEP_NUM_NODES": 2, "STEP_NUM_TASKS": 2, "NODEID": host,
        }.items():  # fmt: skip
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        parallel = {"nnodes": 2, "node_rank": host, "rdzv_endpoint": f"127.0.0.1:{port}"}
        return EndpointStore(
            Config.model_validate({"model": "m", "dataset": "d", "parallel": parallel})
        )

    port = free_port()
    first = store_of(job=7, host=0, port=port)
    endpoint = resolve_endpoint(first.config)
    with contextlib.closing(first):
        assert first.find(10.0, 10.0) == endpoint
        first.check_run(endpoint)
        store_of(job=7, host=1, port=port).check_run(endpoint)
        with raises_error(ConfigError, code="port-in-use"):
            store_of(job=10007, host=1, port=port).check_run(endpoint)
        for name in ("JOB_ID", "STEP_NUM_NODES"):
            monkeypatch.delenv(f"SLURM_{name}")
        parallel = first.config.parallel.model_copy(update={"node_rank": 1})
        by_hand = EndpointStore(first.config.model_copy(update={"parallel": parallel}))
        by_hand.check_run(endpoint)  # a host that was started by hand may join

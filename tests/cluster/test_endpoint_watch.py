"""Test that closing a connection from another thread ends a read that waits for a lost host."""

import os
import socket
import threading

from paceline.cluster.endpoint import Endpoint, EndpointWatch, close_connections


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

"""A read that waits for a host that has vanished ends when the connection is closed from another
thread."""

import os
import socket
import threading

from paceline.cluster.endpoint import Endpoint, EndpointWatch, close_connections


def test_a_waiting_reader_gets_the_end_and_other_connections_stay() -> None:
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


def test_no_descriptor_stays_open() -> None:
    before = sorted(os.listdir("/dev/fd"))
    close_connections("127.0.0.1", 1)
    assert sorted(os.listdir("/dev/fd")) == before


def test_the_endpoint_does_not_watch_itself() -> None:
    endpoint = Endpoint("localhost", 1, "127.0.0.1", "127.0.0.1", "lo", is_local=True)
    with EndpointWatch(endpoint):
        assert "endpoint-watch" not in {thread.name for thread in threading.enumerate()}

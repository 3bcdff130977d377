"""TCP segments are counted for connections that leave the host, even after they are closed."""

import json
import subprocess
import sys

import pytest
from namespaces import create_network

from paceline.distributed.segments import SegmentCounter

_SEND = """
import json, socket, sys, time
from paceline.distributed.segments import SegmentCounter
counter, readings = SegmentCounter(), []
with socket.create_connection((sys.argv[1], 7000)) as connection:
    for _ in range(20):
        connection.sendall(bytes(100_000))
    connection.recv(1)  # wait until all data has arrived
    readings.append(counter.read())
readings.append(counter.read())
print(json.dumps([[reading.sent, reading.resent] for reading in readings]))
"""
_RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    remaining = 2_000_000
    while remaining:
        remaining -= len(connection.recv(1 << 20))
    connection.sendall(b"x")
    connection.recv(1)
"""


@pytest.mark.alone
def test_counts_retransmitted_segments_of_a_lossy_link(
    request: pytest.FixtureRequest,
) -> None:
    with create_network(request.config, 2, loss=0.05) as network:
        address = network.addresses[0]
        receiver = subprocess.Popen(
            network.on(0, [sys.executable, "-c", _RECEIVE, address]), stdout=subprocess.PIPE
        )
        assert receiver.stdout is not None
        receiver.stdout.readline()
        sender = network.on(1, [sys.executable, "-c", _SEND, address])
        process = subprocess.run(sender, capture_output=True, text=True, check=True)
        receiver.wait(30)
        receiver.stdout.close()
    (sent, resent), after_close = json.loads(process.stdout)
    assert sent > 1300  # 2 MB in segments of at most 1,460 bytes
    # Every lost segment is sent again, and so are segments that wait behind a lost one when a
    # retransmission timer expires: how many of those depends on where the losses fall.
    assert 0.01 * sent < resent < 0.5 * sent
    assert after_close == [sent, resent]


def test_connections_within_a_host_are_not_counted() -> None:
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        connection.sendall(bytes(10_000))
        assert SegmentCounter().read().sent == 0

"""Helper processes of a network of namespaces: `forward` delays packets if the kernel has no netem;
`serve` and `measure` measure the link.

python benchmarks/link.py forward DELAY_S LOSS NAMESPACE:ADDRESS …  # prints "ready" once it runs
python benchmarks/link.py serve ADDRESS PORT                        # prints "ready" once it listens
python benchmarks/link.py measure ADDRESS PORT SECONDS              # prints one JSON object
"""

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from statistics import median

DEVICE = "eth0"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
# Checksum offload, and TCP segments of up to 64 KiB (TUN_F_CSUM, TUN_F_TSO4).
_OFFLOADS = 0x01 | 0x02
_HEADER = 10  # bytes of the virtio header before each packet
_CLONE_NEWNET = 0x40000000
_NICE = -10  # a delayed forwarder would make the link slower than requested
_PINGS = 30
_CHUNK = bytes(1 << 16)


# -- delay and loss


def forward(delay_s: float, loss: float, hosts: list[tuple[str, str]]) -> None:
    """Forward each IPv4 packet to its destination host after ``delay_s``, until the process is
    terminated.

    The queue of each device (tbf) limits the rate. Without loss, TCP passes segments of up to 64
    KiB in one packet, which needs fewer system calls. With loss, segments are split into packets of
    the MTU, because the loss applies to those.

    Args:
        loss: probability that a packet is lost.
        hosts: network namespace and address of each host.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    devices = {}
    for name, address in hosts:
        devices[socket.inet_aton(address)] = _open_device(name, large_segments=loss == 0)
    print("ready", flush=True)
    random_source = random.Random(0)
    # All packets have the same delay, so the first one is due first.
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select(list(devices.values()), [], [], timeout_s)[0]:
            due_at = time.monotonic() + delay_s
            for packet in _read_packets(source):
                # destination address of the IPv4 header
                target = devices.get(packet[_HEADER + 16 : _HEADER + 20])
                if target is not None and not (loss and random_source.random() < loss):
                    waiting.append((due_at, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # a full device drops the packet, as a real one does
                os.write(target, packet)


def _read_packets(source: int) -> Iterator[bytes]:
    """Yield all packets that a device has queued."""
    while True:
        try:
            yield os.read(source, 1 << 17)
        except BlockingIOError:
            return


def _open_device(namespace: str, large_segments: bool) -> int:
    """Open a TUN device in a namespace, and return its non-blocking file descriptor. Closing it
    removes the device."""
    with open(f"/run/netns/{namespace}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        fd,
        _TUNSETIFF,
        struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR),
    )
    if large_segments:
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    return fd


# -- measuring


def serve(address: str, port: int) -> None:
    """Serve a single :func:`measure` client."""
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            connection.sendall(connection.recv(1))
        received, window_start, received_before = 0, 0.0, 0
        start = time.monotonic()
        while chunk := connection.recv(1 << 20):
            received += len(chunk)
            # The TCP window needs about half a second to open.
            if not window_start and time.monotonic() - start > 0.5:
                window_start, received_before = time.monotonic(), received
        elapsed_s = time.monotonic() - window_start
        rate = 8 * (received - received_before) / elapsed_s if window_start else 0.0
        connection.sendall(json.dumps({"stream_bits_per_s": rate}).encode())


def measure(address: str, port: int, seconds: float) -> dict[str, float]:
    """Return the median round-trip time of one byte, and the throughput of one TCP stream in bits
    of payload per second."""
    with socket.create_connection((address, port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trips = []
        for _ in range(_PINGS):
            start = time.perf_counter()
            connection.sendall(b"p")
            connection.recv(1)
            round_trips.append(time.perf_counter() - start)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        reply = b""
        while chunk := connection.recv(4096):
            reply += chunk
    return {"round_trip_s": median(round_trips), **json.loads(reply)}


def main(arguments: list[str]) -> int:
    command, *rest = arguments
    if command == "forward":
        delay, loss, *hosts = rest
        forward(
            float(delay),
            float(loss),
            [(name, address) for name, address in (host.split(":") for host in hosts)],
        )
    elif command == "serve":
        serve(rest[0], int(rest[1]))
    else:
        print(json.dumps(measure(rest[0], int(rest[1]), float(rest[2]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

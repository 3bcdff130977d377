"""The processes of a network of namespaces: one that delays packets where the kernel cannot, and
two that measure the link.

python benchmarks/link.py forward DELAY_S LOSS NAMESPACE:ADDRESS …   (prints "ready" when the
devices are there) python benchmarks/link.py serve ADDRESS PORT python benchmarks/link.py measure
ADDRESS PORT SECONDS               (prints one JSON value)
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
# checksums, and TCP segments of up to 64 KiB left whole (TUN_F_CSUM, TUN_F_TSO4)
_OFFLOADS = 0x01 | 0x02
_HEADER = 10  # bytes of the virtio header before each packet
_CLONE_NEWNET = 0x40000000
_NICE = -10  # late packets would be a slower link than the one asked for
_PINGS = 30
_CHUNK = bytes(1 << 16)


# -- delay and loss


def forward(delay_s: float, loss: float, hosts: list[tuple[str, str]]) -> None:
    """Hand each IPv4 packet that leaves a host to the one it is for, ``delay_s`` later; until this
    process is ended.

    The rate is the business of each device's own queue (tbf). Without loss TCP hands over up to 64
    KiB at a time, still in one packet: few system calls for many bytes. With loss each packet is
    one of the wire's, so that it is those that are lost.

    Args:
        loss: the chance of each packet to be lost.
        hosts: network namespace and address of each.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    devices = {}
    for name, address in hosts:
        devices[socket.inet_aton(address)] = _open_device(name, whole_segments=loss == 0)
    print("ready", flush=True)
    chance = random.Random(0)
    waiting: deque[tuple[float, int, bytes]] = deque()  # all wait alike, so the first is due first
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select(list(devices.values()), [], [], pause)[0]:
            moment = time.monotonic() + delay_s
            for packet in _packets(source):
                # the destination of an IPv4 packet
                target = devices.get(packet[_HEADER + 16 : _HEADER + 20])
                if target is not None and not (loss and chance.random() < loss):
                    waiting.append((moment, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # a device that takes no more loses it, as any would
                os.write(target, packet)


def _packets(source: int) -> Iterator[bytes]:
    """All that a device holds."""
    while True:
        try:
            yield os.read(source, 1 << 17)
        except BlockingIOError:
            return


def _open_device(namespace: str, whole_segments: bool) -> int:
    """A TUN device in a namespace; its file descriptor, not blocking. The device is gone with
    it."""
    with open(f"/run/netns/{namespace}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        fd,
        _TUNSETIFF,
        struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR),
    )
    if whole_segments:
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    return fd


# -- measuring


def serve(address: str, port: int) -> None:
    """Answer one :func:`measure`."""
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            connection.sendall(connection.recv(1))
        received, begin, since = 0, 0.0, 0
        start = time.monotonic()
        while chunk := connection.recv(1 << 20):
            received += len(chunk)
            if not begin and time.monotonic() - start > 0.5:  # when the window has opened
                begin, since = time.monotonic(), received
        rate = 8 * (received - since) / (time.monotonic() - begin) if begin else 0.0
        connection.sendall(json.dumps({"stream_bits_per_s": rate}).encode())


def measure(address: str, port: int, seconds: float) -> dict[str, float]:
    """Round trip of one byte (median) and what one TCP stream carries, in bits a second of its
    content."""
    with socket.create_connection((address, port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(_PINGS):
            start = time.perf_counter()
            connection.sendall(b"p")
            connection.recv(1)
            trips.append(time.perf_counter() - start)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    return {"round_trip_s": median(trips), **json.loads(answer)}


def main(arguments: list[str]) -> int:
    verb, *rest = arguments
    if verb == "forward":
        delay, loss, *hosts = rest
        forward(
            float(delay),
            float(loss),
            [(name, address) for name, address in (host.split(":") for host in hosts)],
        )
    elif verb == "serve":
        serve(rest[0], int(rest[1]))
    else:
        print(json.dumps(measure(rest[0], int(rest[1]), float(rest[2]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measurements between two hosts with plain sockets, before any process group exists.

Each host runs a :class:`Responder`; :func:`try_port` and :func:`probe` connect to it from another
host. Every connection and packet begins with a token that the hosts exchange through the rendezvous
store; everything else is ignored.
"""

from __future__ import annotations

import errno
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any

TOKEN_BYTES = 16
NUM_PORTS = 3
_TIMEOUT_S = 5.0
_NUM_PINGS = 15
_STREAM_S, _WARM_UP_S = 1.0, 0.3
_CHUNK = bytes(1 << 16)
_NUM_PACKETS, _PACKET_INTERVAL_S = 400, 0.001
_TRIES = 3
#: A probe packet: token, kind, id of the measurement, size of the reply.
_PACKET = struct.Struct(f"!{TOKEN_BYTES}sBII")
_COUNT, _SIZE = 0, 1
#: linux/in.h, linux/in6.h: set "don't fragment", and ignore the path MTU that the kernel knows.
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_SMALLEST_MTU = {socket.AF_INET: 576, socket.AF_INET6: 1280}
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # IP and UDP
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: discard what was not sent


@dataclass(frozen=True)
class HostProbe:
    """Measurements between two hosts. ``to``: from the measuring host to the other; ``from``: from
    the other host.

    Args:
        clock_offset_s: how far the other host's clock is ahead, to within half the round trip.
        bandwidth_*: rate of one TCP stream; None if it stalled.
        loss_*: share of UDP packets lost; None if no UDP packet arrives.
        mtu_*: the largest IP packet that arrives unfragmented; None if no UDP packet arrives.
    """

    round_trip_s: float
    clock_offset_s: float
    bandwidth_to_bytes_s: float | None
    bandwidth_from_bytes_s: float | None
    loss_to: float | None
    loss_from: float | None
    mtu_to_bytes: int | None
    mtu_from_bytes: int | None


class Responder:
    """Answer the probes of the other hosts in background threads. A context manager.

    Attributes:
        tcp_ports: ports chosen by the kernel, like the ports of Gloo and NCCL.
        udp_port: port for the packets that measure loss and MTU.
    """

    def __init__(self, address: str, token: bytes) -> None:
        self._token = token
        self._counts: Counter[int] = Counter()
        family, socket_address = _resolve(address, 0)
        self._listeners = [_listen(family, socket_address) for _ in range(NUM_PORTS)]
        self._udp = socket.socket(family, socket.SOCK_DGRAM)
        self._udp.bind(socket_address)
        _set_dont_fragment(self._udp)
        self._udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.tcp_ports = [listener.getsockname()[1] for listener in self._listeners]
        self.udp_port: int = self._udp.getsockname()[1]
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._accept, args=(listener,), daemon=True)
            for listener in self._listeners
        ]
        self._threads.append(threading.Thread(target=self._answer_packets, daemon=True))
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Responder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=2.0)
        for opened in (*self._listeners, self._udp):
            opened.close()

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.2)
        while not self._closing.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, struct.error):
            connection.settimeout(_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, TOKEN_BYTES) != self._token:
                return
            command, argument = struct.unpack("!cd", _receive(connection, 9))
            if command == b"C":
                connection.sendall(b"k")
            elif command == b"P":
                while connection.recv(1):
                    connection.sendall(struct.pack("!d", time.time()))
            elif command == b"S":
                connection.sendall(struct.pack("!d", _receive_rate(connection, argument)))
                while connection.recv(1 << 20):  # until the other side has read the reply
                    pass
            elif command == b"R":
                until = time.monotonic() + argument + _STREAM_S + _TIMEOUT_S
                while time.monotonic() < until:
                    connection.sendall(_CHUNK)
            elif command == b"U":
                connection.sendall(struct.pack("!d", self._counts[int(argument)]))

    def _answer_packets(self) -> None:
        self._udp.settimeout(0.2)
        while not self._closing.is_set():
            try:
                data, sender = self._udp.recvfrom(1 << 16)
            except OSError:  # a timeout, or an ICMP error of an earlier reply
                continue
            if len(data) < _PACKET.size:
                continue
            token, kind, identifier, size = _PACKET.unpack_from(data)
            if token != self._token:
                continue
            if kind == _COUNT:
                self._counts[identifier] += 1
            reply = data[: _PACKET.size].ljust(max(_PACKET.size, size), b"\0")
            with suppress(OSError):  # too large for this host's interface
                self._udp.sendto(reply, sender)


# -- the measuring side


def try_port(address: str, port: int, token: bytes | None = None, timeout_s: float = 3.0) -> str:
    """Connect to a port and return ``open``, ``refused``, ``no answer``, or the system's error.
    ``token``: token of the :class:`Responder` that must answer."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            if token is not None:
                connection.sendall(token + struct.pack("!cd", b"C", 0.0))
                if connection.recv(1) != b"k":
                    return "answered by another program"
        return "open"
    except TimeoutError:
        return "no answer"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return "no answer" if error.errno == errno.ETIMEDOUT else error.strerror or str(error)


def probe(
    address: str, tcp_port: int, udp_port: int, token: bytes, mtus: tuple[int | None, int | None]
) -> HostProbe:
    """Measure the link to another host's :class:`Responder`. Takes about 4 seconds.

    Args:
        mtus: MTUs of this host's interface and of the other host's interface.

    Raises:
        OSError: the connection was lost, or refused.
    """
    peer = _Peer(address, tcp_port, udp_port, token)
    round_trip_s, offset_s = peer.ping()
    warm_up_s = max(_WARM_UP_S, 6 * round_trip_s)  # until TCP's slow start is over
    with peer.packets() as packets:
        loss_to, loss_from = peer.loss(packets, round_trip_s)
        mtu_to = mtu_from = None
        if loss_to is not None:
            wait_s = max(0.05, 3 * round_trip_s)
            mtu_to = peer.largest(packets, mtus[0], wait_s, outgoing=True)
            mtu_from = peer.largest(packets, mtus[1], wait_s, outgoing=False)
    return HostProbe(
        round_trip_s,
        offset_s,
        peer.send_rate(warm_up_s),
        peer.receive_rate(warm_up_s),
        loss_to,
        loss_from,
        mtu_to,
        mtu_from,
    )


class _Peer:
    """Another host's responder, as seen by the measuring host."""

    def __init__(self, address: str, tcp_port: int, udp_port: int, token: bytes) -> None:
        self._tcp_address = (address, tcp_port)
        self._udp = _resolve(address, udp_port)
        self._token = token
        self._last_id = random.getrandbits(31)  # the counts of a responder serve all hosts

    def _open(self, command: bytes, argument: float = 0.0) -> socket.socket:
        connection = socket.create_connection(self._tcp_address, timeout=_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._token + struct.pack("!cd", command, argument))
        return connection

    def ping(self) -> tuple[float, float]:
        """Return the median round trip, and the offset of the other clock in the shortest one (NTP:
        RFC 5905, section 8)."""
        trips = []
        with self._open(b"P") as connection:
            for _ in range(_NUM_PINGS):
                sent_at, start = time.time(), time.perf_counter()
                connection.sendall(b"p")
                (their_time,) = struct.unpack("!d", _receive(connection, 8))
                trip_s = time.perf_counter() - start
                trips.append((trip_s, their_time - sent_at - trip_s / 2))
        return median(trip for trip, _ in trips), min(trips)[1]

    def send_rate(self, warm_up_s: float) -> float | None:
        try:
            with self._open(b"S", warm_up_s) as connection:
                connection.settimeout(warm_up_s + _STREAM_S + _TIMEOUT_S)
                until = time.monotonic() + warm_up_s + _STREAM_S + _TIMEOUT_S
                while not select.select([connection], [], [], 0)[0]:
                    if time.monotonic() > until:
                        return None
                    connection.sendall(_CHUNK)
                (rate,) = struct.unpack("!d", _receive(connection, 8))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        except (OSError, struct.error):
            return None
        return float(rate) or None

    def receive_rate(self, warm_up_s: float) -> float | None:
        try:
            with self._open(b"R", warm_up_s) as connection:
                rate = _receive_rate(connection, warm_up_s)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        except OSError:
            return None
        return rate or None

    def packets(self) -> socket.socket:
        sender = socket.socket(self._udp[0], socket.SOCK_DGRAM)
        _set_dont_fragment(sender)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        return sender

    def loss(
        self, packets: socket.socket, round_trip_s: float
    ) -> tuple[float | None, float | None]:
        """Return the shares of packets lost to the other host and from it; None if all were
        lost."""
        self._last_id = (self._last_id + 1) & 0x7FFFFFFF
        identifier, returned = self._last_id, 0
        packet = _PACKET.pack(self._token, _COUNT, identifier, 0)
        for _ in range(_NUM_PACKETS):
            with suppress(OSError):
                packets.sendto(packet, self._udp[1])
            returned += _drain(packets, _PACKET_INTERVAL_S, packet)
        returned += _drain(packets, max(0.3, 3 * round_trip_s), packet)
        with self._open(b"U", identifier) as connection:
            (arrived,) = struct.unpack("!d", _receive(connection, 8))
        if not arrived:
            return None, None
        return max(0.0, 1 - arrived / _NUM_PACKETS), (
            max(0.0, 1 - returned / arrived) if returned else None
        )

    def largest(
        self, packets: socket.socket, mtu_bytes: int | None, wait_s: float, outgoing: bool
    ) -> int | None:
        """Return the size of the largest unfragmented IP packet that arrives, up to the sender's
        MTU."""
        headers, smallest = _HEADERS[self._udp[0]], _SMALLEST_MTU[self._udp[0]]
        high = min(mtu_bytes or 1500, 65535)
        if self._passes(packets, high - headers, wait_s, outgoing):
            return high
        low = smallest
        if not self._passes(packets, low - headers, wait_s, outgoing):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._passes(packets, middle - headers, wait_s, outgoing):
                low = middle
            else:
                high = middle
        return low

    def _passes(self, packets: socket.socket, size: int, wait_s: float, outgoing: bool) -> bool:
        self._last_id = (self._last_id + 1) & 0x7FFFFFFF
        header = _PACKET.pack(self._token, _SIZE, self._last_id, _PACKET.size if outgoing else size)
        for _ in range(_TRIES):
            try:
                packets.sendto(header.ljust(size, b"\0") if outgoing else header, self._udp[1])
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    return False
            if _drain(packets, wait_s, header, stop_at_first=True):
                return True
        return False


def _drain(
    packets: socket.socket, wait_s: float, header: bytes, stop_at_first: bool = False
) -> int:
    """Count the replies with this header that arrive within ``wait_s``."""
    until, count = time.monotonic() + wait_s, 0
    while (left_s := until - time.monotonic()) > 0:
        if select.select([packets], [], [], left_s)[0]:
            with suppress(OSError):
                count += packets.recv(1 << 16).startswith(header)
            if stop_at_first and count:
                break
    return count


def _receive_rate(connection: socket.socket, warm_up_s: float) -> float:
    """Return the bytes per second that arrive after the warm-up; 0 if none arrive."""
    connection.settimeout(_TIMEOUT_S)
    total, measured_since = 0, 0.0
    start = time.monotonic()
    try:
        while chunk := connection.recv(1 << 20):
            now = time.monotonic()
            if measured_since:
                total += len(chunk)
                if now > measured_since + _STREAM_S:
                    return total / (now - measured_since)
            elif now > start + warm_up_s:
                measured_since = now
    except TimeoutError:
        pass
    return 0.0


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed")
        data += chunk
    return data


def _resolve(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    family, _, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    return family, socket_address


def _listen(family: socket.AddressFamily, socket_address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(socket_address)
    listener.listen(64)
    return listener


def _set_dont_fragment(packets: socket.socket) -> None:
    level, option = (
        (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER)
        if packets.family == socket.AF_INET6
        else (socket.IPPROTO_IP, _IP_MTU_DISCOVER)
    )
    with suppress(OSError):  # not Linux
        packets.setsockopt(level, option, _PMTUDISC_PROBE)

"""Count the TCP segments that this process has sent and retransmitted to other hosts.

The counts are read from the kernel with ``TCP_INFO`` (``linux/tcp.h``), for the sockets of Gloo, of
NCCL's socket transport and of the stores. RDMA bypasses TCP and is not counted. Systems other than
Linux report nothing.
"""

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_STREAM = (socket.AF_INET, socket.AF_INET6)
#: Offsets in `struct tcp_info`: tcpi_total_retrans and tcpi_data_segs_out, both 32 bits wide.
_RESENT, _SENT, _SIZE = 100, 156, 160


@dataclass(frozen=True)
class Segments:
    """Totals since the process started. ``sent`` includes retransmitted segments."""

    sent: int = 0
    resent: int = 0


class SegmentCounter:
    """Adds up the counts of all sockets, including sockets that have been closed."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}  # socket → its counts at the last reading
        self._sent = self._resent = 0

    def read(self) -> Segments:
        """Return the current totals. Takes a few microseconds per open file."""
        counts = dict(_sockets())
        for name, (sent, resent) in counts.items():
            sent_before, resent_before = self._last.get(name, (0, 0))
            self._sent += max(0, sent - sent_before)
            self._resent += max(0, resent - resent_before)
        self._last = counts
        return Segments(self._sent, self._resent)


def _sockets() -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (inode, (segments sent, retransmitted)) of each TCP connection to another host."""
    if sys.platform != "linux":
        return
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if not name.startswith("socket:"):
                continue
            # Use a duplicate, because the process may close the descriptor meanwhile.
            with contextlib.closing(socket.socket(fileno=os.dup(int(number)))) as connection:
                if (
                    connection.family in _STREAM
                    and connection.type == socket.SOCK_STREAM
                    and _leaves_host(connection)
                ):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
                    if len(info) >= _SIZE:
                        sent, resent = (
                            struct.unpack_from("=I", info, offset)[0] for offset in (_SENT, _RESENT)
                        )
                        yield name, (sent, resent)
        except OSError:  # closed meanwhile, or not connected
            continue


def _leaves_host(connection: socket.socket) -> bool:
    local, peer = connection.getsockname()[0], connection.getpeername()[0]
    return bool(local != peer and not peer.removeprefix("::ffff:").startswith("127."))

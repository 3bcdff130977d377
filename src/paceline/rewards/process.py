"""The client of a reward process (:mod:`paceline.rewards.worker`)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from paceline.core.errors import ConfigError
from paceline.core.processes import exit_text
from paceline.rewards.protocol import (
    WHERE_SIGNAL,
    CallRequest,
    GroupRequest,
    ResetRequest,
    RewardReply,
    SetupReply,
    SetupRequest,
)

_END_S = 5.0
#: Seconds for the process to write where it is.
_WHERE_S = 0.5
_CHUNK_BYTES = 1 << 16


class RewardProcess:
    """A process that computes rewards. It ends with this process, in a process group of its own,
    which Ctrl-C in a terminal does not reach.

    Args:
        deadline: time on the monotonic clock at which the current reward must have values.
        index: index of the group whose rewards it computes; None if it is idle.
        replies: values of the rewards that it has computed for this group.
    """

    def __init__(self) -> None:
        self.deadline = 0.0
        self.index: int | None = None
        self.replies: list[RewardReply] = []
        self._received = b""
        self.socket, other_end = socket.socketpair()
        with other_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline.rewards.worker", str(other_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # it uses its standard error instead
                pass_fds=[other_end.fileno()],
                process_group=0,
            )

    def send(
        self, request: SetupRequest | GroupRequest | ResetRequest | CallRequest, timeout_s: float
    ) -> None:
        """Send a request to an idle process; one that has ended is noticed when its reply is
        read."""
        self.deadline = time.monotonic() + timeout_s
        self.socket.settimeout(timeout_s)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(json.dumps(request).encode() + b"\n")

    def receive(self) -> Sequence[bytes]:
        """Return the lines that have arrived. Waits until something arrives, or the deadline.

        Raises:
            EOFError: the process has ended; the text says how.
            TimeoutError: nothing arrived before the deadline.
        """
        self.socket.settimeout(max(0.001, self.deadline - time.monotonic()))
        try:
            chunk = self.socket.recv(_CHUNK_BYTES)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END_S)
            raise EOFError(exit_text(self.process.returncode))
        *lines, self._received = (self._received + chunk).split(b"\n")
        return lines

    def finish_setup(self) -> None:
        """Wait for the answer to the first message.

        Raises:
            ConfigError: a function cannot be loaded.
            EOFError, TimeoutError: as in :meth:`receive`.
        """
        lines: Sequence[bytes] = []
        while not lines:
            lines = self.receive()
        reply: SetupReply = json.loads(lines[0])
        if reply["error"] is not None:
            raise ConfigError.from_record(reply["error"])

    def show_where(self) -> None:
        """Have the process write the lines that it executes to the standard error."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(WHERE_SIGNAL)
            time.sleep(_WHERE_S)

    def kill(self) -> None:
        """End the process, and programs that its functions have started, also if it has ended
        before them."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()

    def close(self) -> None:
        """End an idle process, and wait until it has ended."""
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        self.kill()

"""The client of a runner process (:mod:`paceline.sweep.runner`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import IO, Any

from paceline.core.log import write_line
from paceline.core.processes import exit_text
from paceline.sweep.devices import DeviceShare

_END_S = 20.0


class RunnerProcess:
    """A runner process. It ends with this process, and Ctrl-C in a terminal does not reach it. Its
    output is read with :meth:`read_output`.
    """

    def __init__(self, share: DeviceShare) -> None:
        self.share = share
        self.label = ""
        self._output = b""
        self._received = b""
        self.socket, other_end = socket.socketpair()
        cores = ",".join(str(core) for core in share.cores or ())
        with other_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline.sweep.runner", str(other_end.fileno()), cores],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[other_end.fileno()],
                env=os.environ | share.variables,
                process_group=0,
            )

    def send(self, request: Any) -> None:
        # A runner that has ended is noticed when its reply is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(json.dumps(request).encode() + b"\n")

    def receive(self) -> Any:
        """Read what has arrived. Return the reply, or None if it is not complete yet.

        Raises:
            EOFError: the process has ended; the text says how.
        """
        try:
            chunk = self.socket.recv(1 << 16)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError(f"the process of the run {exit_text(self.process.wait())}")
        self._received += chunk
        if not self._received.endswith(b"\n"):
            return None
        line, self._received = self._received, b""
        return json.loads(line)

    def read_output(self) -> bool:
        """Print the lines that have arrived, each with the label of the run. Return False at the
        end."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        *lines, self._output = (self._output + chunk).split(b"\n")
        if not chunk and self._output:
            lines, self._output = [self._output], b""
        for line in lines:
            write_line(f"[{self.label}] {line.decode('utf-8', 'replace')}")
        return bool(chunk)

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask the current run to stop after a checkpoint. A second call ends it at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        self.socket.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

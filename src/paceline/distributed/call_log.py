"""A log of a rank's last collectives that remains readable after the rank has died.

Gloo aborts the process when it receives a message of an unexpected size. The log is therefore in
anonymous shared memory, which the other ranks of the host can read. The memory is freed when the
last of them closes it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from dataclasses import dataclass
from typing import Any, BinaryIO, TypedDict

_SLOTS, _SLOT_BYTES = 32, 768
#: Maximum number of cached records. Tensor sizes may differ in each step.
_MAX_KNOWN = 4096


class CallRecord(TypedDict):
    """A collective that a rank has issued, as JSON."""

    number: int | None  # within its group, from 0; None for communication between two ranks
    function: str
    dtype: str | None
    numel: int | None  # None if ranks may differ in it
    group: str
    site: list[str]  # innermost frame first


@dataclass
class CountedCall:
    """A counted call of ``torch.distributed``.

    Args:
        kind: kind of traffic (see :data:`paceline.distributed.traffic.KINDS`).
        ranks: global ranks of its group.
        messages: (rank, bytes) of each message to another rank, for communication between two
            ranks.
        start_s, end_s: times on the clock of ``time.perf_counter``; an asynchronous collective ends
            when its communication ends.
    """

    kind: str
    size_bytes: int
    ranks: list[int]
    messages: list[tuple[int, int]]
    start_s: float
    end_s: float


class CallLog:
    """Writes the log of this rank. Create one with :meth:`make`."""

    def __init__(self, memory: BinaryIO) -> None:
        self._opened = memory
        self.file = memory.fileno()
        self._memory = mmap.mmap(self.file, _SLOTS * _SLOT_BYTES)
        self._count = 0
        self._known: dict[
            Any, bytes
        ] = {}  # the part of a record that is the same for repeated calls

    @staticmethod
    def make() -> CallLog | None:
        """Create a log, or return None if this system does not support anonymous shared memory."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            memory = os.fdopen(os.memfd_create("paceline-calls"), "r+b", buffering=0)
            memory.truncate(_SLOTS * _SLOT_BYTES)
            return CallLog(memory)
        except OSError:
            return None

    def write(self, call: Any) -> None:
        """Add a :class:`~paceline.distributed.timing.progress.CollectiveCall`."""
        frame = call.site[0] if call.site else (None, 0)
        key = (call.function, call.dtype, call.numel, call.group, id(frame[0]), frame[1])
        known = self._known.get(key)
        if known is None:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            fields = call.record()
            fields["site"] = [line[-200:] for line in fields["site"]]  # to fit into a slot
            known = self._known[key] = json.dumps(fields).encode()[: _SLOT_BYTES - 48]
        begin = self._count % _SLOTS * _SLOT_BYTES
        line = b"%d %d " % (self._count, -1 if call.number is None else call.number) + known
        self._count += 1
        self._memory[begin : begin + len(line) + 1] = line + b"\n"


class CallLogReader:
    """Reads the log of another rank of this host.

    Raises:
        OSError: if the log cannot be opened.
    """

    def __init__(self, pid: int, file: int) -> None:
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY)
        try:
            self._memory = mmap.mmap(opened, _SLOTS * _SLOT_BYTES, prot=mmap.PROT_READ)
        except ValueError as error:  # the file has an unexpected size
            raise OSError(str(error)) from error
        finally:
            os.close(opened)

    def calls(self) -> list[CallRecord]:
        """Return the calls, oldest first. A record that was incomplete when the process died is
        left out."""
        calls: list[tuple[int, CallRecord]] = []
        for slot in range(_SLOTS):
            line, _, _ = self._memory[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES].partition(
                b"\n"
            )
            with contextlib.suppress(ValueError):
                count, number, fields = line.split(b" ", 2)
                call = json.loads(fields)
                call["number"] = None if number == b"-1" else int(number)
                calls.append((int(count), call))
        return [call for _, call in sorted(calls, key=lambda entry: entry[0])]

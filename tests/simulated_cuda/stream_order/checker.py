"""Find accesses to memory that streams, or a stream and the host, may make in either order.

The values of simulated devices are right even if a wait is missing, because each operation is
computed when it is issued. So the checker looks at the waits instead: it knows each access to the
memory of a device or to pinned memory, and :mod:`stream_order.clocks` says whether the earlier of
two accesses is known to be done when the later one begins.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stream_order.clocks import Clock, Stream, StreamClocks

#: Kinds of findings.
MISSING_WAIT = "missing wait"
FREED = "freed too early"
PINNED = "pinned memory used too early by the host"
#: Memory has as many accesses at most before those that the host has waited for are dropped.
_MAX_ACCESSES = 16


@dataclass(frozen=True)
class Access:
    """Bytes of a memory block that an operation reads or writes.

    Args:
        operation: name of the operation, such as ``aten::copy_``.
        site: the line that issued it.
        stream: the stream that runs it; None: the host.
        position: the position on the stream.
    """

    operation: str
    site: str
    stream: Stream | None
    position: int
    begin: int
    end: int
    writes: bool

    def overlaps(self, other: "Access") -> bool:
        return self.begin < other.end and other.begin < self.end

    def contains(self, other: "Access") -> bool:
        return self.begin <= other.begin and other.end <= self.end

    def __str__(self) -> str:
        verb = "written" if self.writes else "read"
        by = "the host" if self.stream is None else f"stream {self.stream}"
        return f"{verb} by {self.operation} of {by} at {self.site}"


@dataclass(frozen=True)
class Finding:
    """Two accesses whose order is not known."""

    kind: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.first}; then {self.second}"


@dataclass(frozen=True)
class Use:
    """An operation's use of a part of a memory block: bytes ``begin`` to ``end`` of the block at
    ``address``. ``stream`` is None for pinned memory."""

    address: int
    begin: int
    end: int
    stream: Stream | None
    writes: bool


@dataclass
class _Block:
    """Memory of a device, or pinned memory.

    Args:
        stream: the stream that was current when it was allocated, which may use it again as soon as
            it is freed; None for pinned memory, or if it is unknown.
        allocation: stands for what the stream did with the memory before.
        recorded: streams of ``record_stream``, for which the allocator waits.
    """

    stream: Stream | None = None
    allocation: Access | None = None
    recorded: set[Stream] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class StreamOrderChecker:
    """Checks the accesses of one process. Threads may call it at the same time.

    Args:
        report: called with each finding.
        find_site: returns the line of the source that runs now.
    """

    def __init__(
        self, report: Callable[[Finding], None], find_site: Callable[[], str] = lambda: ""
    ) -> None:
        self.clocks = StreamClocks()
        self._report, self._find_site = report, find_site
        self._blocks: dict[int, _Block] = {}
        # By the stream that may use freed memory again: accesses that are not known to be done, and
        # the line that freed the memory.
        self._freed: dict[Stream, list[tuple[Access, str]]] = {}
        # Reentrant, because the garbage collector may free memory at any line.
        self._lock = threading.RLock()

    # -- operations
    def launch(self, operation: str, uses: Iterable[Use], *, host_waits: bool = False) -> None:
        """An operation of a device. A copy between two devices runs on the current streams of
        both, which wait for each other."""
        uses = list(uses)
        streams = {use.stream for use in uses if use.stream is not None}
        if not streams:
            return
        with self._lock:
            # The source's stream runs a copy between devices.
            main = next((use.stream for use in uses if use.stream and not use.writes), None)
            stream = main or next(iter(streams))
            for other in streams - {stream}:
                self.clocks.wait_for_stream(stream, other)
            self._access(operation, stream, uses)
            for other in streams - {stream}:
                self.clocks.wait_for_stream(other, stream)
            if host_waits:
                self.clocks.synchronize_stream(stream)

    def collective(
        self, operation: str, communicator: str, current: Stream, uses: Iterable[Use]
    ) -> Clock:
        """A collective of a communicator, which has a stream of its own. It begins after the work
        of the stream that is current when it is issued. Return what is done when it is done."""
        with self._lock:
            self.clocks.wait_for_stream(communicator, current)
            self._access(operation, communicator, uses)
            return self.clocks.snapshot(communicator)

    def wait_for_collective(self, current: Stream, end: Clock) -> None:
        with self._lock:
            self.clocks.wait_for(current, end)

    def host_access(self, operation: str, uses: Iterable[Use]) -> None:
        """The host reads or writes pinned memory."""
        with self._lock:
            site = self._find_site()
            for use in uses:
                access = Access(operation, site, None, 0, use.begin, use.end, use.writes)
                block = self._blocks.get(use.address)
                for earlier in () if block is None else tuple(block.accesses):
                    if self._conflicts(earlier, access) and not self._is_host_after(earlier):
                        self._report(Finding(PINNED, str(earlier), str(access)))

    def _access(self, operation: str, stream: Stream, uses: Iterable[Use]) -> None:
        position, site = self.clocks.launch(stream), self._find_site()
        for use in uses:
            access = Access(operation, site, stream, position, use.begin, use.end, use.writes)
            block = self._blocks.setdefault(use.address, _Block())
            allocation = () if block.allocation is None else (block.allocation,)
            for earlier in (*allocation, *block.accesses):
                if self._conflicts(earlier, access) and not self._is_after(stream, earlier):
                    self._report(Finding(MISSING_WAIT, str(earlier), str(access)))
            block.accesses = [
                earlier for earlier in block.accesses if not self._replaces(access, earlier)
            ]
            block.accesses.append(access)
            if len(block.accesses) > _MAX_ACCESSES:
                block.accesses = [each for each in block.accesses if not self._is_host_after(each)]

    @staticmethod
    def _conflicts(earlier: Access, later: Access) -> bool:
        return (earlier.writes or later.writes) and later.overlaps(earlier)

    @staticmethod
    def _replaces(later: Access, earlier: Access) -> bool:
        """Return whether what conflicts with an earlier access, and is ordered after a later one,
        is ordered after the earlier one too."""
        is_same_read = not earlier.writes and later.stream == earlier.stream
        return later.contains(earlier) and (later.writes or is_same_read)

    def _is_after(self, stream: Stream, earlier: Access) -> bool:
        assert earlier.stream is not None
        return self.clocks.knows(stream, earlier.stream, earlier.position)

    def _is_host_after(self, earlier: Access) -> bool:
        assert earlier.stream is not None
        return self.clocks.host_knows(earlier.stream, earlier.position)

    # -- memory
    def allocate(self, address: int, stream: Stream) -> None:
        """Memory of a device that is allocated while a stream is current. It may have been freed
        by this stream before, so what other streams did with that must be done."""
        with self._lock:
            for access, site in self._freed.pop(stream, ()):
                if not self._is_after(stream, access):
                    freed = f"freed at {site} and allocated again by stream {stream}"
                    self._report(Finding(FREED, str(access), f"{freed} at {self._find_site()}"))
            position = self.clocks.position(stream)
            before = Access(
                "what its stream did with the memory before it was allocated",
                self._find_site(), stream, position, 0, 1 << 62, True,
            )  # fmt: skip
            self._blocks[address] = _Block(stream, before if position else None)

    def record_stream(self, address: int, stream: Stream) -> None:
        with self._lock:
            self._blocks.setdefault(address, _Block()).recorded.add(stream)

    def free(self, address: int) -> None:
        """Memory of a device, or pinned memory. Pinned memory is not used again before the copies
        that were issued are done, because torch's allocator waits for them."""
        with self._lock:
            block = self._blocks.pop(address, None)
            if block is None or block.stream is None:
                return
            for access in block.accesses:
                is_protected = access.stream in block.recorded
                if not is_protected and not self._is_after(block.stream, access):
                    freed = self._freed.setdefault(block.stream, [])
                    freed.append((access, self._find_site()))

    # -- streams and events
    def record(self, event: int, stream: Stream) -> None:
        with self._lock:
            self.clocks.record(event, stream)

    def wait(self, stream: Stream, event: int) -> None:
        with self._lock:
            self.clocks.wait(stream, event)

    def destroy(self, event: int) -> None:
        with self._lock:
            self.clocks.destroy(event)

    def synchronize_event(self, event: int) -> None:
        with self._lock:
            self.clocks.synchronize_event(event)

    def synchronize_stream(self, stream: Stream) -> None:
        with self._lock:
            self.clocks.synchronize_stream(stream)

    def synchronize_device(self, device: int) -> None:
        with self._lock:
            self.clocks.synchronize_device(device)

"""Clocks of streams: which work is known to be done when other work begins.

Each operation that a stream runs has a position: 1, 2, … A clock maps streams to the position up to
which their work is done. A stream has a clock, which says what is done when its next operation
begins; the host has one; and an event keeps the clock that its stream had when it was recorded.
Waiting merges clocks. Two operations are ordered if the later one's stream knew the position of the
earlier one. (These are vector clocks, with streams in place of processes.)
"""

#: The device and the number of a stream, or the name of a communicator.
Stream = tuple[int, int] | str
Clock = dict[Stream, int]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, position in other.items():
        if position > clock.get(stream, 0):
            clock[stream] = position


class StreamClocks:
    """The clocks of the streams and of the host of one process.

    All threads of the host have one clock: what one of them has waited for is taken as done for the
    others too, because they tell each other by means that are not observed (queues and locks).
    """

    def __init__(self) -> None:
        self._host: Clock = {}
        self._streams: dict[Stream, Clock] = {}
        self._events: dict[int, Clock] = {}

    def _of(self, stream: Stream) -> Clock:
        """Return the clock of a stream. Its next work begins after what the host has waited for,
        because the host issues it later."""
        clock = self._streams.setdefault(stream, {})
        _merge(clock, self._host)
        return clock

    def launch(self, stream: Stream) -> int:
        """Return the position of a new operation."""
        clock = self._of(stream)
        position = clock[stream] = clock.get(stream, 0) + 1
        return position

    def position(self, stream: Stream) -> int:
        """Return the position of the latest operation of a stream."""
        return self._streams.get(stream, {}).get(stream, 0)

    def knows(self, stream: Stream, other: Stream, position: int) -> bool:
        """Return whether what is issued to ``stream`` now begins after an operation of another."""
        return stream == other or self._of(stream).get(other, 0) >= position

    def host_knows(self, stream: Stream, position: int) -> bool:
        """Return whether the host has waited for an operation."""
        return self._host.get(stream, 0) >= position

    # -- events
    def record(self, event: int, stream: Stream) -> None:
        self._events[event] = dict(self._of(stream))

    def wait(self, stream: Stream, event: int) -> None:
        _merge(self._of(stream), self._events.get(event, {}))

    def destroy(self, event: int) -> None:
        self._events.pop(event, None)

    def wait_for_stream(self, stream: Stream, other: Stream) -> None:
        """Let a stream wait for all work of another."""
        _merge(self._of(stream), self._of(other))

    def snapshot(self, stream: Stream) -> Clock:
        """Return what is done when the work of a stream so far is done."""
        return dict(self._of(stream))

    def wait_for(self, stream: Stream, clock: Clock) -> None:
        _merge(self._of(stream), clock)

    # -- the host
    def synchronize_event(self, event: int) -> None:
        _merge(self._host, self._events.get(event, {}))

    def synchronize_stream(self, stream: Stream) -> None:
        _merge(self._host, self._of(stream))

    def synchronize_device(self, device: int) -> None:
        for stream in list(self._streams):
            if isinstance(stream, str) or stream[0] == device:
                self.synchronize_stream(stream)

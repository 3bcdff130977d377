"""Times of the steps on an accelerator, from events that are recorded on its streams.

The host of an accelerator runs ahead of the device, so its clock shows when work was queued, not
when it ran. The events are read a step late, when the device has passed them, so that the host does
not wait for the device because of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

#: Device types whose events have times.
_WITH_TIMES = ("cuda", "xpu")
#: Number of steps whose events are kept while the device has not passed them.
_MAX_UNREAD = 64


@dataclass(frozen=True)
class DeviceStep:
    """Seconds of one step on the device.

    Args:
        spent_s: seconds by phase, without waits for other ranks.
        wait_s: sum of the times for which streams were blocked by communication, including the
            transfers. It may overlap with computation on another stream.
    """

    step: int
    disturbed: bool
    wall_s: float
    wait_s: float
    spent_s: dict[str, float]

    @property
    def exposed_wait_s(self) -> float:
        """The part of the step in which the device only communicated."""
        return max(0.0, self.wall_s - sum(self.spent_s.values()))


@dataclass
class _OpenStep:
    """The events of one step: (phase, event at its begin, waits in it as pairs of events)."""

    step: int
    phases: list[tuple[str, Any, list[tuple[Any, Any]]]] = field(default_factory=list)
    end: Any = None
    disturbed: bool = False

    @property
    def is_done(self) -> bool:
        """Whether the device has passed all events, including the waits on other streams."""
        return bool(self.end.query()) and all(
            end.query() for _, _, waits in self.phases for _, end in waits
        )


class DeviceTimer:
    """Records the events of the steps of one device, in the threads that issue its work.

    Args:
        make_event: function that returns a new event with times.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], Any] | None = None) -> None:
        self.device = device
        self._make_event = make_event or (lambda: torch.Event(device, enable_timing=True))
        self._free: list[Any] = []
        self._current: _OpenStep | None = None
        self._unread: deque[_OpenStep] = deque(maxlen=_MAX_UNREAD)

    @classmethod
    def of(cls, device: torch.device) -> DeviceTimer | None:
        """Return a timer, or None if events of this device have no times."""
        return cls(device) if device.type in _WITH_TIMES else None

    def begin_step(self, step: int, phase: str) -> None:
        self._current = _OpenStep(step)
        self.enter(phase)

    def enter(self, phase: str) -> None:
        """Start a phase of the step. Outside of steps, nothing is recorded."""
        if self._current is not None:
            self._current.phases.append((phase, self._record(), []))

    def begin_wait(self) -> Any:
        """Return the event at the beginning of a wait of the current stream, or None outside of
        steps."""
        return None if self._current is None else self._record()

    def end_wait(self, begin: Any) -> None:
        """End a wait, whose length is the time between its events on the current stream."""
        if begin is not None and self._current is not None:
            self._current.phases[-1][2].append((begin, self._record()))

    def end_step(self, disturbed: bool) -> None:
        step, self._current = self._current, None
        if step is not None:
            step.end, step.disturbed = self._record(), disturbed
            self._unread.append(step)

    def read(self) -> list[DeviceStep]:
        """Return the steps that the device has finished since the last call, in order. Does not
        wait for the device."""
        steps = []
        while self._unread and self._unread[0].is_done:
            steps.append(self._measure(self._unread.popleft()))
        return steps

    def _record(self) -> Any:
        event = self._free.pop() if self._free else self._make_event()
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def _measure(self, step: _OpenStep) -> DeviceStep:
        begins = [begin for _, begin, _ in step.phases]
        spent_s: dict[str, float] = {}
        total_wait_s = 0.0
        for (phase, begin, waits), end in zip(step.phases, [*begins[1:], step.end], strict=True):
            wait_s = sum(_seconds(*wait) for wait in waits)
            total_wait_s += wait_s
            # A wait of another stream overlaps with the work of this one.
            spent_s[phase] = spent_s.get(phase, 0.0) + max(0.0, _seconds(begin, end) - wait_s)
            self._free += [begin, *(event for wait in waits for event in wait)]
        self._free.append(step.end)
        wall_s = _seconds(begins[0], step.end)
        return DeviceStep(step.step, step.disturbed, wall_s, total_wait_s, spent_s)


def _seconds(begin: Any, end: Any) -> float:
    return max(0.0, float(begin.elapsed_time(end)) * 1e-3)

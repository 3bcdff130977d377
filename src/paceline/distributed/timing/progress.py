"""Track the progress of this process: its phase and step, issued collectives, and waiting time.

Recording takes about a microsecond; the watchdog reads the records from another thread. Collectives
are recorded by the wrappers in :mod:`paceline.distributed.traffic`, and waits in the wrapped
``wait`` of torch's works and futures, so that the waits of FSDP, DeepSpeed and the pipeline
schedules are included.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from paceline import distributed
from paceline.distributed import torch_compat
from paceline.distributed.call_log import CallLog, CallRecord
from paceline.distributed.timing.device_timer import DeviceStep, DeviceTimer

#: What the main thread waits for: other ranks in a collective, or the work of its own device.
COLLECTIVE, DEVICE = "a collective", "the device"
_NUM_CALLS = 32
#: Number of steps on the device that are kept for :meth:`ProgressTracker.take_device_steps`.
_MAX_DEVICE_STEPS = 1024
#: Number of recent steps to keep: at least as many as run between two polls of the watchdog.
_NUM_STEPS = 64
#: Number of frames in a call site.
_NUM_FRAMES = 3
#: Folders whose frames are not part of a call site; see :func:`hide_in_call_sites`.
_INTERNAL_FOLDERS = [package.__path__[0] + os.sep for package in (torch, distributed)]


class Arguments(NamedTuple):
    """Positional and keyword arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


#: Function of torch.distributed → (position and name of the tensor or list of tensors, position and
#: name of the group). The first position is None if the tensors of ranks may differ in size.
ARGUMENTS: dict[str, tuple[int | None, str, int, str]] = {
    "all_reduce": (0, "tensor", 2, "group"),
    "broadcast": (0, "tensor", 2, "group"),
    "reduce": (0, "tensor", 3, "group"),
    "all_gather": (1, "tensor", 2, "group"),
    "all_gather_into_tensor": (1, "input_tensor", 2, "group"),
    "all_gather_single": (1, "input_tensor", 2, "group"),
    "reduce_scatter": (0, "output", 3, "group"),
    "reduce_scatter_tensor": (1, "input", 3, "group"),
    "reduce_scatter_single": (1, "input", 3, "group"),
    "all_to_all": (None, "", 2, "group"),
    "all_to_all_single": (None, "", 4, "group"),
    "gather": (0, "tensor", 3, "group"),
    "scatter": (0, "tensor", 3, "group"),
    "barrier": (None, "", 0, "group"),
    "monitored_barrier": (None, "", 0, "group"),
    "broadcast_object_list": (None, "", 2, "group"),
    "all_gather_object": (None, "", 2, "group"),
    "gather_object": (None, "", 3, "group"),
    "scatter_object_list": (None, "", 3, "group"),
    "send": (0, "tensor", 2, "group"),
    "recv": (0, "tensor", 2, "group"),
}
#: Functions that communicate between two ranks; their calls are not numbered.
_POINT_TO_POINT = frozenset({"send", "recv", "batch_isend_irecv"})


class CollectiveCall(NamedTuple):
    """A collective that was issued."""

    number: int | None  # within its group, from 0; None for communication between two ranks
    function: str
    dtype: torch.dtype | None
    numel: int | None  # None if it may differ between ranks
    group: str
    site: tuple[tuple[CodeType, int], ...]  # innermost frame first

    def record(self) -> CallRecord:
        return {
            "number": self.number,
            "function": self.function,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "numel": self.numel,
            "group": self.group,
            "site": [where(code, line) for code, line in self.site],
        }


class StepTimes(NamedTuple):
    """Seconds of one step on this rank."""

    step: int
    wall_s: float
    data_s: float  # loading data, without waits for communication
    wait_s: float  # waiting for communication
    sched_delay_s: float  # runnable but without a core, outside of waits; 0 if unknown
    disturbed: bool  # whether a checkpoint was written at the same time


@dataclass
class _Group:
    ranks: list[int]
    numbers: Iterator[int] = field(default_factory=itertools.count)
    issued: int = 0


class ProgressTracker:
    """Records the progress of one process. Collectives may be issued and phases entered in any
    thread; steps and waits are the main thread's. On an accelerator, the threads that run
    the backward pass for the main thread count as the main thread.

    Attributes:
        timer: timer of the steps on an accelerator, or None. With it, steps and waits are timed on
            the device, and known a step late.
        device_steps: recent steps on the device, which :meth:`take_device_steps` removes.
    """

    def __init__(self) -> None:
        self._delays: SchedulerDelayReader | None = None
        self.box: CallLog | None = None
        self.start(active=False)

    def start(self, active: bool = True, on_cpu: bool = True) -> None:
        """Reset the records. Called in the thread that trains.

        Args:
            active: whether to record collectives.
            on_cpu: whether the thread itself computes, so that its scheduling delay is measured.
        """
        self.active = active
        self._follows_backward = not on_cpu
        self.timer: DeviceTimer | None = None
        self.device_steps: deque[DeviceStep] = deque(maxlen=_MAX_DEVICE_STEPS)
        self.box = CallLog.make() if active else None
        self._delays = SchedulerDelayReader.open() if active and on_cpu else None
        self.sched_delay_s = self._sched_delay_from = 0.0
        self.thread = threading.get_ident()
        self.phase = "starting"
        self.step: int | None = None
        self.marks = 0  # increases whenever progress is recorded
        self.waits_for: str | None = None  # what the main thread waits for
        #: How long this rank may make no progress, because the others wait for it outside of
        #: collectives; None: as the phase allows.
        self.patience_s: float | None = None
        self.waited_s = self.step_wait_s = 0.0  # total, and in the last step
        self.last: CollectiveCall | None = None  # issued by the main thread
        self.waited_call: CollectiveCall | None = None  # which it waits for, if it is known
        self.ring: deque[CollectiveCall] = deque(maxlen=_NUM_CALLS)
        self.steps: deque[StepTimes] = deque(maxlen=_NUM_STEPS)
        self._groups: dict[str, _Group] = {}
        self._call_of_work: WeakKeyDictionary[dist.Work, CollectiveCall] = WeakKeyDictionary()
        #: Seconds of the last step by phase, without waits for other ranks (``step_wait_s``).
        self.spent_s: dict[str, float] = {}
        # Several threads that run micro-batches may enter phases.
        self._phase_lock = threading.Lock()
        self.marked_at = self._phase_at = time.perf_counter()
        self._phase_waited = self._step_at = self._step_waited = self._step_sched_delay = 0.0

    @property
    def _is_main(self) -> bool:
        """Whether this thread is the main thread, or runs the backward pass for it."""
        if threading.get_ident() == self.thread:
            return True
        return self._follows_backward and torch_compat.in_backward()

    # -- phases and steps
    def enter(self, phase: str) -> None:
        """Start a phase: data, forward, backward, optimizer, logging, compilation, evaluation,
        saving or loading.

        Any thread may call this.
        """
        with self._phase_lock:
            now, waited = time.perf_counter(), self.waited_s
            spent = now - self._phase_at - (waited - self._phase_waited)
            self.spent_s[self.phase] = self.spent_s.get(self.phase, 0.0) + spent
            self.phase, self._phase_at, self._phase_waited = phase, now, waited
        if self.timer is not None and threading.get_ident() == self.thread:
            self.timer.enter(phase)
        self.marks += 1
        self.marked_at = now

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enter a phase within the block, then return to the previous one. If the block raises an
        exception, the phase stays, so that the failure is reported with it."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Let the watchdog of the other ranks accept this many seconds without progress within the
        block."""
        before, self.patience_s = self.patience_s, seconds
        try:
            yield
        finally:
            self.patience_s = before

    def tick(self) -> None:
        """Record progress within a phase."""
        self.marks += 1
        self.marked_at = time.perf_counter()

    def begin_step(self, step: int) -> None:
        """Start step ``step`` (from 1) with the phase `data`."""
        self.step = step
        self.enter("data")
        if self.timer is not None:
            self.timer.begin_step(step, "data")
        self.spent_s.clear()
        self._add_sched_delay()
        self._step_at, self._step_waited = self.marked_at, self.waited_s
        self._step_sched_delay = self.sched_delay_s

    def end_step(self, disturbed: bool = False) -> None:
        """End a step. The phase is `logging` until the next step starts.

        Args:
            disturbed: whether something else, such as writing a checkpoint, may have slowed down
                the step.
        """
        if self.timer is not None:
            self.timer.end_step(disturbed)
        self.enter("logging")
        self._add_sched_delay()
        self.step_wait_s = self.waited_s - self._step_waited
        if self.timer is not None:
            self._read_timer(self.timer)
            return
        self.steps.append(
            StepTimes(
                step=self.step or 0,
                wall_s=self.marked_at - self._step_at,
                data_s=self.spent_s.get("data", 0.0),
                wait_s=self.step_wait_s,
                sched_delay_s=self.sched_delay_s - self._step_sched_delay,
                disturbed=disturbed,
            )
        )

    def _read_timer(self, timer: DeviceTimer) -> None:
        """Add the steps that the device has finished."""
        for done in timer.read():
            self.device_steps.append(done)
            self.steps.append(
                StepTimes(
                    step=done.step,
                    wall_s=done.wall_s,
                    data_s=done.spent_s.get("data", 0.0),
                    wait_s=done.wait_s,
                    sched_delay_s=0.0,
                    disturbed=done.disturbed,
                )
            )

    def take_device_steps(self) -> list[DeviceStep]:
        """Return the steps that the device has finished since the last call."""
        if self.timer is not None:
            self._read_timer(self.timer)
        taken = list(self.device_steps)
        self.device_steps.clear()
        return taken

    # -- collectives
    def issue(
        self, function: str, tensor: Any, group: dist.ProcessGroup | None
    ) -> CollectiveCall | None:
        """Record a collective, or a message between two ranks, before it is issued.

        Args:
            tensor: tensor or list of tensors of the call, or None.
        """
        if not self.active:
            return None
        name, known = self._group(group)
        number = None
        if known is not None and function not in _POINT_TO_POINT:
            number = next(known.numbers)
            known.issued = number + 1
        if isinstance(tensor, list | tuple):
            tensor = tensor[0] if tensor else None
        has_size = isinstance(tensor, torch.Tensor)
        call = CollectiveCall(
            number,
            function,
            tensor.dtype if has_size else None,
            tensor.numel() if has_size else None,
            name,
            call_site(inspect.currentframe()),
        )
        self.ring.append(call)
        if self.box is not None:
            self.box.write(call)
        if self._is_main:
            self.last = call
            self.tick()
        return call

    def add_work(self, work: Any, call: CollectiveCall | None) -> None:
        """Record the work that a call returned, so that a wait for it names the call."""
        if call is not None and isinstance(work, dist.Work):
            self._call_of_work[work] = call

    def call_of(self, work: Any) -> CollectiveCall | None:
        """Return the call that returned a work, or None if it is not known."""
        return self._call_of_work.get(work) if isinstance(work, dist.Work) else None

    def _group(self, group: dist.ProcessGroup | None) -> tuple[str, _Group | None]:
        if group is None:
            group = dist.group.WORLD
        name = getattr(group, "group_name", None)
        if name is None:
            return "", None  # this rank is not in the group
        known = self._groups.get(name)
        if known is None:
            known = self._groups.setdefault(name, _Group(dist.get_process_group_ranks(group)))
        return name, known

    @property
    def issued(self) -> dict[str, int]:
        """Number of collectives issued so far, by group."""
        return {name: group.issued for name, group in list(self._groups.items()) if group.issued}

    @property
    def groups(self) -> dict[str, list[int]]:
        """Global ranks of each group that this rank has used."""
        return {name: group.ranks for name, group in list(self._groups.items())}

    # -- waits
    @contextmanager
    def waiting(self, what: str, call: CollectiveCall | None = None) -> Iterator[None]:
        """Count the time that the main thread spends in the block as waiting for other ranks.
        Nested waits count once.

        Args:
            call: the collective that is waited for, if it is known.
        """
        if not self._is_main:
            yield
            return
        if self.waits_for is not None:
            self.waited_call = call or self.waited_call
            yield
            return
        self._add_sched_delay()
        self.waits_for, self.waited_call = what, call
        self.tick()
        begun = self.marked_at
        timer = None if what == DEVICE else self.timer
        event = None if timer is None else timer.begin_wait()
        try:
            yield
        finally:
            if timer is not None:
                timer.end_wait(event)
            self.waits_for = self.waited_call = None
            self.tick()
            self.waited_s += self.marked_at - begun
            if self._delays is not None:
                self._sched_delay_from = self._delays.read_s()

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Count the time for which a collective that is not asynchronous blocks the current stream
        of an accelerator. Its host does not wait in the call."""
        timer = self.timer
        if timer is None or self.waits_for is not None or not self._is_main:
            yield
            return
        event, self.waits_for = timer.begin_wait(), COLLECTIVE
        try:
            yield
        finally:
            self.waits_for = self.waited_call = None
            timer.end_wait(event)

    def _add_sched_delay(self) -> None:
        if self._delays is not None:
            now = self._delays.read_s()
            self.sched_delay_s += now - self._sched_delay_from
            self._sched_delay_from = now


class SchedulerDelayReader:
    """Reads how long this thread was runnable but had no core to run on, from the second number in
    `/proc/thread-self/schedstat`."""

    def __init__(self) -> None:
        self._file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115  (read at each wait)
        self._number = self._file.fileno()

    @classmethod
    def open(cls) -> SchedulerDelayReader | None:
        """Return a reader, or None if this system has no such file."""
        with suppress(OSError, IndexError, ValueError):
            reader = cls()
            reader.read_s()
            return reader
        return None

    def read_s(self) -> float:
        return int(os.pread(self._number, 64, 0).split()[1]) * 1e-9


#: The progress of this process.
PROGRESS = ProgressTracker()


def watch_wait(wait: Callable[..., Any], is_work: bool) -> Callable[..., Any]:
    """Wrap the ``wait`` of torch's works (``is_work``) or futures, so that the time is counted."""
    what = COLLECTIVE if is_work else "an answer of another rank"

    @wraps(wait)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not PROGRESS.active:
            return wait(self, *args, **kwargs)
        with PROGRESS.waiting(what, PROGRESS.call_of(self)):
            return wait(self, *args, **kwargs)

    return timed


def argument(call: Arguments, position: int, name: str) -> Any:
    """Return an argument that was passed by position or by name, or None if it was not passed."""
    args, kwargs = call
    return args[position] if len(args) > position else kwargs.get(name)


def issue_from(function: str, call: Arguments) -> CollectiveCall | None:
    """Record a call of a function of ``torch.distributed``; see :meth:`ProgressTracker.issue`."""
    if not PROGRESS.active:
        return None
    if function == "batch_isend_irecv":
        operations = argument(call, 0, "p2p_op_list")
        tensor = operations[0].tensor if operations else None
        return PROGRESS.issue(function, tensor, operations[0].group if operations else None)
    position, name, group_position, group_name = ARGUMENTS[function]
    tensor = None if position is None else argument(call, position, name)
    return PROGRESS.issue(function, tensor, argument(call, group_position, group_name))


# -- frames
_IS_INTERNAL: dict[CodeType, bool] = {}


def hide_in_call_sites(file: str) -> None:
    """Leave the modules in a file's folder out of call sites, because they implement
    collectives."""
    _INTERNAL_FOLDERS.append(os.path.dirname(file) + os.sep)


def call_site(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    """Return the innermost frames outside torch and this package's collectives."""
    site: list[tuple[CodeType, int]] = []
    while frame is not None and len(site) < _NUM_FRAMES:
        code = frame.f_code
        is_internal = _IS_INTERNAL.get(code)
        if is_internal is None:
            is_internal = _IS_INTERNAL[code] = code.co_filename.startswith(tuple(_INTERNAL_FOLDERS))
        if not is_internal:
            site.append((code, frame.f_lineno))
        frame = frame.f_back
    return tuple(site)


def where(code: CodeType, line: int) -> str:
    """Return a location as text, such as ``file.py:12 in f``."""
    return f"{code.co_filename}:{line} in {code.co_name}"


def stack_of(thread: int, limit: int = 8) -> list[str]:
    """Return the stack of a thread of this process: the innermost frame, and up to ``limit - 1``
    more frames outside of torch."""
    frame = sys._current_frames().get(thread)
    stack: list[str] = []
    while frame is not None and len(stack) < limit:
        file = frame.f_code.co_filename
        in_torch = bool(stack) and file.startswith(_INTERNAL_FOLDERS[0])
        if file != __file__ and not in_torch:
            stack.append(where(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return stack

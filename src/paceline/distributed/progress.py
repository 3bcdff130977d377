"""Where this process stands: its phase and step, the collectives that it has issued, and the time
that it stood still for them.

Marks cost about a microsecond and are made all the time; whoever wants to know reads them from
another thread (the watchdog). Collectives are marked by the wrappers of
:mod:`paceline.distributed.traffic`. Waits are marked in ``wait`` of torch's own works and futures,
so those of FSDP, DeepSpeed and the pipeline schedules are seen as well.
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

import torch
import torch.distributed as dist

from paceline.distributed.call_log import CallLog, CallRecord

#: Collectives that are remembered.
_KEPT = 32
#: Steps whose times are remembered: as many as pass between two looks of the watchdog, where steps
#: are short.
KEPT_STEPS = 64
#: CollectiveCall sites: so many frames of each.
_FRAMES = 3
#: Frames that a call site does not lie in.
_BELOW = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

#: Of a call: by position, and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
#: function of torch.distributed → (position and name of the tensor or list of tensors, those of the
#: group). Without a tensor: of no size that ranks must have in common.
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
#: Between two ranks: these have no number in their group.
_BETWEEN_TWO = frozenset({"send", "recv", "batch_isend_irecv"})


class CollectiveCall(NamedTuple):
    """A collective that was issued."""

    number: int | None  # among those of its group, from 0; None between two ranks
    function: str
    dtype: torch.dtype | None
    numel: int | None  # None where ranks may differ in it
    group: str
    site: tuple[tuple[CodeType, int], ...]  # innermost first

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
    """Seconds of one step on this rank. ``wait_s``: of them in communication; ``data_s``: of them
    for data, less such waits; ``held_s``: of them without such waits, in which the thread could run
    and got no core (0 where the system does not tell)."""

    step: int
    wall_s: float
    data_s: float
    wait_s: float
    held_s: float
    disturbed: bool  # by a checkpoint that was written beside it


@dataclass
class _Group:
    ranks: list[int]
    numbers: Iterator[int] = field(default_factory=itertools.count)
    issued: int = 0


class ProgressTracker:
    """The marks of one process. All are made in the main thread but those of collectives."""

    def __init__(self) -> None:
        self._cores: SchedulerDelayReader | None = None
        self.box: CallLog | None = None
        self.start(active=False)

    def start(self, active: bool = True, on_cpu: bool = True) -> None:
        """Begin anew, in the thread that trains. Where not ``active`` collectives are not marked.
        ``on_cpu``: it computes by itself, so that it matters whether it has a core."""
        self.active = active
        self.box = CallLog.make() if active else None
        self._cores = SchedulerDelayReader.open() if active and on_cpu else None
        self.held_s = self._held_from = 0.0
        self.thread = threading.get_ident()
        self.phase = "starting"
        self.step: int | None = None
        self.marks = 0  # grows with each sign of progress
        self.waits_for: str | None = None  # what the main thread stands still for
        self.waited_s = self.step_wait_s = 0.0  # in all, and in the last step
        self.last: CollectiveCall | None = None  # issued by the main thread
        self.ring: deque[CollectiveCall] = deque(maxlen=_KEPT)
        self.steps: deque[StepTimes] = deque(maxlen=KEPT_STEPS)
        self._groups: dict[str, _Group] = {}
        #: Seconds of the last step by phase, less the waits for others (``step_wait_s``); with
        #: these they add up to it.
        self.spent_s: dict[str, float] = {}
        # where micro-batches run in threads, these enter phases
        self._phase_lock = threading.Lock()
        self.marked_at = self._phase_at = time.perf_counter()
        self._phase_waited = self._step_at = self._step_waited = self._step_held = 0.0

    # -- phases and steps
    def enter(self, phase: str) -> None:
        """From here on: data, forward, backward, optimizer, logging, evaluation, saving, loading;
        by whichever thread."""
        with self._phase_lock:
            now, waited = time.perf_counter(), self.waited_s
            spent = now - self._phase_at - (waited - self._phase_waited)
            self.spent_s[self.phase] = self.spent_s.get(self.phase, 0.0) + spent
            self.phase, self._phase_at, self._phase_waited = phase, now, waited
        self.marks += 1
        self.marked_at = now

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase within another."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def tick(self) -> None:
        """A sign of progress within a phase."""
        self.marks += 1
        self.marked_at = time.perf_counter()

    def begin_step(self, step: int) -> None:
        """``step``: its number, from 1. The phase is then `data`."""
        self.step = step
        self.enter("data")
        self.spent_s.clear()
        self._add_held()
        self._step_at, self._step_waited = self.marked_at, self.waited_s
        self._step_held = self.held_s

    def end_step(self, disturbed: bool = False) -> None:
        """Between steps the phase is `logging`. ``disturbed``: its time is not a measure of this
        rank's pace."""
        self.enter("logging")
        self._add_held()
        self.step_wait_s = self.waited_s - self._step_waited
        self.steps.append(
            StepTimes(
                step=self.step or 0,
                wall_s=self.marked_at - self._step_at,
                data_s=self.spent_s.get("data", 0.0),
                wait_s=self.step_wait_s,
                held_s=self.held_s - self._step_held,
                disturbed=disturbed,
            )
        )

    # -- collectives
    def issue(self, function: str, tensor: Any, group: dist.ProcessGroup | None) -> None:
        """A collective, or a message between two ranks, is about to be issued. ``tensor``: or a
        list, or None."""
        if not self.active:
            return
        name, known = self._group(group)
        number = None
        if known is not None and function not in _BETWEEN_TWO:
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
        if threading.get_ident() == self.thread:
            self.last = call
            self.marks += 1
            self.marked_at = time.perf_counter()

    def _group(self, group: dist.ProcessGroup | None) -> tuple[str, _Group | None]:
        if group is None:
            group = dist.group.WORLD
        name = getattr(group, "group_name", None)
        if name is None:
            return "", None  # a group that this rank is not in
        known = self._groups.get(name)
        if known is None:
            known = self._groups.setdefault(name, _Group(dist.get_process_group_ranks(group)))
        return name, known

    @property
    def issued(self) -> dict[str, int]:
        """Collectives issued so far, by group."""
        return {name: group.issued for name, group in list(self._groups.items()) if group.issued}

    @property
    def groups(self) -> dict[str, list[int]]:
        """Global ranks of each group that this rank has used."""
        return {name: group.ranks for name, group in list(self._groups.items())}

    # -- waits
    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The main thread stands still for others meanwhile; waits within count once."""
        if threading.get_ident() != self.thread or self.waits_for is not None:
            yield
            return
        begun = self.begin_wait(what)
        try:
            yield
        finally:
            self.end_wait(begun)

    def _add_held(self) -> None:
        if self._cores is not None:
            now = self._cores.read_s()
            self.held_s += now - self._held_from
            self._held_from = now

    def begin_wait(self, what: str) -> float:
        self._add_held()
        self.waits_for = what
        self.marks += 1
        self.marked_at = time.perf_counter()
        return self.marked_at

    def end_wait(self, begun: float) -> None:
        self.waits_for = None
        self.marks += 1
        self.marked_at = now = time.perf_counter()
        self.waited_s += now - begun
        if self._cores is not None:
            self._held_from = self._cores.read_s()


class SchedulerDelayReader:
    """How long this thread could have run and got no core: the second number of
    `/proc/thread-self/schedstat`."""

    def __init__(self) -> None:
        self._file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115  (read at each wait)
        self._number = self._file.fileno()

    @classmethod
    def open(cls) -> SchedulerDelayReader | None:
        """None where this system has no such file."""
        with suppress(OSError, IndexError, ValueError):
            reader = cls()
            reader.read_s()
            return reader
        return None

    def read_s(self) -> float:
        return int(os.pread(self._number, 64, 0).split()[1]) * 1e-9


#: of this process
PROGRESS = ProgressTracker()
COLLECTIVE = "a collective"


def watch_wait(wait: Callable[..., Any], is_work: bool) -> Callable[..., Any]:
    """Wrap ``wait`` of torch's works (``is_work``) or futures so that the time in it is counted."""
    what = COLLECTIVE if is_work else "an answer of another rank"
    pulse = PROGRESS

    @wraps(wait)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not pulse.active or pulse.waits_for is not None or threading.get_ident() != pulse.thread:
            return wait(self, *args, **kwargs)
        begun = pulse.begin_wait(what)
        try:
            return wait(self, *args, **kwargs)
        finally:
            pulse.end_wait(begun)

    return marked


def argument(call: Arguments, place: int, name: str) -> Any:
    """An argument of a call, which was passed by position or by name; None if it was not."""
    args, kwargs = call
    return args[place] if len(args) > place else kwargs.get(name)


def issue_from(function: str, call: Arguments) -> None:
    """As :meth:`ProgressTracker.issue`, from the arguments of a function of
    ``torch.distributed``."""
    if not PROGRESS.active:
        return
    if function == "batch_isend_irecv":
        operations = argument(call, 0, "p2p_op_list")
        tensor = operations[0].tensor if operations else None
        PROGRESS.issue(function, tensor, operations[0].group if operations else None)
        return
    place, name, group_place, group_name = ARGUMENTS[function]
    tensor = None if place is None else argument(call, place, name)
    PROGRESS.issue(function, tensor, argument(call, group_place, group_name))


# -- frames
_IS_BELOW: dict[CodeType, bool] = {}


def call_site(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    """The innermost frames outside torch and this package's collectives."""
    result: list[tuple[CodeType, int]] = []
    while frame is not None and len(result) < _FRAMES:
        code = frame.f_code
        below = _IS_BELOW.get(code)
        if below is None:
            below = _IS_BELOW[code] = code.co_filename.startswith(_BELOW)
        if not below:
            result.append((code, frame.f_lineno))
        frame = frame.f_back
    return tuple(result)


def where(code: CodeType, line: int) -> str:
    """``file.py:12 in f``."""
    return f"{code.co_filename}:{line} in {code.co_name}"


def stack_of(thread: int, limit: int = 8) -> list[str]:
    """Where a thread of this process stands, innermost frame first: that one, and the first ``limit
    - 1`` outside torch."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename == __file__:  # the marks themselves
        frame = frame.f_back
    if frame is None:
        return []
    result = [where(frame.f_code, frame.f_lineno)]
    frame = frame.f_back
    while frame is not None and len(result) < limit:
        if (
            not frame.f_code.co_filename.startswith(_BELOW[0])
            and frame.f_code.co_filename != __file__
        ):
            result.append(where(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return result

"""Count the bytes that this rank sends, by wrapping the functions of torch.distributed.

FSDP, DeepSpeed, the pipeline schedules and :class:`~paceline.distributed.communicator.Communicator`
all call functions of the ``torch.distributed`` package, which are wrapped once per process. The
wrappers count the bytes that a bandwidth-optimal algorithm sends, so that the counts do not depend
on the backend and strategies can be compared. They also report issued collectives to
:data:`~paceline.distributed.timing.progress.PROGRESS`.

Objects (``broadcast_object_list`` and similar) are not counted: they bypass the wrapped functions
and are not part of a step.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from typing import Any

import torch.distributed as dist

from paceline.distributed import torch_compat
from paceline.distributed.call_log import CountedCall
from paceline.distributed.collective_bytes import all_reduce_bytes, scatter_bytes
from paceline.distributed.timing import progress
from paceline.distributed.timing.progress import Arguments, argument

#: Kinds of traffic: collectives, messages between two ranks, copies between the devices of one
#: process, and the pulls and pushes of a parameter server's workers.
KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "send",
    "copy",
    "pull",
    "push",
)


class Traffic:
    """Bytes sent by this rank, by kind (see :data:`KINDS`). Thread-safe."""

    def __init__(self) -> None:
        self.bytes_by_collective: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, collective: str, size_bytes: int) -> None:
        with self._lock:
            self.bytes_by_collective[collective] = (
                self.bytes_by_collective.get(collective, 0) + size_bytes
            )

    @property
    def total(self) -> int:
        with self._lock:
            return sum(self.bytes_by_collective.values())

    def snapshot(self) -> dict[str, int]:
        """Return a copy of the counts."""
        with self._lock:
            return dict(self.bytes_by_collective)


#: The traffic of this process.
TRAFFIC = Traffic()
_MUTED = threading.local()


_CALLS: list[CountedCall] | None = None


@contextmanager
def log_calls() -> Iterator[list[CountedCall]]:
    """Record every counted call of this process within the block, with its times."""
    global _CALLS
    before, _CALLS = _CALLS, []
    try:
        yield _CALLS
    finally:
        _CALLS = before


@contextmanager
def _muted(setting: str, value: object) -> Iterator[None]:
    before = getattr(_MUTED, setting, False)
    setattr(_MUTED, setting, value)
    try:
        yield
    finally:
        setattr(_MUTED, setting, before)


def uncounted(*collectives: str) -> AbstractContextManager[None]:
    """Do not count the traffic of this thread within the block, because it is not part of a
    training step.

    Args:
        collectives: kinds of traffic that are not counted; default: all.
    """
    return _muted("on", frozenset(collectives) or True)


@contextmanager
def inside_collective() -> Iterator[None]:
    """Neither count nor record the calls within one of Paceline's collectives, because the
    collective itself is counted and recorded."""
    with _muted("nested", True), uncounted():
        yield


def counted_again() -> AbstractContextManager[None]:
    """Count again within :func:`uncounted`."""
    return _muted("on", False)


def _all_to_all_bytes(call: Arguments) -> int:
    tensor, group = argument(call, 1, "input"), argument(call, 4, "group")
    sizes: list[int] | None = argument(call, 3, "input_split_sizes")
    if not sizes or not sum(sizes):
        return scatter_bytes(tensor.nbytes, dist.get_world_size(group))
    # What the rank keeps is not sent.
    sent = sum(sizes) - sizes[dist.get_rank(group)]
    return int(tensor.nbytes) * sent // sum(sizes)


#: Function → (kind of traffic, function that returns the bytes sent by a call with its arguments).
_COUNTERS: dict[str, tuple[str, Callable[[Arguments], int]]] = {
    "all_reduce": (
        "all_reduce",
        lambda call: all_reduce_bytes(
            argument(call, 0, "tensor").nbytes, dist.get_world_size(argument(call, 2, "group"))
        ),
    ),
    "all_gather_into_tensor": (
        "all_gather",
        lambda call: scatter_bytes(
            argument(call, 0, "output_tensor").nbytes,
            dist.get_world_size(argument(call, 2, "group")),
        ),
    ),
    "all_gather": (
        "all_gather",
        lambda call: scatter_bytes(
            sum(each.nbytes for each in argument(call, 0, "tensor_list")),
            dist.get_world_size(argument(call, 2, "group")),
        ),
    ),
    "reduce_scatter_tensor": (
        "reduce_scatter",
        lambda call: scatter_bytes(
            argument(call, 1, "input").nbytes, dist.get_world_size(argument(call, 3, "group"))
        ),
    ),
    "reduce_scatter": (
        "reduce_scatter",
        lambda call: scatter_bytes(
            sum(each.nbytes for each in argument(call, 1, "input_list")),
            dist.get_world_size(argument(call, 3, "group")),
        ),
    ),
    "broadcast": ("broadcast", lambda call: argument(call, 0, "tensor").nbytes),
    # All ranks except the destination send their tensor.
    "reduce": ("reduce", lambda call: argument(call, 0, "tensor").nbytes),
    "all_to_all_single": (
        "all_to_all",
        lambda call: _all_to_all_bytes(call),
    ),
    "batch_isend_irecv": (
        "send",
        lambda call: sum(
            each.tensor.nbytes for each in argument(call, 0, "p2p_op_list") if each.op is dist.isend
        ),
    ),
    "send": ("send", lambda call: argument(call, 0, "tensor").nbytes),
}
#: Another name of the same function, which FSDP calls.
_COUNTERS["all_gather_single"] = _COUNTERS["all_gather_into_tensor"]
_COUNTERS["reduce_scatter_single"] = _COUNTERS["reduce_scatter_tensor"]


def count_collectives() -> Traffic:
    """Wrap the functions of ``torch.distributed``, once per process, and return the counters."""
    # `isend` cannot be wrapped, because P2POp compares its argument with the original function.
    torch_compat.hook_collectives(
        _COUNTERS.keys() | progress.ARGUMENTS.keys(), _watched, progress.watch_wait
    )
    return TRAFFIC


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    label, size_of = _COUNTERS.get(name, (None, None))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = Arguments(args, kwargs)
        issued = None
        if not getattr(_MUTED, "nested", False):
            issued = progress.issue_from(name, arguments)
        counted = None
        if size_of is not None and label is not None:
            muted = getattr(_MUTED, "on", False)
            if muted is not True and not (muted and label in muted):
                size_bytes = size_of(arguments)
                TRAFFIC.add(label, size_bytes)
                if _CALLS is not None:
                    counted = _begin(name, label, size_bytes, arguments)
                    _CALLS.append(counted)
        if progress.PROGRESS.timer is None or kwargs.get("async_op"):
            result = function(*args, **kwargs)
        else:
            with progress.PROGRESS.blocking():
                result = function(*args, **kwargs)
        progress.PROGRESS.add_work(result, issued)
        return result if counted is None else _timed(counted, result)

    return call


def _begin(name: str, kind: str, size_bytes: int, call: Arguments) -> CountedCall:
    messages: list[tuple[int, int]] = []
    if name == "batch_isend_irecv":
        operations = argument(call, 0, "p2p_op_list")
        group = operations[0].group if operations else None
        messages = [(each.peer, each.tensor.nbytes) for each in operations if each.op is dist.isend]
    else:
        position, group_name = progress.ARGUMENTS[name][2:]
        group = argument(call, position, group_name)
    if name == "send":
        messages = [(argument(call, 1, "dst"), size_bytes)]
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    now = time.perf_counter()
    return CountedCall(kind, size_bytes, ranks, messages, now, now)


def _timed(counted: CountedCall, result: Any) -> Any:
    def end(_: object = None) -> None:
        counted.end_s = time.perf_counter()

    end()
    if isinstance(result, dist.Work):
        with suppress(RuntimeError):  # messages between two ranks have no future
            result.get_future().add_done_callback(end)
    return result

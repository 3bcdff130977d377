"""Bytes that this rank sends, counted at torch.distributed's own functions, whoever calls them.

FSDP, DeepSpeed, the pipeline schedules and :class:`~paceline.distributed.communicator.Communicator`
all go through the functions of the ``torch.distributed`` package, so these are wrapped, once a
process, to add up what passes. What is counted is what an algorithm optimal in bandwidth sends: the
figure by which strategies are compared, and the same for every backend. The same wrappers tell the
process's :data:`~paceline.distributed.progress.PROGRESS` which collectives were issued.

Objects (``broadcast_object_list`` and its like) are not counted: they go through the functions'
module, not the package, and are no part of a step.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

from paceline.distributed import progress, torch_compat
from paceline.distributed.collectives.schedules import all_reduce_bytes, scatter_bytes
from paceline.distributed.progress import Arguments, argument

#: Names in the count: collectives, messages between two ranks, copies between the devices of one
#: process, and what workers fetch from the servers of a parameter server and send them.
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
    """Bytes sent by this rank, by collective (of :data:`KINDS`). Threads may add at the same
    time."""

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

    def so_far(self) -> dict[str, int]:
        """A copy of the count."""
        with self._lock:
            return dict(self.bytes_by_collective)


#: what this process has sent
TRAFFIC = Traffic()
_MUTED = threading.local()


@contextmanager
def _muted(setting: str, value: object) -> Iterator[None]:
    before = getattr(_MUTED, setting, False)
    setattr(_MUTED, setting, value)
    try:
        yield
    finally:
        setattr(_MUTED, setting, before)


def uncounted(*collectives: str) -> AbstractContextManager[None]:
    """Leave what this thread sends meanwhile out of the count: it is not part of a training step (a
    check, a gather for the report). ``collectives``: names in the count; all where none is given.
    """
    return _muted("on", frozenset(collectives) or True)


@contextmanager
def inside_collective() -> Iterator[None]:
    """As :func:`uncounted`, for the calls of which a collective of our own consists: the call log
    has the collective itself."""
    with _muted("nested", True), uncounted():
        yield


def counted_again() -> AbstractContextManager[None]:
    """Within :func:`uncounted`, a stretch that is counted after all."""
    return _muted("on", False)


#: What a function sends, from its arguments.
_SizeOf = Callable[[Arguments], int]
#: function → (name in the count, what it sends). Position and name of the tensor, then those of the
#: group.
_COUNTERS: dict[str, tuple[str, _SizeOf]] = {
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
    # All but the destination send what they hold.
    "reduce": ("reduce", lambda call: argument(call, 0, "tensor").nbytes),
    "all_to_all_single": (
        "all_to_all",
        lambda call: scatter_bytes(
            argument(call, 1, "input").nbytes, dist.get_world_size(argument(call, 4, "group"))
        ),
    ),
    "batch_isend_irecv": (
        "send",
        lambda call: sum(
            each.tensor.nbytes for each in argument(call, 0, "p2p_op_list") if each.op is dist.isend
        ),
    ),
    "send": ("send", lambda call: argument(call, 0, "tensor").nbytes),
}
#: Names that torch 2.13 prefers for the same functions; FSDP calls these.
_COUNTERS |= {
    new: _COUNTERS[old]
    for new, old in {
        "all_gather_single": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
    }.items()
}


def count_collectives() -> Traffic:
    """Wrap the functions of ``torch.distributed`` (once a process). Returns the process's count."""
    # `isend` cannot be wrapped: P2POp compares it with the function itself.
    torch_compat.hook_collectives(
        _COUNTERS.keys() | progress.ARGUMENTS.keys(), _watched, progress.watch_wait
    )
    return TRAFFIC


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    label, size_of = _COUNTERS.get(name, (None, None))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not getattr(_MUTED, "nested", False):
            progress.issue_from(name, (args, kwargs))
        if size_of is not None and label is not None:
            muted = getattr(_MUTED, "on", False)
            if muted is not True and not (muted and label in muted):
                TRAFFIC.add(label, size_of((args, kwargs)))
        return function(*args, **kwargs)

    return call

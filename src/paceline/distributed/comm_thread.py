"""A thread with a process group of its own, so that communication made of many calls runs beside
backward."""

import queue
import threading
import weakref
from collections.abc import Callable

import torch

from paceline.distributed.communicator import Communicator

Work = Callable[[Communicator], object]


class PendingComm:
    """Work that a thread was given. ``wait`` as that of torch's own works."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._done: torch.Event | None = None

    def wait(self) -> None:
        """Until it is done; on an accelerator the current stream waits, not the host. Raises what
        was raised in the thread."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._done is not None:
            torch.accelerator.current_stream().wait_event(self._done)

    def end(self, error: BaseException | None, done: torch.Event | None = None) -> None:
        self._error, self._done = error, done
        self._ended.set()


class CommThread:
    """Runs what it is given in one thread, one after another, in the order given.

    Every rank of a group gives the same work in the same order; so the collectives within come in
    one order on every rank, whatever else the ranks do meanwhile on other groups. After an error
    nothing more is run: the ranks would no longer agree.

    Args:
        world: all ranks.
        axes: the group along which the work communicates. A collective: every rank of ``world``
            makes its threads in one order.
    """

    def __init__(self, world: Communicator, *axes: str, timeout_s: float = 600.0) -> None:
        self.world = world.split(world.axes.subgroups(axes), timeout_s=timeout_s)
        self._todo: queue.SimpleQueue[tuple[Work, PendingComm, torch.Event | None] | None] = (
            queue.SimpleQueue()
        )
        thread = threading.Thread(
            target=_run, args=(self._todo, self.world), name="paceline-comm", daemon=True
        )
        thread.start()
        weakref.finalize(self, self._todo.put, None)

    def submit(self, work: Work) -> PendingComm:
        """Have ``work(group)`` run; on an accelerator after what the current stream has by now."""
        pending = PendingComm()
        ready = None
        if self.world.device.type != "cpu":
            ready = torch.Event(self.world.device)
            ready.record(torch.accelerator.current_stream())
        self._todo.put((work, pending, ready))
        return pending


def _run(
    todo: queue.SimpleQueue[tuple[Work, PendingComm, torch.Event | None] | None],
    group: Communicator,
) -> None:
    stream = None
    failed: BaseException | None = None
    if group.device.type != "cpu":
        torch.accelerator.set_device_index(group.device.index or 0)
        stream = torch.Stream(group.device)
        torch.accelerator.set_stream(stream)
    while (task := todo.get()) is not None:
        work, pending, ready = task
        done = None
        if failed is None:
            try:
                if stream is not None and ready is not None:
                    stream.wait_event(ready)
                with torch.no_grad():
                    work(group)
                if stream is not None:
                    done = torch.Event(group.device)
                    done.record(stream)
            except BaseException as error:
                failed = error
        pending.end(failed, done)
        del task, work, pending  # else the last one would live until the next comes

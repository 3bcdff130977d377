"""A background thread with a separate process group, to overlap multi-step communication with
backward."""

import queue
import threading
import weakref
from collections.abc import Callable

import torch

from paceline.distributed.communicator import Communicator

Work = Callable[[Communicator], object]


class PendingComm:
    """Work submitted to a :class:`CommThread`. Like a `torch.distributed.Work`, it has ``wait``."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._done: torch.Event | None = None

    def wait(self) -> None:
        """Wait until the work is done, and raise its error if it failed.

        On an accelerator, the current stream waits for the result instead of the host.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._done is not None:
            torch.accelerator.current_stream().wait_event(self._done)

    def end(self, error: BaseException | None, done: torch.Event | None = None) -> None:
        self._error, self._done = error, done
        self._ended.set()


class CommThread:
    """Runs submitted work in one thread, in order.

    Every rank of a group must submit the same work in the same order, so that its collectives run
    in the same order on every rank, independent of communication on other groups. After an error no
    further work runs, because ranks could be at different collectives. The constructor is a
    collective: every rank of ``world`` must create its threads in the same order.

    Args:
        world: communicator of all ranks.
        axes: axes along which the work communicates.
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
        """Schedule ``work(group)``. On an accelerator it runs after the work that is queued on the
        current stream."""
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
        del task, work, pending  # free their tensors before the next work is submitted

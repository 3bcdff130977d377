"""Start worker processes for a long computation. They are spawned, ignore Ctrl-C, and end with
their ``with`` block."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection, get_context, resource_tracker

from paceline.core.processes import hidden_main


@contextmanager
def worker_pool(
    num_workers: int, initialize: Callable[[], None], *, kill_on_error: bool = False
) -> Iterator[ProcessPoolExecutor]:
    """Start ``num_workers`` processes, which call ``initialize`` in the background. They end with
    the block, after the running calls have returned, and with this process.

    Args:
        kill_on_error: whether to kill the processes if an exception leaves the block. Use it only
            with small arguments, because before Python 3.12 a pool with full pipes cannot be
            killed.
    """
    # A fork would copy locks that other threads of this process hold at that moment.
    context = get_context("spawn")
    worker_end, own_end = context.Pipe(duplex=False)
    with hidden_main():
        pool = ProcessPoolExecutor(
            num_workers, context, initializer=_start_worker, initargs=(worker_end, initialize)
        )
        try:
            with _without_interrupts():
                for _ in range(num_workers):
                    pool.submit(int)  # starts a process, because none is idle
            yield pool
        except BaseException:
            if kill_on_error:
                own_end.close()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            own_end.close()
            worker_end.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT for processes started in the block. Ctrl-C is sent to the process group, but
    their parent ends them."""
    # Otherwise the first process starts the tracker, which unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(worker_end: connection.Connection, initialize: Callable[[], None]) -> None:
    def end_with_parent() -> None:
        connection.wait([worker_end])  # readable when the parent has closed its end or has exited
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    initialize()

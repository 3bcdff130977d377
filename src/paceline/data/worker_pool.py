"""Worker processes for a long computation: spawned, deaf to Ctrl-C, and ended with their block."""

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
    """Start ``num_workers`` processes, each of which calls ``initialize`` while this process goes
    on. They end with the block, when the calls under way have returned, and with this process.

    Args:
        kill_on_error: an exception that leaves the block ends them at once. For small arguments
            alone: before Python 3.12 a pool with full pipes cannot be ended so.
    """
    # Spawned: this process may have threads, whose locks a fork would copy as they are.
    context = get_context("spawn")
    watched, held = context.Pipe(duplex=False)
    with hidden_main():
        pool = ProcessPoolExecutor(
            num_workers, context, initializer=_start_worker, initargs=(watched, initialize)
        )
        try:
            with _without_interrupts():
                for _ in range(num_workers):
                    pool.submit(_ready)  # starts a process, as none is idle
            yield pool
        except BaseException:
            if kill_on_error:
                held.close()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            held.close()
            watched.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that start in the block never get Ctrl-C, which goes to the whole group: their
    parent ends them."""
    resource_tracker.ensure_running()  # else the first process starts it, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(watched: connection.Connection, initialize: Callable[[], None]) -> None:
    def end_with_parent() -> None:
        connection.wait([watched])  # readable when the parent has closed its end, or is gone
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    initialize()


def _ready() -> None:
    """What a process is started with."""

"""Ranks of this host for a short piece of work: started from a warm server, ended with the command,
whatever becomes of it."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.errors import PacelineError, RunError
from paceline.core.processes import end_with_launcher, hidden_main
from paceline.launch.fork_server import keep_server_files
from paceline.launch.rank_processes import open_store

#: how long a collective may wait for another rank before the work has failed
_TIMEOUT_S = 60.0


def warm_up(modules: Sequence[str] = ()) -> None:
    """Start the server that the ranks are forked from; it imports torch (and ``modules``) beside
    what the caller does next."""
    import multiprocessing.forkserver

    in_main = threading.current_thread() is threading.main_thread()
    # it ends with the thread that starts it
    bound = ["paceline.launch.parent_death"] if in_main else []
    keep_server_files()
    multiprocessing.set_forkserver_preload(
        [*bound, "paceline.launch.rank_pool", "torch.distributed", *modules]
    )
    # A Ctrl-C in the terminal reaches every process: the command alone answers it, and ends the
    # ranks.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)


def run_on_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 300.0,
    collective_timeout_s: float = _TIMEOUT_S,
) -> list[Any]:
    """``function(world, *args)`` on each of ``num_ranks`` CPU ranks, gloo between them. Returns
    what each returned (picklable), in order of rank.

    Args:
        function: at the top level of a module.
        timeout_s: for all of it.
        collective_timeout_s: how long a rank may wait for another in a collective.

    Raises:
        RunError: a rank failed, died, or took too long.
    """
    # The store lives here: no port is chosen before it is bound, and no rank takes it away by
    # ending early.
    store = open_store()  # on the loopback interface alone
    context = multiprocessing.get_context("forkserver")
    processes: list[Any] = []
    pipes = []
    try:
        with hidden_main():
            for rank in range(num_ranks):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank,
                    args=(
                        function,
                        rank,
                        num_ranks,
                        store.port,
                        theirs,
                        args,
                        collective_timeout_s,
                    ),
                    daemon=True,
                    name=f"rank-{rank}",
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
        return _collect(pipes, timeout_s)
    finally:
        for process in processes:
            process.join(0 if sys.exc_info()[0] else 2)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()


def _collect(pipes: list[Any], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = multiprocessing.connection.wait(
            list(waiting), max(0.0, deadline - time.monotonic())
        )
        if not ready:
            named = ", ".join(str(rank) for rank in waiting.values())
            raise RunError(
                f"no result from rank {named} within {timeout_s:.0f} s",
                fix="ask for fewer ranks or less work",
            )
        for pipe in ready:
            assert isinstance(pipe, multiprocessing.connection.Connection)
            rank = waiting[pipe]
            try:
                ok, value = pipe.recv()
            except (EOFError, OSError):
                raise RunError(
                    f"rank {rank} ended without a message (often: out of memory)",
                    fix="ask for fewer ranks",
                ) from None
            if not ok:
                raise (
                    value
                    if isinstance(value, PacelineError)
                    else RunError(f"rank {rank} failed: {value}")
                )
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    port: int,
    pipe: Any,
    args: tuple[Any, ...],
    timeout_s: float,
) -> None:
    end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    from paceline.distributed.communicator import init_communicator
    from paceline.distributed.environment import RankEnv

    try:
        world = init_communicator(RankEnv(rank, num_ranks, rank, num_ranks), "cpu", timeout_s)
        value = function(world, *args)
        world.barrier()
        world.close()
    except PacelineError as error:
        pipe.send((False, error))
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send((False, f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"))
    else:
        pipe.send((True, value))

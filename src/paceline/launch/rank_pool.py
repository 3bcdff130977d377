"""Run a function on CPU ranks of this host. The ranks are forked from a fork server and end with
the command."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.errors import PacelineError, RunError
from paceline.core.fork_server.server import start_server
from paceline.core.processes import end_with_starter, hidden_main
from paceline.distributed.environment import RankEnv
from paceline.launch.ranks.processes import open_store

#: How long a rank may wait for another in a collective before it fails.
_TIMEOUT_S = 60.0


def warm_up(modules: Sequence[str] = ()) -> None:
    """Start the server that the ranks are forked from. It imports torch and ``modules`` while the
    caller continues."""
    names = ["paceline.launch.rank_pool", "torch.distributed", *modules]
    start_server(["paceline.launch.preload"], {"PACELINE_PRELOAD": " ".join(names)})


def run_on_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_s: float = 300.0,
    collective_timeout_s: float = _TIMEOUT_S,
) -> list[Any]:
    """Call ``function(world, *args)`` on ``num_ranks`` CPU ranks that communicate over Gloo, and
    return the results by rank.

    Args:
        function: function at the top level of a module, with a picklable result.
        timeout_s: time limit for the whole call.
        collective_timeout_s: how long a rank may wait for another in a collective.

    Raises:
        RunError: if a rank failed, died or took too long.
    """
    # This process serves the store. So its port is bound before the ranks connect to it, and the
    # store remains if a rank exits early.
    store = open_store()
    context = multiprocessing.get_context("forkserver")
    processes: list[Any] = []
    pipes = []
    try:
        with hidden_main():
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                env = RankEnv(rank, num_ranks, rank, num_ranks)
                rank_args = (function, env, store.port, sender, args)
                process = context.Process(
                    target=_rank,
                    args=(*rank_args, collective_timeout_s),
                    daemon=True,
                    name=f"rank-{rank}",
                )
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
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
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = multiprocessing.connection.wait(
            list(waiting), max(0.0, deadline - time.monotonic())
        )
        if not ready:
            ranks = ", ".join(str(rank) for rank in waiting.values())
            raise RunError(
                "no result from rank {rank_list} within {timeout_s} s",
                code="no-result-from-rank",
                fix="request fewer ranks or less work",
                rank_list=ranks,
                timeout_s=f"{timeout_s:.0f}",
            )
        for pipe in ready:
            assert isinstance(pipe, multiprocessing.connection.Connection)
            rank = waiting[pipe]
            try:
                succeeded, value = pipe.recv()
            except (EOFError, OSError):
                raise RunError(
                    "rank {rank} ended without a message (often: out of memory)",
                    code="rank-without-message",
                    fix="request fewer ranks",
                    rank=rank,
                ) from None
            if succeeded:
                results[rank] = value
                del waiting[pipe]
            elif isinstance(value, PacelineError):
                raise value
            else:
                raise RunError(
                    "rank {rank} failed: {value}", code="rank-failed", rank=rank, value=value
                )
    return results


def _rank(
    function: Callable[..., Any],
    env: RankEnv,
    port: int,
    pipe: Any,
    args: tuple[Any, ...],
    timeout_s: float,
) -> None:
    end_with_starter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored by the fork server
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    from paceline.distributed.communicator import init_communicator

    try:
        world = init_communicator(env, "cpu", timeout_s)
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

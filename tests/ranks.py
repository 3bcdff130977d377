"""Run a function on real Gloo ranks, forked from a fork server that has imported torch."""

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from paceline.distributed.environment import RankEnv

_PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.optimization",
    "peft",
    "paceline.data.loader",
    "paceline.strategies.ddp.strategy",
    "paceline.strategies.fsdp.strategy",
]
multiprocessing.set_forkserver_preload(_PRELOADED)
#: The fork server that hides no packages; None before its start.
_server_pid: int | None = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_context() -> Any:
    """Return the context of processes that are forked from the fork server.

    The server of a run that a test has started in this process hides packages from its children. It
    is replaced, so that the children that the next test starts find them."""
    global _server_pid
    launcher = sys.modules.get("paceline.launch.fork_server")
    server = vars(multiprocessing.forkserver)["_forkserver"]
    if launcher is not None and launcher._hidden and server._forkserver_pid != _server_pid:
        launcher._stop_server()
        multiprocessing.set_forkserver_preload(_PRELOADED)
    multiprocessing.forkserver.ensure_running()
    _server_pid = server._forkserver_pid
    return multiprocessing.get_context("forkserver")


# How long to wait for the other ranks after one has failed; they may be blocked in a collective.
_GRACE_AFTER_FAILURE_S = 2.0


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    init_process_group: bool = True,
) -> list[Any]:
    """Call ``function(world, *args)`` on each of ``world_size`` ranks; return the results in rank
    order. Fails the test if a rank fails.

    Without ``init_process_group``, the call is ``function(env, *args)`` and the function may create
    the process group.
    """
    import torch

    context = server_context()
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        parent_end, child_end = context.Pipe()
        process = context.Process(
            target=_run_rank,
            args=(function, rank, world_size, port, child_end, args, init_process_group),
            daemon=True,
        )
        process.start()
        child_end.close()
        processes.append(process)
        pipes.append(parent_end)
    results: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(results) < world_size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = multiprocessing.connection.wait(
                waiting, timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    processes[rank].join(1.0)
                    results[rank] = (
                        False,
                        f"rank {rank} died (exit code {processes[rank].exitcode})",
                    )
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE_S)
    finally:
        for pipe in pipes:
            # Closing the pipe lets the rank exit. Until here it may have held what the others need,
            # such as the store or its end of a socket.
            pipe.close()
        for process in processes:
            process.join(5 if len(results) == world_size else 0.5)
            if process.is_alive():
                process.kill()
                process.join()
    errors = [value for ok, value in results.values() if not ok]
    errors += [
        f"rank {rank} returned no result in time"
        for rank in range(world_size)
        if rank not in results
    ]
    assert not errors, "\n".join(errors)
    return [
        torch.load(io.BytesIO(results[rank][1]), weights_only=False) for rank in range(world_size)
    ]


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    pipe: Any,
    args: tuple[Any, ...],
    init_process_group: bool,
) -> None:
    import torch

    from paceline.distributed.communicator import init_communicator

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        env = RankEnv(rank, world_size, rank, world_size)
        if init_process_group:
            world = init_communicator(env, "cpu", 60.0)
            value = function(world, *args)
            world.close()
        else:
            value = function(env, *args)
        buffer = io.BytesIO()
        # Serialized, because a tensor sent through a pipe would share memory with this process.
        torch.save(value, buffer)
        pipe.send((True, buffer.getvalue()))
    except BaseException:
        pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # waits until the test has received the results of all ranks

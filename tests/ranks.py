"""Run a function on real gloo ranks, forked from one warm server that has torch imported."""

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from paceline.distributed.environment import RankEnv

multiprocessing.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch._dynamo",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.optimization",
        "peft",
        "paceline.data.loader",
        "paceline.parallel.ddp.strategy",
        "paceline.parallel.fsdp.strategy",
    ]
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# How long the other ranks may take to give a result after one has failed: they may wait for it in a
# collective.
_AFTER_A_FAILURE_S = 2.0


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    joins: bool = True,
) -> list[Any]:
    """``function(world, *args)`` on each of ``world_size`` ranks; results in order of rank. A
    failed rank fails the test. With ``joins=False`` it is ``function(env, *args)``, and no process
    group exists yet."""
    import torch

    context = multiprocessing.get_context("forkserver")
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_rank, args=(function, rank, world_size, port, theirs, args, joins), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(answers) < world_size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            ready = multiprocessing.connection.wait(
                waiting, timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, f"rank {rank} died")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _AFTER_A_FAILURE_S)
    finally:
        for pipe in pipes:
            # a rank stays until here: it may hold what the others still need (the store, its end of
            # a socket)
            pipe.close()
        for process in processes:
            process.join(5 if len(answers) == world_size else 0.5)
            if process.is_alive():
                process.kill()
                process.join()
    errors = [value for ok, value in answers.values() if not ok]
    errors += [
        f"rank {rank} gave no result in time" for rank in range(world_size) if rank not in answers
    ]
    assert not errors, "\n".join(errors)
    return [
        torch.load(io.BytesIO(answers[rank][1]), weights_only=False) for rank in range(world_size)
    ]


def _rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    pipe: Any,
    args: tuple[Any, ...],
    joins: bool,
) -> None:
    import torch

    from paceline.distributed.communicator import init_communicator

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        env = RankEnv(rank, world_size, rank, world_size)
        if joins:
            world = init_communicator(env, "cpu", 60.0)
            value = function(world, *args)
            world.close()
        else:
            value = function(env, *args)
        buffer = io.BytesIO()
        # by value: a tensor sent as it is would share memory with a process that ends
        torch.save(value, buffer)
        pipe.send((True, buffer.getvalue()))
    except BaseException:
        pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # until the test has heard from every rank

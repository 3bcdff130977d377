"""Run a function on real gloo ranks, forked from one warm server that has torch imported."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from paceline.world.env import RankEnv

multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed", "paceline.parallel.replicated", "paceline.data.loader", "torch._dynamo"]
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """``function(world, *args)`` on each of ``world_size`` ranks; results in order of rank. A failed rank fails the test."""
    import torch

    context = multiprocessing.get_context("forkserver")
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(function, rank, world_size, port, theirs, args), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(mine)
    results, errors = [], []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(timeout_s):
                errors.append(f"rank {rank} gave no result within {timeout_s} s")
                continue
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, f"rank {rank} died"
            if ok:
                results.append(torch.load(io.BytesIO(value), weights_only=False))
            else:
                errors.append(value)
    finally:
        for process in processes:
            process.join(5 if not errors else 0.5)
            if process.is_alive():
                process.kill()
                process.join()
    assert not errors, "\n".join(errors)
    return results


def _rank(function: Callable[..., Any], rank: int, world_size: int, port: int, pipe: Any, args: tuple[Any, ...]) -> None:
    import torch

    from paceline.world.group import open_world

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        world = open_world(RankEnv(rank, world_size, rank, world_size), "cpu", 30.0)
        value = function(world, *args)
        world.close()
        buffer = io.BytesIO()
        torch.save(value, buffer)  # by value: a tensor sent as it is would share memory with a process that ends
        pipe.send((True, buffer.getvalue()))
    except BaseException:
        pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
